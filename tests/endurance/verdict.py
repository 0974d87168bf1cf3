"""How a long run ends: what people and programs are told of it."""

import json
import sys
from pathlib import Path
from typing import Any, Protocol


class Report(Protocol):
    """What both kinds of run have to say."""

    @property
    def faults(self) -> list[str]: ...

    def as_dict(self) -> dict[str, Any]: ...

    def table(self) -> str: ...


def conclude(report: Report, target: str, out: Path | None) -> int:
    """Prints it, keeps it as JSON where that is wanted; the exit code."""
    print(report.table())
    if out:
        out.write_text(json.dumps({"target": target, **report.as_dict()}, indent=1))
    for fault in report.faults[:20]:
        print(f"WRONG {fault[:1000]}", file=sys.stderr)
    return 1 if report.faults else 0
