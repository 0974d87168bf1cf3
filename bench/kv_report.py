"""What `outrider bench kv` found as Markdown, for bench/results."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from bench.kv import ROWS, Cell
from bench.report import markdown_table

_WORDS = (
    "Waste is the share of the slots held that hold no committed token, averaged over the steps. "
    "In the midst of a pass the tokens that it writes (of prompts, and the last one said) and the "
    "nodes of the trees are held as well and not committed yet: `uncommitted in passes` counts all "
    "of these, too. Pages kept for later requests, which nobody holds, can be taken at any time "
    "and count as free; with `host` as many pages again are kept outside the pool. The "
    "microseconds are CPU time of the scheduler and the pool. At the end of each run the pool's "
    "book was in order and nothing was held."
)


def kv_report(summary: Mapping[str, Any]) -> str:
    """summary: as `outrider bench kv` writes it."""
    ways = summary["ways"]
    rows = [(title, *(text(report) for report in ways.values())) for title, text in _titled()]
    parts = [_header(summary), markdown_table(("", *ways), rows), fill(_WORDS, 120)]
    return "\n\n".join(parts) + "\n"


def _titled() -> list[tuple[str, Cell]]:
    """Rows whose titles say what they belong to, where the table for people indents them."""
    titled, above = [], ""
    for title, text in ROWS:
        if title.startswith(" "):
            titled.append((f"{above}: {title.strip()}", text))
        else:
            above = title.partition(":")[0]
            titled.append((title, text))
    return titled


def _header(summary: Mapping[str, Any]) -> str:
    run, trace = summary["run"], summary["trace"]
    settings = run["settings"]
    facts = (
        f"Revision {run['revision']}; Python {run['python']}. {trace['requests']:,} requests, "
        f"{settings['rate']:g} a step, seed {settings['seed']}: prompts of "
        f"{trace['prompt_tokens']:.0f} tokens on average, answers of {trace['answer_tokens']:.0f} "
        f"with max_tokens {trace['max_tokens']:.0f}, {trace['tokens_per_pass']:.2f} tokens a pass; "
        f"{trace['leaving']} clients lose patience. Pools of {settings['kv_tokens']:,} tokens, "
        f"pages of {settings['page_size']}."
    )
    return (
        f"# KV memory, {run['machine']}, {run['date'][:10]}\n\n"
        f"{fill(facts, 120)}\n\n    {run['command']}"
    )
