"""Pool members by name, for commands that run in one process."""

from pathlib import Path

from deployments.config import DraftConfig, default_pool
from workers.draft import DraftSpec

PLAIN = "none"


def find_draft(name: str, domain: str | None = None) -> DraftSpec:
    """The draft that a user means by `name`: a member of the default pool, a kind, or a folder.

    A kind (`ngram`, `lm`) stands for its member made for `domain`, else for its first member.
    Raises ValueError listing the choices.
    """
    pool = default_pool()
    exact = [member for member in pool if member.name == name]
    kind = [member for member in pool if member.kind == name]
    fitting = [member for member in kind if domain is not None and member.domain == domain]
    for member in (*exact, *fitting, *kind):
        return member.spec()
    if (Path(name) / "config.json").is_file():
        return DraftConfig(name=Path(name).resolve().name, kind="ngram", path=name).spec()
    names = ", ".join(member.name for member in pool)
    raise ValueError(
        f"draft: {name!r} is no member of the pool ({names}), no kind (ngram, lm), and no folder "
        f"with a config.json; use {PLAIN!r} for plain decoding"
    )
