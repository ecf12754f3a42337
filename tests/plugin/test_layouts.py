"""Tensors that lie in memory in other ways hold the same values."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_roseinfer.cases.payload import VIEWS, lay_out
from pytest_roseinfer.cases.strategies import strided_views

TENSOR = torch.arange(2 * 3 * 2 * 4, dtype=torch.float32).view(2, 3, 2, 4)


@given(st.data())
def test_a_view_has_the_same_values(data: st.DataObject) -> None:
    assert torch.equal(data.draw(strided_views(TENSOR)), TENSOR)


def test_no_two_layouts_have_the_same_strides_and_all_are_drawn() -> None:
    strides = {lay_out(TENSOR, layout).stride() for layout in VIEWS}
    assert len(strides) == len(VIEWS)
    drawn: set[tuple[int, ...]] = set()

    @given(strided_views(TENSOR))
    def draw(view: torch.Tensor) -> None:
        drawn.add(view.stride())

    draw()
    assert drawn == strides
