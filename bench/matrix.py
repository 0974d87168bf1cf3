"""Every domain's draft on every domain's prompts: what choosing the right draft is worth."""

from collections.abc import Mapping
from typing import Any

from bench.decode import PLAIN, Results

Matrix = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""`<domain>.<draft>.{tau, speedup}`; speedup is None where plain decoding was not measured."""


def matrix_of(results: Results, columns: Mapping[str, Mapping[str, str]]) -> Matrix:
    """columns: by domain and draft, the arm that decoded with it."""
    return {
        domain: {draft: _entry(results, domain, arm) for draft, arm in own.items()}
        for domain, own in columns.items()
    }


def _entry(results: Results, domain: str, arm: str) -> dict[str, Any]:
    report = results[domain][arm].report(results[domain].get(PLAIN))
    return {"tau": report["tau"], "speedup": report["speedup"]}


def matrix_table(matrix: Matrix) -> str:
    """Rows are prompts, columns drafts; each cell says tau, and the speed-up in brackets."""
    drafts = list(next(iter(matrix.values())))
    lines = [f"{'prompts':<10}" + "".join(f"{draft:>14}" for draft in drafts)]
    lines += [
        f"{domain:<10}" + "".join(f"{entry_text(own[draft]):>14}" for draft in drafts)
        for domain, own in matrix.items()
    ]
    return "\n".join(lines)


def entry_text(entry: Mapping[str, Any]) -> str:
    """An entry as "tau (speed-up)", or tau alone."""
    speedup = "" if entry["speedup"] is None else f" ({entry['speedup']:.2f})"
    return f"{entry['tau']:.2f}{speedup}"
