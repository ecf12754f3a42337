"""Check for batch invariance: rows of batches of many sizes equal those of small ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roseinfer.models.fused_checks import is_batch_invariant


class RowModel:
    """Stand-in for a model whose rows depend on their token and position."""

    device, ranks = torch.device("cpu"), None
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
        rows = torch.stack([tokens, positions], 1).double()
        wrong_rows = rows.clone()
        if len(tokens) >= self._wrong_from:
            wrong_rows[self._wrong_row, 1] += 2**-20
        for layer in range(2):
            key = (wrong_rows if self._wrong_layer == layer else rows)[:, None]
            attention.store_and_attend(layer, rows.view(-1, 1, 2), key, rows.view(-1, 1, 2))
        rows = wrong_rows if self._wrong_layer is None else rows
        return rows if last_rows is None else rows[last_rows]


def test_batch_sizes_up_to_the_largest_are_checked() -> None:
    model: Any = RowModel()
    assert is_batch_invariant(model, 300)
    assert {1, 2, 16, 17, 65, 128, 257, 300} <= set(model.sizes)
    assert max(model.sizes) == 300


@pytest.mark.parametrize(
    ("size", "row"), [(2048, 0), (700, 63), (129, -1), (300, -64), (2112, 5), (96, 80)]
)
def test_row_that_differs_in_its_last_bit_is_detected(size: int, row: int) -> None:
    model: Any = RowModel(wrong_from=size, wrong_row=row)
    assert not is_batch_invariant(model, 2112)


def test_logits_of_the_largest_batches_are_compared() -> None:
    model: Any = RowModel(wrong_from=4000, wrong_row=96)
    assert not is_batch_invariant(model, 4000)
    assert is_batch_invariant(model, 3999)


def test_few_of_many_rows_are_computed_alone() -> None:
    model: Any = RowModel(wrong_from=8000, wrong_row=8255, wrong_layer=1)
    assert not is_batch_invariant(model, 8256)
    assert model.sizes.count(64) <= 33 + 16 + 2


@pytest.mark.parametrize("layer", [0, 1])
def test_row_with_different_keys_is_detected(layer: int) -> None:
    """Logits are rounded, so the difference of a layer may vanish in the compared rows."""
    model: Any = RowModel(wrong_from=1000, wrong_row=501, wrong_layer=layer)
    assert not is_batch_invariant(model, 2112)
