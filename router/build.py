"""The router as a server runs it: real embeddings, the committed intent model, a cache."""

from collections.abc import Sequence

from cache.similarity import LocalSimilarityCache, RedisSimilarityCache, SimilarityCache
from router.decision import Candidate, check_pool
from router.fingerprint import MiniLMFingerprinter
from router.intent import IntentModel
from router.router import Router


def build_router(
    candidates: Sequence[Candidate],
    redis_url: str | None,
    *,
    threshold: float = 0.85,
    ttl_s: float = 86_400,
    max_entries: int = 8192,
    namespace: str = "default",
    threads: int = 1,
    redis_timeout_s: float = 0.05,
) -> Router:
    """Load MiniLM (several seconds, some 400 MB) and assemble a router around it.

    Args:
        candidates: the pool, in the order in which its members are preferred.
        redis_url: None keeps what is learned in this process alone.
        threshold: cosine above which prompts are similar.
        ttl_s: seconds that evidence lives after its prompt was last recorded.
        max_entries: prompts remembered; a matrix row of 2 kB each.
        namespace: name the target in it: speeds under one target say nothing about another's.
        threads: of torch, for this whole process.
        redis_timeout_s: for each answer; no decision waits for it, only the recording of outcomes.

    Raises:
        ValueError: for a pool whose names clash, limits that make no sense, or a URL that is none.
    """
    check_pool(candidates)  # mistakes first: loading takes a while
    dim = MiniLMFingerprinter.dim
    cache: SimilarityCache = (
        LocalSimilarityCache(dim=dim, ttl_s=ttl_s, max_entries=max_entries)
        if redis_url is None
        else RedisSimilarityCache(
            redis_url,
            namespace=namespace,
            dim=dim,
            ttl_s=ttl_s,
            max_entries=max_entries,
            timeout_s=redis_timeout_s,
        )
    )
    fingerprinter, intent = MiniLMFingerprinter(threads), IntentModel.load()
    return Router(candidates, fingerprinter, intent, cache, threshold=threshold)
