"""Which vocabulary a folder's tokenizer speaks. Equal size is not equal vocabulary.

No torch here: n-gram drafts check their tables in processes that do without it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """size: number of token ids, added tokens included; fingerprint: hash of every (token, id)."""

    size: int
    fingerprint: str

    def check_same(self, other: "Vocabulary", what: str) -> None:
        """Raises ValueError when `other` is not this vocabulary; `what` names its owner."""
        if self != other:
            raise ValueError(
                f"{what}: its vocabulary ({other.size} tokens, {other.fingerprint}) is not the "
                f"target's ({self.size} tokens, {self.fingerprint}); its guesses would mean other "
                "words. Make it for this target, or leave it out of the pool"
            )


def vocabulary_of(folder: Path) -> Vocabulary:
    """The vocabulary of the tokenizer saved in `folder`.

    Raises ValueError when there is no `tokenizer.json`.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: has no tokenizer.json, so its vocabulary cannot be compared with the "
            "target's; save the fast tokenizer beside the weights"
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    model = saved["model"]["vocab"]
    # Unigram models list [piece, score] pairs in id order; the others map token to id.
    ids = model if isinstance(model, dict) else {pair[0]: i for i, pair in enumerate(model)}
    ids = ids | {added["content"]: added["id"] for added in saved.get("added_tokens", ())}
    ordered = sorted(ids.items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
    return Vocabulary(size=max(ids.values()) + 1, fingerprint=digest[:16])
