"""What README says of the configuration is what the code does."""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from deployments.config import OutriderConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def defaults(model: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Every key by its dotted path, with its default."""
    found: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            found |= defaults(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = list(value) if isinstance(value, tuple) else value  # as YAML
    return found


def test_the_table_lists_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|", README, re.MULTILINE)

    assert {key: yaml.safe_load(default) for key, default in rows} == defaults(OutriderConfig())


def test_the_large_example_is_the_large_overlay() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = OutriderConfig.model_validate(yaml.safe_load(block))
    overlay = yaml.safe_load((ROOT / "k8s/overlays/llama-70b/rayservice.yaml").read_text())
    [application] = yaml.safe_load(overlay["spec"]["serveConfigV2"])["applications"]

    assert config == OutriderConfig.model_validate(application["args"])
    assert len(config.pool) == 4


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} links to {target}"
