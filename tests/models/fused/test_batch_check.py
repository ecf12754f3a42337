"""The trial of batches compares rows of many sizes of batches with the same rows among few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roseinfer.models.fused_checks import is_batch_invariant


class Rows:
    """Stands for a model whose rows depend on their token and their position."""

    device = torch.device("cpu")
    shape = SimpleNamespace(vocab_size=50, max_length=90)

    def __init__(
        self, wrong_from: int = 1 << 30, wrong_row: int = 0, wrong_layer: int | None = None
    ) -> None:
        self.sizes: list[int] = []
        self._wrong_from = wrong_from
        self._wrong_row = wrong_row
        self._wrong_layer = wrong_layer

    def logits(self, tokens: Any, positions: Any, last_rows: Any, attention: Any) -> torch.Tensor:
        self.sizes.append(len(tokens))
        made = torch.stack([tokens, positions], 1).double()
        wrong = made.clone()
        if len(tokens) >= self._wrong_from:
            wrong[self._wrong_row, 1] += 2**-20
        for layer in range(2):
            key = (wrong if self._wrong_layer == layer else made)[:, None]
            attention.store_and_attend(layer, made.view(-1, 1, 2), key, made.view(-1, 1, 2))
        made = wrong if self._wrong_layer is None else made
        return made if last_rows is None else made[last_rows]


def test_sizes_up_to_the_largest_batch_are_tried() -> None:
    model: Any = Rows()
    assert is_batch_invariant(model, 300)
    assert {1, 2, 16, 17, 65, 128, 257, 300} <= set(model.sizes)
    assert max(model.sizes) == 300


@pytest.mark.parametrize(
    ("size", "row"), [(2048, 0), (700, 63), (129, -1), (300, -64), (2112, 5), (96, 80)]
)
def test_a_row_that_differs_in_its_last_bit_is_found(size: int, row: int) -> None:
    model: Any = Rows(wrong_from=size, wrong_row=row)
    assert not is_batch_invariant(model, 2112)


def test_some_logits_of_the_largest_batches_are_compared() -> None:
    model: Any = Rows(wrong_from=4000, wrong_row=62)
    assert not is_batch_invariant(model, 4000)
    assert is_batch_invariant(model, 3999)


@pytest.mark.parametrize("layer", [0, 1])
def test_any_row_whose_keys_differ_is_found(layer: int) -> None:
    """Logits are rounded, and a layer's difference may be gone in those of the rows looked at."""
    model: Any = Rows(wrong_from=1000, wrong_row=501, wrong_layer=layer)
    assert not is_batch_invariant(model, 2112)
