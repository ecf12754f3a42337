"""Layers in which each token visits a few of many experts, against the same in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import silu

from roseinfer.kernels.triton import experts as visits_module
from roseinfer.kernels.triton.experts import (
    MAX_ROWS,
    expert_down,
    expert_gate_up,
    route_rows,
    select_experts,
)

if TYPE_CHECKING:
    from roseinfer.kernels.triton.experts import ExpertRouting

FAR = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
every_dtype = pytest.mark.parametrize("dtype", FAR, ids=str)
WIDTH, INNER = 70, 40


def chosen(rows: int, experts: int, most: int) -> torch.Tensor:
    return torch.rand(rows, experts).argsort(-1)[:, :most].to(torch.int32)


# ------------------------------------------------------------------------------ who is chosen


@every_dtype
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "most"), [(4, 2), (60, 6), (128, 8), (5, 5), (1, 1)])
def test_the_likeliest_are_chosen(
    device: str, experts: int, most: int, renormalize: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(experts)
    parts = torch.randint(-12, 12, (3, 9, experts), device=device) / 4  # nothing to round
    got, weights = select_experts(parts, parts.to(dtype), most, dtype, renormalize=renormalize)
    logits = parts.sum(0).to(dtype)
    want = logits.float().softmax(-1)
    top = want.topk(most, -1).values
    torch.testing.assert_close(want.gather(1, got.long()), top, atol=1e-6, rtol=1e-5)
    assert all(len({*row}) == most for row in got.tolist())
    counts = top / top.sum(-1, keepdim=True) if renormalize else top
    assert weights.dtype is dtype
    far = torch.finfo(dtype).eps  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(weights.float(), counts.to(dtype).float(), atol=1e-6, rtol=far)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", [slice(None), slice(1), slice(1, 4)])
def test_a_row_of_no_numbers_chooses_experts_that_there_are(
    device: str, bad: str, where: slice
) -> None:
    parts = torch.randn(1, 3, 5, device=device)
    alone, _ = select_experts(parts, parts, 4, torch.float32, renormalize=True)
    parts[0, 1, where] = float(bad)
    found, _ = select_experts(parts, parts, 4, torch.float32, renormalize=True)
    assert all({*row} < {*range(5)} and len({*row}) == 4 for row in found.tolist())
    assert torch.equal(found[[0, 2]], alone[[0, 2]])


# ---------------------------------------------------------------------- who goes where


def tiles_of(visits: ExpertRouting) -> list[tuple[int, list[int]]]:
    """Return the expert of every tile that there is, and its visits."""
    return [
        (expert, visits.order[begin:end].tolist())
        for expert, begin, end in visits.tiles.T.tolist()
        if begin < end
    ]


@given(st.integers(1, 90), st.integers(1, 12), st.data())
def test_every_visit_is_in_one_tile_of_its_expert(
    rows: int, experts: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(1, experts))
    crowded = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 99)))
    found = chosen(rows, experts, most)
    if crowded:
        found = torch.arange(most, dtype=torch.int32).expand(rows, -1).contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits_module, "MAX_ROWS", 0)
        patch.setattr(visits_module, "_TILE_R", 4)
        tiles = tiles_of(route_rows(found, experts))
    every = [visit for _, visits in tiles for visit in visits]
    assert sorted(every) == [*range(rows * most)]
    for expert, visits in tiles:
        assert 0 < len(visits) <= 4
        assert {int(found[visit // most, visit % most]) for visit in visits} == {expert}


# ------------------------------------------------------------------------------ what comes out


class Layer:
    """Experts whose rows are the middle of larger tensors that are all NaN around them."""

    def __init__(self, device: str, rows: int, experts: int, most: int, dtype: torch.dtype) -> None:
        torch.manual_seed(rows)
        around = torch.full((rows + 2, WIDTH + 2), float("nan"), device=device, dtype=dtype)
        around[1:-1, :WIDTH] = torch.randn(rows, WIDTH)
        self.x = around[1:-1, :WIDTH]
        self.gate_up_weight = torch.randn(experts, 2 * INNER, WIDTH, device=device) / WIDTH**0.5
        self.down = torch.randn(experts, WIDTH, INNER, device=device) / INNER**0.5
        self.gate_up_weight, self.down = self.gate_up_weight.to(dtype), self.down.to(dtype)
        self.experts = chosen(rows, experts, most).to(device)
        self.weights = torch.rand(rows, most, device=device)
        self.far = FAR[dtype]
        idle = torch.ones(experts, dtype=torch.bool, device=device)
        idle[self.experts.flatten().long()] = False
        self.gate_up_weight[idle] = float("nan")
        self.down[idle] = float("nan")

    def parts(self) -> torch.Tensor:
        visits = route_rows(self.experts, len(self.down))
        inner = expert_gate_up(self.x, self.gate_up_weight, visits)
        return expert_down(inner, self.down, self.weights, visits)

    def truth(self) -> torch.Tensor:
        x, at = self.x.double(), self.experts.long()
        both = torch.einsum("rw,rmow->rmo", x, self.gate_up_weight.double()[at])
        gates, ups = both.chunk(2, -1)
        out = torch.einsum("rmo,rmwo->mrw", silu(gates) * ups, self.down.double()[at])
        return out * self.weights.double().T[..., None]


@every_dtype
@pytest.mark.parametrize(
    ("rows", "experts", "most"),
    [(1, 4, 2), (3, 40, 3), (17, 40, 2), (MAX_ROWS, 5, 3), (MAX_ROWS + 1, 5, 3), (70, 90, 1)],
)
def test_rows_visit_their_experts(
    device: str, rows: int, experts: int, most: int, dtype: torch.dtype
) -> None:
    """Fewer visits than experts, more of them, and more rows than need no table."""
    layer = Layer(device, rows, experts, most, dtype)
    got = layer.parts()
    assert (got.shape, got.dtype) == ((most, rows, WIDTH), torch.float32)
    torch.testing.assert_close(got.double(), layer.truth(), atol=layer.far, rtol=layer.far)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, in other orders"
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_among_any_rows(device: str, dtype: torch.dtype) -> None:
    layer = Layer(device, 1000, 20, 4, dtype)
    whole = layer.parts()
    x, experts, weights = layer.x, layer.experts, layer.weights
    for rows in (1, 2, 7, 17, 40, 64, 65, 300):
        layer.x, layer.experts, layer.weights = x[:rows], experts[:rows], weights[:rows]
        assert torch.equal(layer.parts(), whole[:, :rows])
