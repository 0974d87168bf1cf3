"""A language-model draft in training: some of the target's layers, learning to do without the rest.

Embeddings and head stay the target's. Only the columns of the head that matter are computed.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from workers.engine.model import keep_layers
from workers.training.batch import Batch


class LMStudent:
    """The `workers.training.distil.Student` of an lm draft.

    layers: which of the target's it starts from; vocabulary [K]: the target's ids of the tokens
    that it is trained to tell apart. Raises ValueError for layers that the target does not have.
    """

    def __init__(self, target: Path, layers: tuple[int, ...], vocabulary: Tensor) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, attn_implementation="sdpa"
        )
        keep_layers(self.model, layers)
        self.vocabulary = vocabulary
        head: Any = self.model.get_output_embeddings()
        self.model.get_input_embeddings().requires_grad_(False)
        head.requires_grad_(False)
        self._head = head.weight[vocabulary]

    def unroll(self, batch: Batch, ahead: int) -> list[Tensor]:
        """It reads tokens only, so that however far ahead, it is asked one token after another."""
        size = batch.tokens.shape[1]
        columns = torch.arange(size, device=batch.tokens.device)
        real = columns >= batch.first[:, None]
        output = self.model.get_decoder()(
            input_ids=batch.tokens,
            attention_mask=real.long(),
            position_ids=(columns - batch.first[:, None]).clamp(min=0),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[:, batch.prompt - 1 : size - 1]
        return [hidden] * ahead

    def to(self, device: torch.device) -> None:
        self.model.to(device)  # type: ignore[arg-type]
        self.vocabulary, self._head = self.vocabulary.to(device), self._head.to(device)

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = hidden @ self._head.to(hidden.dtype).T
        return scores


def save_lm(student: LMStudent, folder: Path, target: Path) -> None:
    """A folder like any model's, with the target's tokenizer."""
    student.model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
