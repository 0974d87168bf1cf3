"""Pool members by name, for commands that run in one process."""

from dataclasses import replace
from pathlib import Path

from deployments.config import DOMAINS, SHIPPED_DRAFTS, default_pool
from workers.draft import DraftKind, DraftSpec
from workers.engine.model_store import is_default
from workers.hybrid_draft import kind_of, member_folder

PLAIN = "none"
KINDS = ("hybrid", "chain", "ngram", "eagle", "lm")
"""What stands for the shipped draft of a domain, a chain of it, or one of its members."""


def find_draft(
    name: str, *, target: str, domain: str | None = None, plain: str = PLAIN
) -> DraftSpec:
    """The draft that a user means by `name`: a member of the default pool, a kind, or a folder.

    A kind stands for the pool's member made for `domain`, or for part of it; without such a domain,
    for the first member's. The shipped drafts are the default target's: for another `target`,
    `ngram` has no table. Raises ValueError listing the choices; `plain` is the command's word for
    no draft.
    """
    pool = {member.name: member.spec() for member in default_pool()}
    if name in pool:
        return pool[name]
    if name == "ngram" and not is_default(target):
        return DraftSpec("ngram", "ngram")
    if name in KINDS:
        return _part(name, domain if domain in DOMAINS else DOMAINS[0])
    kind = kind_of(Path(name))
    if kind is not None:
        return DraftSpec(Path(name).resolve().name, kind, path=name)
    raise ValueError(
        f"draft: {name!r} is no member of the pool ({', '.join(pool)}), no kind "
        f"({', '.join(KINDS)}), and no folder of a draft or a model; use {plain!r} for plain "
        "decoding"
    )


def _part(kind: str, domain: str) -> DraftSpec:
    """A shipped draft, or what it is made of, by itself."""
    folder = SHIPPED_DRAFTS / domain
    whole = DraftSpec(domain, "hybrid", path=str(folder), domain=domain)
    if kind == "hybrid":
        return whole
    if kind == "chain":
        return replace(whole, name=f"{domain}.chain", children=1)
    member: DraftKind = "ngram" if kind == "ngram" else "eagle"
    path = str(member_folder("hybrid", folder, member))
    return DraftSpec(f"{domain}.{kind}", member, path=path, domain=domain)
