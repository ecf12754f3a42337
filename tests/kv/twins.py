"""Pairs of caches that run one history, compared bit for bit.

``Twins`` has a cache that appends batches and one that appends the same tokens one at a time. Both
start out poisoned with the same bits, different in every element and NaNs among them, so that a
write that is missing, goes to a wrong slot, or passes through floating-point arithmetic is detected
wherever it happens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roseinfer import AppendPolicy, KVBlockManager

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (5, 64, 80, 96)
BLOCK_SIZE = 4
SIZES: dict[str, int] = {
    "num_layers": 2,
    "num_heads": 3,
    "head_dim": 5,
    "block_size": BLOCK_SIZE,
    "max_blocks_per_layer": 24,
}

Counts = Counter[str]


def build(
    device: str,
    policy: AppendPolicy = AppendPolicy(),  # noqa: B008  (frozen)
    *,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> KVBlockManager:
    """Build a small poisoned cache."""
    shape: dict[str, Any] = SIZES | sizes
    kv = KVBlockManager(device=device, dtype=dtype, policy=policy, **shape)
    poison(kv.keys, seed=1)
    poison(kv.values, seed=2)
    return kv


def int_dtype(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]


def poison(cache: torch.Tensor, seed: int) -> None:
    """Fill with all bit patterns in turn: an odd stride reaches each one once."""
    width = 8 * cache.dtype.itemsize
    words = torch.arange(cache.numel(), dtype=torch.int64) * 0x9E3779B1 + seed * 0x61C88647
    words &= (1 << width) - 1
    words -= (words >> (width - 1)) << width
    bit_pattern = words.to(int_dtype(cache.dtype)).view(cache.dtype)
    cache.copy_(bit_pattern.view(cache.shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.detach().cpu().contiguous().view(int_dtype(tensor.dtype))


def random_words(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bit patterns: NaNs with payloads, infinities, denormals, both zeros."""
    width = 8 * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (width - 1)), 1 << (width - 1)
    words = torch.randint(low, high, tuple(shape), generator=generator, dtype=torch.int64)
    return words.to(int_dtype(dtype)).view(dtype)


@dataclass(frozen=True)
class Metadata:
    """All metadata of a cache's blocks."""

    free: tuple[int, ...]
    refcounts: tuple[int, ...]
    infos: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, kv: KVBlockManager) -> Metadata:
        ids = list(block_ids_of(kv))
        infos = [kv.block_info(block_id) for block_id in ids]
        return cls(
            tuple(kv.num_free_blocks(layer) for layer in range(kv.num_layers)),
            tuple(kv.refcount(block_id) for block_id in ids),
            tuple((info.layer, info.block_index, info.start, info.length) for info in infos),
        )


def block_ids_of(kv: KVBlockManager) -> Iterable[int]:
    """Return every block id except those of the scratch blocks."""
    groups = kv.num_layers // kv.layers_per_group
    for group in range(groups):
        first = group * kv.max_blocks_per_layer
        yield from range(first + 1, first + kv.max_blocks_per_layer)


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of a whole cache: every bit, all metadata, all counters."""

    keys: torch.Tensor
    values: torch.Tensor
    metadata: Metadata
    counts: Counts

    @classmethod
    def of(cls, kv: KVBlockManager) -> Snapshot:
        keys, values = bits(kv.keys).clone(), bits(kv.values).clone()
        return cls(keys, values, Metadata.of(kv), Counter(kv.path_counts))

    def assert_unchanged(self, kv: KVBlockManager) -> None:
        assert_same_bits(kv.keys, self.keys, "keys")
        assert_same_bits(kv.values, self.values, "values")
        assert Metadata.of(kv) == self.metadata
        assert Counter(kv.path_counts) == self.counts


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Assert bit equality; the message has the indices of the first differences."""
    actual_bits = actual if actual.dtype in (torch.int16, torch.int32) else bits(actual)
    expected_bits = expected if expected.dtype in (torch.int16, torch.int32) else bits(expected)
    assert actual_bits.shape == expected_bits.shape, (
        f"{name}: shape {actual_bits.shape} instead of {expected_bits.shape}"
    )
    differences = (actual_bits != expected_bits).nonzero()
    assert not len(differences), (
        f"{name}: {len(differences)} elements differ, first at {differences[:4].tolist()}"
    )


def assert_same_cache(fast: KVBlockManager, slow: KVBlockManager) -> None:
    """Assert that all blocks of all layers, used or not, and their metadata are equal."""
    assert_same_bits(fast.keys, slow.keys, "keys")
    assert_same_bits(fast.values, slow.values, "values")
    assert Metadata.of(fast) == Metadata.of(slow)


class Twins:
    """One history in two caches: in ``fast`` by batches, in ``slow`` token by token."""

    layer = 1

    def __init__(
        self,
        device: str,
        policy: AppendPolicy = AppendPolicy(),  # noqa: B008  (frozen)
        *,
        dtype: torch.dtype = torch.float32,
        lengths: Sequence[int] = (),
        **sizes: int,
    ) -> None:
        self.fast = build(device, policy, dtype=dtype, **sizes)
        self.slow = build(device, AppendPolicy(triton=False), dtype=dtype, **sizes)
        self.fast_lists: list[list[int]] = []
        self.slow_lists: list[list[int]] = []
        self._seeds = random.Random(0)
        for length in lengths:
            self.start(length)

    def token(self, *batch: int) -> torch.Tensor:
        """Return random bits of shape ``[*batch, heads, head_dim]``, never the same twice."""
        shape = (*batch, self.fast.num_heads, self.fast.head_dim)
        words = random_words(shape, self.fast.dtype, self._seeds.getrandbits(40))
        return words.to(self.fast.device)

    def start(self, length: int) -> int:
        """Append a sequence of ``length`` tokens one by one to both; return its row."""
        self.fast_lists.append([])
        self.slow_lists.append([])
        row = len(self.fast_lists) - 1
        for _ in range(length):
            key, value = self.token(), self.token()
            self.fast.append_token(self.layer, self.fast_lists[row], key, value)
            self.slow.append_token(self.layer, self.slow_lists[row], key, value)
        return row

    def fork(self, row: int) -> int:
        """Fork ``row`` into a sequence that shares all of its blocks; return the fork's row."""
        for kv, lists in ((self.fast, self.fast_lists), (self.slow, self.slow_lists)):
            kv.incref_blocks(lists[row])
            lists.append(list(lists[row]))
        return len(self.fast_lists) - 1

    def free(self, row: int) -> None:
        for kv, lists in ((self.fast, self.fast_lists), (self.slow, self.slow_lists)):
            kv.free_blocks(self.layer, lists[row])
            lists[row].clear()

    def append(
        self,
        rows: Sequence[int] | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
    ) -> Counts:
        """Append a token to each of ``rows``, as a batch and one by one; return the counts."""
        rows = range(len(self.fast_lists)) if rows is None else rows
        key = self.token(len(rows)) if key is None else key
        value = self.token(len(rows)) if value is None else value
        before = Counter(self.fast.path_counts)
        self.fast.append_token_batch(self.layer, [self.fast_lists[r] for r in rows], key, value)
        for index, row in enumerate(rows):
            self.slow.append_token(self.layer, self.slow_lists[row], key[index], value[index])
        return Counter(self.fast.path_counts) - before

    def check(self) -> None:
        """Assert that lists, metadata and every bit are the same."""
        assert self.fast_lists == self.slow_lists
        assert_same_cache(self.fast, self.slow)
