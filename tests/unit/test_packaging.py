"""What is installed: every package is listed, and the lock covers what pyproject asks for."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = {"bench", "cache", "deployments", "drafts", "router", "tests", "workers"}
DATA_PACKAGES = {"drafts"}  # weights and their cards, no code


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    lines += (ROOT / "requirements-no-deps.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def libraries(folders: Iterable[str]) -> set[str]:
    """Names of the distributions that the Python files below `folders` import."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    owners = packages_distributions()
    return {canonicalize_name(owners[top][0]) for top in tops - OURS}


def declared(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def test_what_is_imported_is_declared() -> None:
    project = PYPROJECT["project"]
    runtime = declared(project["dependencies"])
    dev = declared(project["optional-dependencies"]["dev"])

    assert libraries(OURS - {"tests", "drafts"}) - runtime == set()
    assert libraries({"tests"}) - runtime - dev == set()


def test_every_package_is_listed() -> None:
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("[a-z]*/**/__init__.py")
        if init.relative_to(ROOT).parts[0] not in {"tests", "build"}
    }

    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found | DATA_PACKAGES


def test_the_lock_satisfies_the_dependencies() -> None:
    pins = locked()
    project = PYPROJECT["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["dev"]

    for requirement in map(Requirement, asked):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not locked: run `make lock`"
        assert requirement.specifier.contains(version), f"{requirement} but {version} is locked"


def test_the_lock_names_versions_only() -> None:
    """No hashes, no addresses, no local labels: any index that has the version will do."""
    for name in ("requirements.lock", "requirements-no-deps.lock"):
        for line in (ROOT / name).read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.]+", line), line
