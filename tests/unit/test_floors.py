"""The architecture, asserted: imports point down, and some libraries live in one place only.

The source is parsed, not imported, so imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("workers", "cache", "router", "deployments", "bench")

# The longest prefix decides. Same floor: allowed, except between the neighbours below.
FLOORS = {
    "deployments": 4,
    "bench": 4,
    "workers": 3,
    "router": 3,
    "workers.engine": 2,
    "workers.training": 2,
    "cache": 1,
    "workers.speculation": 0,
}
STRANGERS = ({"workers", "router"},)  # side by side on a floor, and must not know each other
HOMES = {  # library -> the only modules that may import it
    "redis": ("cache.similarity",),
    "ray.serve": ("deployments",),
    "fastapi": ("deployments",),
}


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def block_of(module: str) -> str | None:
    """The entry of FLOORS that `module` belongs to; None for a library."""
    return max((name for name in FLOORS if inside(module, name)), key=len, default=None)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every import; `from a import b` gives a.b, be b a module or a name in a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def complaint(importer: str, imported: str) -> str | None:
    """Why `importer` must not import `imported`; None when it may."""
    if imported.startswith("."):
        return "relative import"
    for library, homes in HOMES.items():
        if inside(imported, library) and not any(inside(importer, home) for home in homes):
            return f"{library} belongs in {', '.join(homes)}"
    here, there = block_of(importer), block_of(imported)
    if here is None or there is None:
        return None
    if FLOORS[there] > FLOORS[here]:
        return f"{here} (floor {FLOORS[here]}) is below {there} (floor {FLOORS[there]})"
    if {here, there} in STRANGERS:
        return f"{here} and {there} must not know each other"
    return None


def violations(sources: Mapping[str, str]) -> list[str]:
    """One line per forbidden import in `sources` (module name -> source text)."""
    return [
        f"{module}:{line} imports {imported}: {why}"
        for module, source in sources.items()
        for line, imported in imports(ast.parse(source))
        if (why := complaint(module, imported))
    ]


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules of which each imports the one before it, and the first one the last; if any do."""
    below = {
        module: {
            found
            for _line, name in imports(ast.parse(source))
            for found in (name, name.rpartition(".")[0])
            if found in sources and found != module
        }
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def project_sources() -> dict[str, str]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            file.read_text()
        )
        for file in files
    }


def test_imports_point_down() -> None:
    sources = project_sources()

    assert {"workers.speculation.tree", "cache.kv_pool", "workers.engine"} <= sources.keys()
    assert violations(sources) == []


def test_no_imports_go_in_a_circle() -> None:
    assert circle(project_sources()) == []
    round_about = {
        "a": "from b import c",
        "b": "def f():\n    import d.e",
        "d.e": "from a import g",
    }
    assert circle(round_about)[0] in round_about


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("workers.speculation.tree", "from cache import kv_pool", "is below cache"),
        ("cache.kv_pool", "import workers.engine.pack", "is below workers.engine"),
        ("workers.engine.pack", "from workers import target", "is below workers "),
        ("workers.engine.pack", "from workers.target import load_target", "is below workers "),
        ("workers.training.table", "def f():\n    import workers.request", "is below workers "),
        ("workers.verifier", "from deployments.metrics import steps", "is below deployments"),
        ("router.router", "from bench import decode", "is below bench"),
        ("router.router", "from workers.verifier import Verifier", "must not know each other"),
        ("workers.verifier", "from router.router import Router", "must not know each other"),
        ("router.build", "import redis.asyncio", "redis belongs in cache.similarity"),
        ("cache.kv_pool", "from redis import Redis", "redis belongs in cache.similarity"),
        ("workers.verifier", "from ray import serve", "ray.serve belongs in deployments"),
        ("bench.load", "import fastapi", "fastapi belongs in deployments"),
        ("workers.target", "from .engine import pack", "relative import"),
        ("cache.similarity", "if TYPE_CHECKING:\n    import workers.draft", "is below workers "),
    ],
)
def test_a_forbidden_import_is_caught(module: str, source: str, why: str) -> None:
    assert any(why in found for found in violations({module: source})), violations({module: source})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deployments.app", "from ray import serve\nimport fastapi"),
        ("workers.verifier", "import ray\nfrom workers.speculation.tree import TokenTree"),
        ("workers.engine.pack", "from cache.kv_pool import KVPool\nfrom workers import engine"),
        ("router.fingerprint", "from workers.engine.model_store import cache_dir"),
        ("cache.similarity", "import redis.asyncio"),
        ("deployments.commands.bench", "from bench.decode import run"),
        ("workers.engine.model", "import redistribute, fastapix"),
    ],
)
def test_an_allowed_import_is_let_through(module: str, source: str) -> None:
    assert violations({module: source}) == []


def test_an_ngram_draft_process_stays_small() -> None:
    """Its actor must not load torch or transformers: half a gigabyte per pool member."""
    modules = "workers.draft, workers.hybrid_draft, deployments.draft_actor"
    code = f"import sys, {modules}; print(*{{'torch', 'transformers'}} & sys.modules.keys())"

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == ""
