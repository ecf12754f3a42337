"""Attention of several new tokens per sequence, compared with the reference."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AppendPolicy, AttentionPath, BadArgument, KVBlockManager
from roseinfer.attention.reference import paged_attention_reference
from roseinfer.attention.triton import TritonAttention
from roseinfer.kernels.triton.prefill_attention import paged_attention_chunks
from roseinfer.kv.manager import StepBatch
from roseinfer.kv.storage import IndexStaging
from roseinfer.layer_traits import LayerTraits
from tests.attention.layer_traits import KINDS, WINDOWS, traits_of

if TYPE_CHECKING:
    from collections.abc import Sequence


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Case:
    """Sequences as (tokens before, new tokens), all stored, and queries of the new tokens.

    The new tokens are tiled as in a forward pass; the cache is poisoned.
    """

    def __init__(
        self,
        device: str,
        sequences: list[tuple[int, int]],
        *,
        q_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        traits: Sequence[str] = (),
        window: int = 17,
    ) -> None:
        torch.manual_seed(len(sequences) + head_dim)
        lengths = [before + new for before, new in sequences]
        self.counts = [new for _, new in sequences]
        blocks = sum(-(-length // block_size) for length in lengths) + 1
        self.kv = KVBlockManager(
            1, kv_heads, head_dim, block_size, blocks, device, dtype, AppendPolicy(triton=False)
        )
        self.kv.keys.fill_(float("nan"))
        self.kv.values.fill_(float("nan"))
        self.lists: list[list[int]] = [[] for _ in lengths]
        # In turns, so that no sequence's blocks are adjacent.
        for at in range(max(lengths)):
            rows = [row for row, length in enumerate(lengths) if at < length]
            new = torch.randn(2, len(rows), kv_heads, head_dim, device=device).to(dtype)
            self.kv.append_token_batch(0, [self.lists[row] for row in rows], *new)
        self.query = torch.randn(sum(self.counts), q_heads, head_dim, device=device).to(dtype)
        self.traits = traits_of(traits, q_heads, head_dim, device, window=window)
        self.path_counts: Counter[str] = Counter()
        lists = [[block_ids] for block_ids in self.lists]
        num_decodes = next((at for at, count in enumerate(self.counts) if count > 1), len(lists))
        self.batch = StepBatch(self.kv, lists, self.counts, lengths, num_decodes)
        self.attention = TritonAttention(
            [self.traits],
            self.kv,
            IndexStaging(self.kv.device, Counter()),
            self.path_counts,
        )
        self.attention.prepare(self.batch)

    def run(self) -> torch.Tensor:
        return self.attention.attend(self.batch, 0, self.query)

    def reference(self) -> torch.Tensor:
        return paged_attention_reference(
            self.kv, 0, self.query, self.lists, self.counts, self.traits
        )


def check(case: Case) -> None:
    got, want = case.run(), case.reference()
    assert case.path_counts[AttentionPath.CHUNK_TRITON] == 1
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, atol=TOLERANCE[case.query.dtype], rtol=1e-5)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [5, 64, 80, 96])
def test_every_head_size_and_dtype(device: str, head_dim: int, dtype: torch.dtype) -> None:
    check(Case(device, [(0, 5), (3, 4)], head_dim=head_dim, dtype=dtype))


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("q_heads", "kv_heads"),
    [(1, 1), (4, 4), (4, 1), (6, 2), (10, 2), (24, 3), (32, 2), (20, 1)],
)
def test_every_grouping_of_query_heads(device: str, q_heads: int, kv_heads: int) -> None:
    check(Case(device, [(2, 7), (0, 2)], q_heads=q_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_every_block_size(device: str, block_size: int) -> None:
    check(Case(device, [(0, block_size + 1), (block_size, 2)], block_size=block_size))


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 33, 70])
def test_whole_prompts_of_one_tile_and_of_more(device: str, tokens: int) -> None:
    check(Case(device, [(0, tokens)], q_heads=4, kv_heads=1))


@pytest.mark.parametrize("before", [1, 4, 63, 64, 65, 130])
def test_a_chunk_behind_what_is_stored(device: str, before: int) -> None:
    """At, before and after the end of a tile of context."""
    check(Case(device, [(before, 3)], block_size=16))


def test_sequences_of_different_counts_in_one_launch(device: str) -> None:
    """Chunks of long and short prompts, with single tokens among them, not sorted to the front."""
    check(Case(device, [(0, 40), (9, 2), (0, 3), (7, 1), (70, 17)]))


def test_behind_sequences_of_a_single_token(device: str) -> None:
    case = Case(device, [(3, 1), (8, 1), (2, 6), (0, 5)])
    check(case)
    assert case.path_counts[AttentionPath.DECODE_TRITON] == 1


@pytest.mark.sampled_cases
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(device: str, window: int) -> None:
    """Chunks that begin, and end, before the window's edge, at it and after it."""
    edges = [(0, window + 3), (max(0, window - 2), 4), (window, 2), (window + 70, 20)]
    check(Case(device, edges, block_size=16, traits=["window"], window=window))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)
def test_layers_that_ask_for_more(device: str, names: Sequence[str]) -> None:
    check(Case(device, [(0, 2), (3, 20), (130, 5)], block_size=16, q_heads=6, traits=names))


def test_what_left_the_window_is_not_read(device: str) -> None:
    """No token is read before the first that the chunk's first token attends to."""
    case = Case(device, [(40, 3)], traits=["window"], window=9)
    before = case.run()
    blocks = case.lists[0]
    for cache in (case.kv.keys, case.kv.values):
        cache[0, blocks[: (40 - 9 + 1) // 4]] = float("nan")
    torch.testing.assert_close(case.run(), before, atol=0, rtol=0)
    case.kv.keys[0, blocks[(40 - 9 + 1) // 4]] *= 3
    assert (case.run() - before).abs().max() > 1e-3


def test_a_query_of_other_strides(device: str) -> None:
    case = Case(device, [(5, 3), (0, 9)])
    wide = torch.full((12, 3, 4, 16), float("nan"), device=device)
    wide[:, 1, :, ::2] = case.query
    case.query = wide[:, 1, :, ::2]
    check(case)


def test_what_comes_later_is_not_seen(device: str) -> None:
    """Later tokens of the chunk, and the rest of its last block, are masked."""
    case = Case(device, [(2, 3)])
    before = case.run()
    case.kv.values[0, case.lists[0][-1], :, 1:] = 1e30
    torch.testing.assert_close(case.run(), before, atol=0, rtol=0)
    case.kv.values[0, case.lists[0][-1], :, 0] = 1e3  # the chunk's last token
    after = case.run()
    torch.testing.assert_close(after[:2], before[:2], atol=0, rtol=0)
    assert (after[2] - before[2]).abs().max() > 1


def test_the_prefix_matters(device: str) -> None:
    case = Case(device, [(5, 3)])
    before = case.run()
    case.kv.values[0, case.lists[0][0], :, 0] += 1
    assert ((case.run() - before).abs().amax((1, 2)) > 1e-3).all()


def test_heads_that_do_not_fit_are_refused(device: str) -> None:
    case = Case(device, [(0, 3)])
    keys, values = case.kv.keys[0], case.kv.values[0]
    none = (torch.zeros(1, dtype=torch.int64, device=device),) * 4
    with pytest.raises(BadArgument, match="3 query heads of 8 do not fit 2 KV heads of 8"):
        paged_attention_chunks(
            case.query[:, :3],
            keys,
            values,
            none[0][None],
            none,
            LayerTraits(1.0),
            tile_q=16,
            longest=3,
        )
