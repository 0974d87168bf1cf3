"""The pool's common language: what a draft may be called and what it reads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.eagles import LAYERS, save_tiny_eagle, tiny_eagle
from workers.draft import DraftSpec, Features
from workers.load_draft import feature_layers_of


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "eagle"}, r"an eagle draft needs a path, its folder$"),
        ({"kind": "hybrid"}, r"an hybrid draft needs a path, its folder$"),
        ({"kind": "eagle", "path": "p", "verification": "ratio"}, r"verification ratio is for"),
        ({"kind": "hybrid", "path": "p", "verification": "ratio"}, r"verification ratio is for"),
        ({"kind": "ngram", "children": 0}, r"children: 0 is not 1 or more$"),
        ({"kind": "hybrid", "path": "p", "children": -1}, r"children: -1 is not 1 or more$"),
        ({"kind": "eagle", "path": "p", "layers": (1,)}, r"layers are for lm drafts$"),
        ({"kind": "ngram", "layers": (1,)}, r"layers are for lm drafts$"),
        ({"kind": "lm"}, r"an lm draft needs either path or layers$"),
        ({"kind": "lm", "path": "p", "layers": (1,)}, r"an lm draft needs either path or layers$"),
    ],
    ids=str,
)
def test_a_draft_that_cannot_be_is_refused_by_name(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^drafts\.d: {message}"):
        DraftSpec("d", **spec)


def test_eagles_and_hybrids_read_hidden_states() -> None:
    specs = [
        DraftSpec("a", "ngram", verification="ratio"),
        DraftSpec("b", "lm", layers=(0,), verification="ratio"),
        DraftSpec("c", "eagle", path="p", children=1),
        DraftSpec("d", "hybrid", path="p"),
    ]
    assert [spec.reads_features for spec in specs] == [False, False, True, True]


def test_layers_are_put_side_by_side_in_the_order_asked_for() -> None:
    values = torch.arange(24.0).reshape(3, 4, 2)
    features = Features(7, (2, 5, 11, 12), values)
    assert torch.equal(features.of((2, 5, 11, 12)), values.flatten(1))
    assert torch.equal(features.of((11, 2)), torch.cat([values[:, 2], values[:, 0]], 1))
    with pytest.raises(ValueError, match="not in tuple"):
        features.of((2, 3))


def test_the_target_shows_every_layer_that_some_draft_reads(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for name, layers in (("one", (2, 1)), ("other", (2,))):
        model = tiny_eagle(tiny_folder, feature_layers=layers)
        save_tiny_eagle(model, tmp_path / name, tiny_folder)
    save_tiny_eagle(tiny_eagle(tiny_folder), tmp_path / "both" / "eagle", tiny_folder)
    plain, shallow = DraftSpec("n", "ngram"), DraftSpec("l", "lm", layers=(0,))
    other = DraftSpec("o", "eagle", path=str(tmp_path / "other"))
    one = DraftSpec("e", "eagle", path=str(tmp_path / "one"))
    both = DraftSpec("h", "hybrid", path=str(tmp_path / "both"))
    assert feature_layers_of([plain, shallow]) == ()
    assert feature_layers_of([plain, other]) == (2,)
    assert feature_layers_of([other, one, plain]) == (1, 2)
    assert feature_layers_of([both]) == LAYERS
    with pytest.raises(ValueError, match="is no eagle draft"):
        feature_layers_of([DraftSpec("n", "eagle", path=str(tiny_folder))])
