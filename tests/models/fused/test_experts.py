"""Mixture-of-experts layers, compared with float64."""

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

TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
all_dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
WIDTH, INNER = 70, 40


def random_experts(rows: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(rows, experts).argsort(-1)[:, :top_k].to(torch.int32)


# ------------------------------------------------------------------------------ selection


@pytest.mark.sampled_cases
@all_dtypes
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (60, 6), (128, 8), (5, 5), (1, 1)])
def test_top_experts_are_selected(
    device: str, experts: int, top_k: int, renormalize: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(experts)
    parts = torch.randint(-12, 12, (3, 9, experts), device=device) / 4  # nothing to round
    selected, weights = select_experts(
        parts, parts.to(dtype), top_k, dtype, renormalize=renormalize
    )
    logits = parts.sum(0).to(dtype)
    probabilities = logits.float().softmax(-1)
    top = probabilities.topk(top_k, -1).values
    torch.testing.assert_close(probabilities.gather(1, selected.long()), top, atol=1e-6, rtol=1e-5)
    assert all(len({*row}) == top_k for row in selected.tolist())
    counts = top / top.sum(-1, keepdim=True) if renormalize else top
    assert weights.dtype is dtype
    tolerance = torch.finfo(dtype).eps  # the interpreter truncates where a GPU rounds
    torch.testing.assert_close(weights.float(), counts.to(dtype).float(), atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", [slice(None), slice(1), slice(1, 4)])
def test_row_of_nan_selects_valid_experts(device: str, bad: str, where: slice) -> None:
    parts = torch.randn(1, 3, 5, device=device)
    alone, _ = select_experts(parts, parts, 4, torch.float32, renormalize=True)
    parts[0, 1, where] = float(bad)
    selected_experts, _ = select_experts(parts, parts, 4, torch.float32, renormalize=True)
    assert all({*row} < {*range(5)} and len({*row}) == 4 for row in selected_experts.tolist())
    assert torch.equal(selected_experts[[0, 2]], alone[[0, 2]])


# -------------------------------------------------------------------------------- routing


def tiles_of(routing: ExpertRouting) -> list[tuple[int, list[int]]]:
    """Return the expert of each tile that is not empty, and its routed rows."""
    return [
        (expert, routing.order[begin:end].tolist())
        for expert, begin, end in routing.tiles.T.tolist()
        if begin < end
    ]


@given(st.integers(1, 90), st.integers(1, 12), st.data())
def test_every_routed_row_is_in_one_tile_of_its_expert(
    rows: int, experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    same_experts = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 99)))
    selected_experts = random_experts(rows, experts, top_k)
    if same_experts:
        selected_experts = torch.arange(top_k, dtype=torch.int32).expand(rows, -1).contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits_module, "MAX_ROWS", 0)
        patch.setattr(visits_module, "_TILE_R", 4)
        tiles = tiles_of(route_rows(selected_experts, experts))
    routed_rows = [row for _, routing in tiles for row in routing]
    assert sorted(routed_rows) == [*range(rows * top_k)]
    for expert, routing in tiles:
        assert 0 < len(routing) <= 4
        assert {int(selected_experts[row // top_k, row % top_k]) for row in routing} == {expert}


# --------------------------------------------------------------------------------- output


class Layer:
    """Experts whose rows are the middle of larger tensors, filled with NaN around them."""

    def __init__(
        self, device: str, rows: int, experts: int, top_k: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(rows)
        padded = torch.full((rows + 2, WIDTH + 2), float("nan"), device=device, dtype=dtype)
        padded[1:-1, :WIDTH] = torch.randn(rows, WIDTH)
        self.x = padded[1:-1, :WIDTH]
        self.gate_up_weight = torch.randn(experts, 2 * INNER, WIDTH, device=device) / WIDTH**0.5
        self.down = torch.randn(experts, WIDTH, INNER, device=device) / INNER**0.5
        self.gate_up_weight, self.down = self.gate_up_weight.to(dtype), self.down.to(dtype)
        self.experts = random_experts(rows, experts, top_k).to(device)
        self.weights = torch.rand(rows, top_k, device=device)
        self.tolerance = TOLERANCES[dtype]
        idle = torch.ones(experts, dtype=torch.bool, device=device)
        idle[self.experts.flatten().long()] = False
        self.gate_up_weight[idle] = float("nan")
        self.down[idle] = float("nan")

    def parts(self) -> torch.Tensor:
        routing = route_rows(self.experts, len(self.down))
        inner = expert_gate_up(self.x, self.gate_up_weight, routing)
        return expert_down(inner, self.down, self.weights, routing)

    def reference(self) -> torch.Tensor:
        x, at = self.x.double(), self.experts.long()
        both = torch.einsum("rw,rmow->rmo", x, self.gate_up_weight.double()[at])
        gates, ups = both.chunk(2, -1)
        out = torch.einsum("rmo,rmwo->mrw", silu(gates) * ups, self.down.double()[at])
        return out * self.weights.double().T[..., None]


@pytest.mark.sampled_cases
@all_dtypes
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"),
    [(1, 4, 2), (3, 40, 3), (17, 40, 2), (MAX_ROWS, 5, 3), (MAX_ROWS + 1, 5, 3), (70, 90, 1)],
)
def test_expert_gemms_match_the_reference(
    device: str, rows: int, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    """Routed rows are fewer than experts or more, and rows exceed the limit of the small kernel."""
    layer = Layer(device, rows, experts, top_k, dtype)
    selected = layer.parts()
    assert (selected.shape, selected.dtype) == ((top_k, rows, WIDTH), torch.float32)
    torch.testing.assert_close(
        selected.double(), layer.reference(), atol=layer.tolerance, rtol=layer.tolerance
    )


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, in other orders"
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_expert_output_is_batch_invariant(device: str, dtype: torch.dtype) -> None:
    layer = Layer(device, 1000, 20, 4, dtype)
    whole = layer.parts()
    x, experts, weights = layer.x, layer.experts, layer.weights
    for rows in (1, 2, 7, 17, 40, 64, 65, 300):
        layer.x, layer.experts, layer.weights = x[:rows], experts[:rows], weights[:rows]
        assert torch.equal(layer.parts(), whole[:, :rows])
