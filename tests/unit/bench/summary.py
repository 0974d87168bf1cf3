"""A small result, as `outrider bench decode` would write it."""

from typing import Any

from bench.decode import Results, Tally, summarise
from bench.matrix import matrix_of
from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal, TokenTree

COLUMNS = {domain: {"code": "code", "zh": "hybrid"} for domain in ("code", "zh")}


def summary() -> dict[str, Any]:
    """Two domains, two arms and a draft for the matrix, two temperatures."""
    return {
        "temperatures": {"0.0": _found(slower=1), "0.8": _found(slower=2)},
        "run": {
            "command": "outrider bench decode --matrix",
            "revision": "0123456789ab",
            "date": "2026-01-02T03:04:05+00:00",
            "machine": "Abacus, 2 cores",
            "versions": {"torch": "2.13.0"},
            "python": "3.11.7",
            "settings": {
                "target": "/models/tiny",
                "dtype": "float32",
                "device": "cpu",
                "budget": 8,
                "max_tokens": 64,
                "prompts": {"code": 3, "zh": 2},
            },
        },
    }


def _found(slower: int) -> dict[str, Any]:
    results = {domain: _tallies(slower) for domain in COLUMNS}
    asked: Results = {
        domain: {name: own[name] for name in ("plain", "hybrid")} for domain, own in results.items()
    }
    return summarise(asked) | {"matrix": matrix_of(results, COLUMNS)}


def _tallies(slower: int) -> dict[str, Tally]:
    plain = Tally(4.0 * slower, tokens=40, steps=40, texts=["a"])
    hybrid = Tally(1.0 * slower, 40, 16 * slower, tested=30, accepted=24, texts=["a"])
    hybrid.members.update(table=1500, suffix=9)
    hybrid.reliability.add(
        Proposal(TokenTree.chain([5, 6]), (0.75, 0.25)), Verdict((0,), 1, False, 2)
    )
    return {"plain": plain, "hybrid": hybrid, "code": Tally(2.0, 40, 25, texts=["a"])}
