"""Which attention the kernel of prompts takes: what it computes, and where it is the fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer.kernels.cuda import prefill_attention
from roseinfer.kernels.cuda.prefill_attention import (
    PromptSizes,
    can_rotate_queries,
    prefill_tile_tokens,
)
from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = LayerTraits(1.0)


@pytest.fixture(autouse=True)
def on_a_gpu_with_warpgroups(monkeypatch: pytest.MonkeyPatch) -> list[PromptSizes]:
    """Have the kernel compiled, as it were; return for what."""
    compiled: list[PromptSizes] = []

    def load(sizes: PromptSizes, device: torch.device) -> object:
        del device
        compiled.append(sizes)
        return object()

    monkeypatch.setattr(prefill_attention.KERNEL, "load", load)
    monkeypatch.setattr(
        prefill_attention, "supports_wgmma", lambda _, dtype: dtype is torch.bfloat16
    )
    return compiled


def given(
    heads: int = 8, dim: int = 128, block_size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries that lie beside keys and values, and caches that are a layer of many."""
    query = torch.zeros((40, heads + 4, dim), dtype=dtype)[:, :heads]
    keys, values = (torch.zeros((3, 5, 2, block_size, dim), dtype=dtype)[1] for _ in range(2))
    return query, keys, values


def asked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    traits: LayerTraits = PLAIN,
    *,
    most: int = 500,
    longest: int = 5000,
) -> int:
    return prefill_tile_tokens(query, keys, values, traits, most=most, longest=longest)


@pytest.mark.parametrize(
    ("heads", "tokens"), [(2, 128), (4, 64), (6, 32), (8, 32), (14, 16), (16, 16), (32, 8)]
)
def test_a_tile_has_as_many_tokens_as_its_rows_allow(
    on_a_gpu_with_warpgroups: list[PromptSizes], heads: int, tokens: int
) -> None:
    assert asked(*given(heads)) == tokens
    assert on_a_gpu_with_warpgroups == [PromptSizes(128, heads // 2, 64)]


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 192])
def test_blocks_that_tiles_divide_or_that_divide_tiles(block_size: int) -> None:
    assert asked(*given(block_size=block_size)) == 32


LAYERS = {
    "a window": replace(PLAIN, window=100),
    "a cap": replace(PLAIN, softcap=30.0),
    "sinks": replace(PLAIN, sinks=torch.zeros(8)),
    "slopes": replace(PLAIN, slopes=torch.zeros(8)),
}


@pytest.mark.parametrize("what", LAYERS)
def test_layers_that_ask_for_more_go_elsewhere(what: str) -> None:
    assert not asked(*given(), traits=LAYERS[what])


WRONG = {
    "small blocks": given(block_size=4),
    "blocks that no tile divides": given(block_size=48),
    "heads of 80": given(dim=80),
    "heads of 256": given(dim=256),
    "float16": given(dtype=torch.float16),
    "too many query heads": given(heads=66),
}


@pytest.mark.parametrize("what", WRONG)
def test_sizes_that_it_does_not_compute_go_elsewhere(
    on_a_gpu_with_warpgroups: list[PromptSizes], what: str
) -> None:
    assert not asked(*WRONG[what])
    assert not on_a_gpu_with_warpgroups, "nothing is compiled in vain"


def test_tensors_that_lie_otherwise_go_elsewhere() -> None:
    query, keys, values = given()
    wide = torch.zeros((40, 8, 256), dtype=torch.bfloat16)
    spread = torch.zeros((5, 2, 64, 256), dtype=torch.bfloat16)[..., :128]
    turned = torch.zeros((5, 64, 2, 128), dtype=torch.bfloat16).transpose(1, 2)
    odd = torch.zeros(40 * 8 * 128 + 4, dtype=torch.bfloat16)[4:].view(40, 8, 128)
    assert not asked(wide[..., ::2], keys, values)
    assert not asked(odd, keys, values)
    assert not asked(query, spread, spread)
    assert not asked(query, turned, turned)
    assert not asked(query, keys.half(), values.half())


def test_few_tokens_and_short_contexts_go_elsewhere() -> None:
    assert asked(*given(), most=17) == 32
    assert not asked(*given(), most=16)
    for dim, tokens in ((64, 48), (128, 32)):
        assert asked(*given(dim=dim), longest=6 * tokens) == tokens
        assert not asked(*given(dim=dim), longest=6 * tokens - 1)


def test_whole_heads_that_are_not_normed_are_rotated_by_the_kernel() -> None:
    query, *_ = given()
    table, gain = torch.zeros((100, 128), dtype=torch.bfloat16), torch.ones(128)
    assert can_rotate_queries(query, RotaryEmbedding(table, table))
    assert not can_rotate_queries(query, RotaryEmbedding(table, table, gain, gain))
    part, spread = table[:, :64].contiguous(), table.T.contiguous().T
    for other in (part, spread, table.float()):
        assert not can_rotate_queries(query, RotaryEmbedding(other, other))
