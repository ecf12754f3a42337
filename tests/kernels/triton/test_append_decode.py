"""Append and attend in one launch, over a cache poisoned with NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import BadArgument
from roseinfer.attention.reference import append_and_attend_reference
from roseinfer.kernels.triton import decode_attention as decode_triton
from roseinfer.kernels.triton.decode_attention import append_and_attend
from tests.attention.layer_traits import KINDS, WINDOWS, traits_of
from tests.kv.twins import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Sequence


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Tolerances for one rounding to the dtype, after fp32 sums in another order."""
SCRATCH = 0


class Case:
    """Sequences of given lengths, in scattered blocks, and a new token for each.

    ``None`` instead of a length is a padding row.
    """

    def __init__(
        self,
        device: str,
        lengths: list[int | None],
        *,
        q_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        traits: Sequence[str] = (),
        window: int = 17,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths) + head_dim)
        self.size = block_size
        self.device = device
        self.stored = [length or 0 for length in lengths]
        self.real = [row for row, length in enumerate(lengths) if length is not None]
        needed = [0 if length is None else length // block_size + 1 for length in lengths]
        blocks = sum(needed) + 2
        shuffled = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
        width = max([1, *needed])
        rows = []
        for count in needed:
            rows.append([shuffled.pop() for _ in range(count)] + [SCRATCH] * (width - count))
        self.tables = torch.tensor(rows, device=device)
        self.lengths = torch.tensor(self.stored, device=device)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        shape = (blocks, kv_heads, block_size, head_dim)
        self.caches = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in "kv"]
        for row in range(len(lengths)):
            for position in range(self.stored[row]):
                for cache in self.caches:
                    self.slot(cache, row, position)[:] = noise(kv_heads, head_dim)
        self.query = noise(len(lengths), q_heads, head_dim)
        self.key = noise(len(lengths), kv_heads, head_dim)
        self.value = noise(len(lengths), kv_heads, head_dim)
        self.traits = traits_of(traits, q_heads, head_dim, device, window=window)

    def slot(self, cache: torch.Tensor, row: int, position: int) -> torch.Tensor:
        block = int(self.tables[row, position // self.size])
        return cache[block, :, position % self.size]

    def run(self) -> torch.Tensor:
        new = self.query, self.key, self.value
        keys, values = self.caches
        return append_and_attend(*new, keys, values, self.tables, self.lengths, self.traits)

    def by_reference(self, caches: list[torch.Tensor]) -> torch.Tensor:
        new = self.query, self.key, self.value
        keys, values = caches
        return append_and_attend_reference(
            *new, keys, values, self.tables, self.lengths, self.traits
        )

    def stored_as_expected(self) -> list[torch.Tensor]:
        """Return copies of the caches with the new tokens stored."""
        caches = [cache.clone() for cache in self.caches]
        for cache, new in zip(caches, (self.key, self.value), strict=True):
            for row, length in enumerate(self.stored):
                self.slot(cache, row, length)[:] = new[row]
        return caches

    def truth(self, caches: list[torch.Tensor]) -> torch.Tensor:
        """Compute attention in float64, one sequence and head at a time."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        group = self.query.shape[1] // self.key.shape[1]
        for row, length in enumerate(self.stored):
            keys, values = (
                torch.stack([self.slot(cache, row, at) for at in range(length + 1)]).double().cpu()
                for cache in caches
            )
            for head in range(self.query.shape[1]):
                query = self.query[row, head].double().cpu()
                weights = self.weights(keys[:, head // group] @ query, head)
                out[row, head] = weights @ values[:, head // group]
        return out

    def weights(self, products: torch.Tensor, head: int) -> torch.Tensor:
        """Compute weights from a head's products with all keys, trait by trait."""
        traits = self.traits
        scores = products * traits.scale
        if traits.softcap is not None:
            scores = (scores / traits.softcap).tanh() * traits.softcap
        if traits.slopes is not None:
            bias = torch.arange(len(scores)) - (len(scores) - 1)
            scores = scores + bias * traits.slopes[head].double().cpu()
        if traits.window is not None:
            scores[: -traits.window] = float("-inf")
        if traits.sinks is not None:
            sink = traits.sinks[head].double().cpu()[None]
            return torch.cat((scores, sink)).softmax(0)[:-1]
        return scores.softmax(0)


def check(case: Case) -> None:
    """Compare with the reference and float64, and both caches whole, bit for bit.

    The results of padding rows are not compared: they all write to one slot.
    """
    expected, referred = case.stored_as_expected(), [cache.clone() for cache in case.caches]
    truth, reference = case.truth(expected), case.by_reference(referred)
    got = case.run()
    assert not got.isnan().any()
    got, reference, truth = (each[case.real].double().cpu() for each in (got, reference, truth))
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(got, reference, atol=tolerance, rtol=1e-5)
    torch.testing.assert_close(got, truth, atol=tolerance, rtol=1e-5)
    for cache, want, by_reference in zip(case.caches, expected, referred, strict=True):
        assert_same_bits(cache[1:], want[1:], "the cache")
        assert_same_bits(by_reference[1:], want[1:], "the reference's cache")


@pytest.mark.sampled_cases
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [5, 64, 80, 96])
def test_every_head_size_and_dtype(device: str, head_dim: int, dtype: torch.dtype) -> None:
    check(Case(device, [1, 4, 6], head_dim=head_dim, dtype=dtype))


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("q_heads", "kv_heads"),
    [(1, 1), (4, 4), (4, 1), (6, 2), (10, 2), (24, 3), (32, 2), (20, 1)],
)
def test_every_grouping_of_query_heads(device: str, q_heads: int, kv_heads: int) -> None:
    check(Case(device, [7, 2], q_heads=q_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 128])
def test_where_a_block_begins_and_ends(device: str, block_size: int) -> None:
    """The first token of a sequence, the last of a block, the first of the next block."""
    check(Case(device, [0, block_size - 1, block_size], block_size=block_size))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("block_size", [16, 64])
def test_contexts_in_parts(
    device: str, block_size: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts at, before and after the end of a context; some of them are empty."""
    monkeypatch.setattr(decode_triton, "_num_splits", lambda *_: parts)
    check(Case(device, [0, 63, 64, 65, 130], block_size=block_size))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_as_with_more_programs(
    device: str, block_size: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are smaller, and the next kernel cannot run at the same time."""
    monkeypatch.setattr(decode_triton, "_warps", lambda *_: 1)
    monkeypatch.setattr(decode_triton, "_MAX_PDL_PROGRAMS", 0)
    lengths = [None, 15, 16, 31, 33, 64, 100]
    check(Case(device, lengths, block_size=block_size, head_dim=head_dim, dtype=torch.bfloat16))


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_as_many_parts_as_it_takes_by_itself(device: str, sequences: int) -> None:
    lengths: list[int | None] = [200, 3, 129]
    check(Case(device, lengths[:sequences], block_size=16))


def test_a_part_of_large_scores_outweighs_the_others(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are merged by their largest scores, wherever these are."""
    monkeypatch.setattr(decode_triton, "_num_splits", lambda *_: 3)
    for loud in (10, 100, 180):
        case = Case(device, [190], block_size=16)
        case.slot(case.caches[0], 0, loud)[:] *= 20
        check(case)


def test_padding_rows_touch_the_scratch_block_alone(device: str) -> None:
    case = Case(device, [None, 5, None, 4])
    before = [cache.clone() for cache in case.caches]
    check(case)
    for cache, was in zip(case.caches, before, strict=True):
        assert not cache[SCRATCH, :, 0].isnan().any(), "where padding is stored"
        assert_same_bits(cache[SCRATCH, :, 1:], was[SCRATCH, :, 1:], "the rest of scratch")


@pytest.mark.sampled_cases
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [3, 16, 64])
def test_windows(device: str, window: int, block_size: int) -> None:
    """Sequences shorter than the window, equally long, and longer by one and by many."""
    lengths: list[int | None] = [None, 0, max(0, window - 2), window - 1, window, window + 70]
    check(Case(device, lengths, block_size=block_size, traits=["window"], window=window))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)
def test_layers_that_ask_for_more(
    device: str, names: Sequence[str], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_triton, "_num_splits", lambda *_: parts)
    check(Case(device, [0, 5, 16, 17, 130], block_size=16, q_heads=6, traits=names))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("parts", [2, 8])
def test_a_window_in_parts(device: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_triton, "_num_splits", lambda *_: parts)
    lengths: list[int | None] = [0, 99, 100, 101, 300]
    check(Case(device, lengths, block_size=16, traits=["window", "sinks"], window=100))


def test_what_left_the_window_is_not_read(device: str) -> None:
    """Its blocks may be freed and reused: NaN in them does not matter."""
    case = Case(device, [50], block_size=4, traits=["window"], window=9)
    before = case.run()
    for cache in case.caches:
        for position in range(50 + 1 - 9):
            case.slot(cache, 0, position)[:] = float("nan")
    case.tables[:, : (50 + 1 - 9) // 4] = SCRATCH
    assert_same_bits(case.run(), before, "the attention")
    case.slot(case.caches[0], 0, 50 + 1 - 9)[:] *= 3
    assert (case.run() - before).abs().max() > 1e-3


def test_queries_keys_and_values_that_share_a_tensor(device: str) -> None:
    case = Case(device, [5, 9], q_heads=2, kv_heads=2)
    together = torch.full((2, 4, 3, 2, 8), float("nan"), device=device)
    for at, name in enumerate(("query", "key", "value")):
        together[:, 1, at] = getattr(case, name)
        setattr(case, name, together[:, 1, at])
    assert not case.key.is_contiguous()
    check(case)


def test_heads_whose_elements_lie_apart(device: str) -> None:
    case = Case(device, [5, 9])
    for name in ("query", "key", "value"):
        tensor = getattr(case, name)
        wide = torch.full((*tensor.shape[:2], 16), float("nan"), device=device)
        wide[..., ::2] = tensor
        setattr(case, name, wide[..., ::2])
    check(case)


def test_lengths_and_tables_that_are_columns_of_one_matrix(device: str) -> None:
    """Slots pass columns of a larger tensor."""
    case = Case(device, [5, 9, 0])
    rows = torch.cat([case.lengths[:, None], case.lengths[:, None] * 0 + 9999, case.tables], 1)
    case.lengths, case.tables = rows[:, 0], rows[:, 2:]
    assert case.lengths.stride(0) > 1
    check(case)


def test_caches_of_other_strides(device: str) -> None:
    """Caches in which a block's layers, or a token's heads, are contiguous."""
    case = Case(device, [5, 9])
    for order in ((2, 0, 1, 3), (0, 2, 1, 3)):
        back = [order.index(dim) for dim in range(4)]
        case.caches = [cache.permute(order).contiguous().permute(back) for cache in case.caches]
        assert not case.caches[0].is_contiguous()
        check(case)


@pytest.mark.parametrize("apart", [(0,), (0, 1)], ids=["unlike", "elements apart"])
def test_caches_whose_strides_it_cannot_follow_are_refused(
    device: str, apart: tuple[int, ...]
) -> None:
    case = Case(device, [3])
    for at in apart:
        case.caches[at] = case.caches[at].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(BadArgument, match=r"same strides, the last of them 1; they have \(64, 32"):
        case.run()


def test_heads_that_do_not_fit_are_refused(device: str) -> None:
    case = Case(device, [3])
    case.query = case.query[:, :3]
    with pytest.raises(BadArgument, match="3 query heads of 8 do not fit caches of"):
        case.run()


def test_the_context_and_the_new_token_matter(device: str) -> None:
    """Results depend on them, without which the tests above could not fail."""
    case = Case(device, [5])
    before = case.run()
    case.slot(case.caches[1], 0, 0)[:] += 1
    changed = case.run()
    assert (changed - before).abs().max() > 1e-3
    case.value = case.value + 1
    assert (case.run() - changed).abs().max() > 1e-3
