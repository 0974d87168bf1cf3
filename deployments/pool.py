"""Pool members by name, and a verifier over them, for commands that run in one process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from joblib import cpu_count

from deployments.config import DOMAINS, SHIPPED_DRAFTS, default_pool
from workers.draft import DraftKind, DraftSpec, InlineDraft
from workers.engine.model_store import is_default, resolve
from workers.hybrid_draft import kind_of, member_folder
from workers.load_draft import feature_layers_of, load_draft
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.verifier import OnVerdict, Verifier, build_verifier

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


_ALONE = Limits(max_running=1)


def open_verifier(
    target: TargetSpec, drafts: Sequence[DraftSpec], on_verdict: OnVerdict | None = None
) -> tuple[Target, Verifier]:
    """A target, and a verifier that serves one request at a time with any of the drafts, inline.

    Raises ValueError for what cannot be loaded, or does not fit together.
    """
    loaded = load_target(replace(target, feature_layers=feature_layers_of(drafts)))
    return loaded, verifier_over(loaded, target, drafts, on_verdict)


def verifier_over(
    target: Target,
    spec: TargetSpec,
    drafts: Sequence[DraftSpec],
    on_verdict: OnVerdict | None = None,
    limits: Limits = _ALONE,
) -> Verifier:
    """The same over a target that is loaded already, from `spec`, for as many as `limits` say."""
    folder, threads = resolve(spec.model), spec.threads or cpu_count()
    clients = {
        draft.name: InlineDraft(
            load_draft(draft, folder, dtype=spec.dtype, threads=threads, device=spec.device)
        )
        for draft in drafts
    }
    return build_verifier(target, clients, limits, drafts, on_verdict)
