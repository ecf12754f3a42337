"""Storing a whole prompt at once, compared with token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roseinfer import AppendPolicy, Condition, KVBlockManager, Path
from tests.kv.twins import BLOCK_SIZE, DTYPES, assert_same_cache, build, random_words

if TYPE_CHECKING:
    import torch

LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2)
POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "gather_triton": AppendPolicy(identity=False),
    "gather_torch": AppendPolicy(triton=False, identity=False),
    "not_batched": AppendPolicy(batched=False),
}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def prompt(kv: KVBlockManager, length: int, seed: int) -> torch.Tensor:
    """Return random bits of shape ``[1, heads, tokens, head_dim]``."""
    shape = (1, kv.num_heads, length, kv.head_dim)
    return random_words(shape, kv.dtype, seed).to(kv.device)


def token_by_token(kv: KVBlockManager, key: torch.Tensor, value: torch.Tensor) -> list[int]:
    ids: list[int] = []
    for token in range(key.shape[2]):
        kv.append_token(1, ids, key[0, :, token], value[0, :, token])
    return ids


@pytest.mark.sampled_cases
@all_policies
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompt_matches_token_by_token(
    device: str, policy: AppendPolicy, length: int, dtype: torch.dtype
) -> None:
    fast, slow = build(device, policy, dtype=dtype), build(device, dtype=dtype)
    key, value = prompt(fast, length, 1), prompt(fast, length, 2)
    ids = fast.register_prefill_layer(1, key, value)
    assert ids == token_by_token(slow, key, value)
    assert_same_cache(fast, slow)


@all_policies
def test_prompt_in_recycled_blocks(device: str, policy: AppendPolicy) -> None:
    fast, slow = build(device, policy), build(device)
    for seed, length in enumerate([9, 5]):
        key, value = prompt(fast, length, seed), prompt(fast, length, seed + 10)
        ids = fast.register_prefill_layer(1, key, value)
        assert ids == token_by_token(slow, key, value)
        for kv in (fast, slow):
            kv.free_blocks(1, ids[::2])
    assert_same_cache(fast, slow)


def test_prompt_is_one_write(device: str) -> None:
    kv = build(device)
    kv.register_prefill_layer(1, prompt(kv, 9, 1), prompt(kv, 9, 2))
    assert +kv.path_counts == {Path.TRITON_IDENTITY_POS: 1, Condition.FRESH: 1}


def test_decoding_continues_after_a_prompt(device: str) -> None:
    fast, slow = build(device), build(device)
    key, value = prompt(fast, 6, 1), prompt(fast, 6, 2)
    fast_list = fast.register_prefill_layer(1, key[:, :, :5], value[:, :, :5])
    fast.append_token_batch(1, [fast_list], key[0, :, 5][None], value[0, :, 5][None])
    assert fast_list == token_by_token(slow, key, value)
    assert_same_cache(fast, slow)


@all_policies
def test_empty_prompt_allocates_no_block(device: str, policy: AppendPolicy) -> None:
    kv, untouched = build(device, policy), build(device)
    assert kv.register_prefill_layer(1, prompt(kv, 0, 1), prompt(kv, 0, 2)) == []
    assert_same_cache(kv, untouched)


@all_policies
def test_prompt_with_token_first_layout(device: str, policy: AppendPolicy) -> None:
    """A model's projection returns ``[1, tokens, heads, head_dim]``, here transposed."""
    fast, slow = build(device, policy), build(device)
    key = prompt(fast, 6, 1).transpose(1, 2).contiguous().transpose(1, 2)
    value = prompt(fast, 6, 2).transpose(2, 3).contiguous().transpose(2, 3)
    assert key.stride() != value.stride()
    assert fast.register_prefill_layer(1, key, value) == token_by_token(slow, key, value)
    assert_same_cache(fast, slow)
