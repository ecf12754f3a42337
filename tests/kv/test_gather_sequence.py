"""Reading a sequence back, compared with Python lists of the appended tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kv.twins import BLOCK_SIZE, DTYPES, assert_same_bits, build, random_words

if TYPE_CHECKING:
    import torch

    from roseinfer import KVBlockManager


class ReferenceSequence:
    """A sequence, and the tokens appended to it."""

    def __init__(self, kv: KVBlockManager, length: int) -> None:
        self.kv = kv
        self.ids: list[int] = []
        shape = (length, kv.num_heads, kv.head_dim)
        self.keys = random_words(shape, kv.dtype, seed=length).to(kv.device)
        self.values = random_words(shape, kv.dtype, seed=length + 1000).to(kv.device)
        for key, value in zip(self.keys, self.values, strict=True):
            kv.append_token(0, self.ids, key, value)

    def assert_read(self, total_len: int | None) -> None:
        """Assert that the first ``total_len`` tokens read back bit for bit."""
        keys, values = self.kv.gather_sequence(0, self.ids, total_len)
        assert_same_bits(keys, self.keys[:total_len].transpose(0, 1), "keys")
        assert_same_bits(values, self.values[:total_len].transpose(0, 1), "values")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE])
def test_gather_returns_a_whole_sequence(device: str, dtype: torch.dtype, length: int) -> None:
    ReferenceSequence(build(device, dtype=dtype), length).assert_read(None)


@pytest.mark.parametrize("total_len", range(2 * BLOCK_SIZE + 2))
def test_gather_returns_a_prefix(device: str, total_len: int) -> None:
    ReferenceSequence(build(device), 2 * BLOCK_SIZE + 1).assert_read(total_len)


def test_gather_follows_the_order_of_the_list(device: str) -> None:
    """Recycled blocks come in any order of their indices."""
    kv = build(device)
    ReferenceSequence(kv, 1)
    old = ReferenceSequence(kv, 3 * BLOCK_SIZE)
    kv.free_blocks(0, old.ids)
    new = ReferenceSequence(kv, 3 * BLOCK_SIZE)
    assert new.ids == old.ids[::-1]
    new.assert_read(None)


@pytest.mark.parametrize("total_len", [None, 0])
def test_gather_of_an_empty_list_is_empty(device: str, total_len: int | None) -> None:
    kv = build(device)
    keys, values = kv.gather_sequence(0, [], total_len)
    assert keys.shape == values.shape == (kv.num_heads, 0, kv.head_dim)
    assert keys.dtype == kv.dtype


def test_gather_returns_a_copy(device: str) -> None:
    kv = build(device)
    sequence = ReferenceSequence(kv, 3)
    keys, values = kv.gather_sequence(0, sequence.ids)
    keys.zero_()
    values.zero_()
    sequence.assert_read(None)
