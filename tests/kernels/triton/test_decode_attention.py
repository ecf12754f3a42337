"""The Triton decode kernel, compared with the reference, over a cache poisoned with NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, KVBlockManager
from roseinfer.attention.reference import paged_attention_reference
from roseinfer.kernels.triton import decode_attention as decode_triton
from roseinfer.kernels.triton.decode_attention import paged_attention_decode
from tests.attention.layer_traits import KINDS, WINDOWS, traits_of

if TYPE_CHECKING:
    from collections.abc import Sequence


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Tolerances for one rounding to the dtype, after fp32 sums in another order."""


class Case:
    """Sequences of given lengths in a cache with NaN in all slots without a token."""

    def __init__(
        self,
        device: str,
        lengths: list[int],
        *,
        q_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        traits: Sequence[str] = (),
        window: int = 17,
    ) -> None:
        torch.manual_seed(len(lengths) + head_dim)
        policy = AppendPolicy(triton=False)
        blocks = sum(-(-length // block_size) for length in lengths) + 1
        self.kv = KVBlockManager(1, kv_heads, head_dim, block_size, blocks, device, dtype, policy)
        self.kv.keys.fill_(float("nan"))
        self.kv.values.fill_(float("nan"))
        self.lists = [
            self.kv.register_prefill_layer(
                0, *torch.randn(2, 1, kv_heads, length, head_dim, device=device).to(dtype)
            )
            for length in lengths
        ]
        self.query = torch.randn(len(lengths), q_heads, head_dim, device=device).to(dtype)
        self.lengths = torch.tensor(lengths, device=device)
        width = max(map(len, self.lists))
        rows = [block_ids + [0] * (width - len(block_ids)) for block_ids in self.lists]
        self.tables = torch.tensor(rows, device=device)
        self.traits = traits_of(traits, q_heads, head_dim, device, window=window)

    def decode(self) -> torch.Tensor:
        return paged_attention_decode(
            self.query,
            self.kv.keys[0],
            self.kv.values[0],
            self.tables,
            self.lengths,
            self.traits,
        )

    def reference(self) -> torch.Tensor:
        ones = [1] * len(self.lists)
        return paged_attention_reference(self.kv, 0, self.query, self.lists, ones, self.traits)


def assert_close(case: Case) -> None:
    got, want = case.decode(), case.reference()
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, atol=TOLERANCE[case.query.dtype], rtol=1e-5)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [5, 64, 80, 96])
def test_every_head_size_and_dtype(device: str, head_dim: int, dtype: torch.dtype) -> None:
    assert_close(Case(device, [1, 4, 5], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"),
    [(1, 1), (4, 4), (4, 1), (6, 2), (10, 2), (24, 3), (32, 2), (8, 1)],
)
def test_every_grouping_of_query_heads(device: str, q_heads: int, kv_heads: int) -> None:
    assert_close(Case(device, [7, 2], q_heads=q_heads, kv_heads=kv_heads))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 700])
def test_contexts_that_are_split(device: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths at, before and after the end of a part, next to a sequence of one token."""
    monkeypatch.setattr(decode_triton, "_num_splits", lambda *_: 2)
    assert_close(Case(device, [length, 1], block_size=16))


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_every_block_size(device: str, block_size: int) -> None:
    assert_close(Case(device, [block_size, block_size + 1, 2], block_size=block_size))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(device: str, window: int) -> None:
    """Sequences shorter than the window, equally long, and longer by one and by many."""
    lengths = [1, max(1, window - 1), window, window + 1, window + 70]
    assert_close(Case(device, lengths, block_size=16, traits=["window"], window=window))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)
def test_layers_that_ask_for_more(device: str, names: Sequence[str]) -> None:
    assert_close(Case(device, [1, 5, 16, 17, 130], block_size=16, q_heads=6, traits=names))


def test_a_query_of_other_strides(device: str) -> None:
    case = Case(device, [5, 9])
    wide = torch.full((2, 3, 4, 16), float("nan"), device=device)
    wide[:, 1, :, ::2] = case.query
    case.query = wide[:, 1, :, ::2]
    assert_close(case)


def test_what_lies_behind_the_last_token_is_not_used(device: str) -> None:
    case = Case(device, [5])
    before = case.decode()
    case.kv.values[0, case.lists[0][-1], :, 1:] = 1e30
    torch.testing.assert_close(case.decode(), before, atol=0, rtol=0)


def test_the_context_matters(device: str) -> None:
    """Results depend on it, without which the tests above could not fail."""
    case = Case(device, [5])
    before = case.decode()
    case.kv.values[0, case.lists[0][0], :, 0] += 1
    assert (case.decode() - before).abs().max() > 1e-3


def test_heads_that_do_not_fit_are_refused(device: str) -> None:
    case = Case(device, [3])
    case.query = case.query[:, :3]
    with pytest.raises(BadArgument, match="3 query heads of 8 do not fit caches of"):
        case.decode()


def test_queries_of_another_dtype_are_refused(device: str) -> None:
    case = Case(device, [3])
    case.query = case.query.to(torch.bfloat16)
    with pytest.raises(BadArgument, match=r"queries of torch\.bfloat16 do not fit caches of"):
        case.decode()
