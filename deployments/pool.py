"""Pool members by name, for commands that run in one process."""

from pathlib import Path

from deployments.config import DraftConfig, default_pool
from workers.draft import DraftKind, DraftSpec
from workers.engine.model_store import is_default
from workers.training.ngram_table import TOKENS

PLAIN = "none"


def find_draft(
    name: str, *, target: str, domain: str | None = None, plain: str = PLAIN
) -> DraftSpec:
    """The draft that a user means by `name`: a member of the default pool, a kind, or a folder.

    A kind (`ngram`, `lm`) stands for its member made for `domain`, else for its first member. The
    shipped tables speak the default target's tokens: for another `target`, `ngram` has no table.
    Raises ValueError listing the choices; `plain` is the command's word for no draft.
    """
    pool = default_pool()
    exact = [member for member in pool if member.name == name]
    kind = [member for member in pool if member.kind == name]
    if not is_default(target) and name == "ngram":
        kind = [DraftConfig(name="ngram", kind="ngram")]
    fitting = [member for member in kind if domain is not None and member.domain == domain]
    for member in (*exact, *fitting, *kind):
        return member.spec()
    if (Path(name) / "config.json").is_file():
        kind_there: DraftKind = "ngram" if (Path(name) / TOKENS).is_file() else "lm"
        return DraftSpec(Path(name).resolve().name, kind_there, path=name)
    names = ", ".join(member.name for member in pool)
    raise ValueError(
        f"draft: {name!r} is no member of the pool ({names}), no kind (ngram, lm), and no folder "
        f"with a config.json; use {plain!r} for plain decoding"
    )
