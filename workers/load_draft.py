"""Which kind of draft a spec asks for, and what it reads of the target.

All kinds are imported late: n-gram drafts live in processes without torch.
"""

from collections.abc import Sequence
from pathlib import Path

from workers.draft import Draft, DraftSpec


def load_draft(
    spec: DraftSpec,
    target: Path,
    *,
    dtype: str = "float32",
    threads: int = 1,
    device: str = "cpu",
) -> Draft:
    """Load a pool member for the target in folder `target`.

    dtype, threads, device ("cpu" or "cuda"): for drafts that run a model. Raises ValueError when it
    does not fit the target.
    """
    if spec.kind == "lm":
        from workers.lm_draft import load_lm_draft

        return load_lm_draft(spec, target, dtype=dtype, threads=threads, device=device)
    from workers.hybrid_draft import load_hybrid_draft

    return load_hybrid_draft(spec, target, threads=threads, device=device)


def feature_layers_of(specs: Sequence[DraftSpec]) -> tuple[int, ...]:
    """The target's layers whose output some of these drafts read, in order.

    Raises ValueError when a draft's folder does not say.
    """
    readers = [spec for spec in specs if spec.reads_features]
    if not readers:
        return ()
    from workers.hybrid_draft import feature_layers

    return tuple(sorted({layer for spec in readers for layer in feature_layers(spec)}))
