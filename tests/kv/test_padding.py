"""Padding rows (None as a list) write only to the scratch block and hold no block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, Condition, KVBlockManager
from tests.kv.twins import assert_same_bits, build

POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "gather": AppendPolicy(triton=False, identity=False),
    "rollover apart": AppendPolicy(batched_rollover=False),
    "copy-on-write apart": AppendPolicy(batched_copy_on_write=False),
    "per token": AppendPolicy(batched=False),
}
all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def append_rows(device: str, policy: AppendPolicy, *, padded: bool) -> tuple[KVBlockManager, Any]:
    """Append to a fresh, a partial, a full and a shared list, with or without padding."""
    kv = build(device, policy=policy)
    torch.manual_seed(0)
    shape = (1, kv.num_heads, kv.block_size + 1, kv.head_dim)
    prompt = torch.randn(2, *shape, device=device, dtype=kv.dtype)
    lists: list[list[int]] = [[]]
    for length in (kv.block_size + 1, kv.block_size, kv.block_size - 1):
        keys, values = prompt[:, :, :, :length]
        lists.append(kv.register_prefill_layer(0, keys, values))
    lists.append(list(lists[3]))
    kv.incref_blocks(lists[3])
    new = torch.randn(2, len(lists), kv.num_heads, kv.head_dim, device=device, dtype=kv.dtype)
    rows: list[list[int] | None] = list(lists)
    if padded:
        for at in (5, 2, 2, 0):
            rows.insert(at, None)
            new = torch.cat([new[:, :at], torch.full_like(new[:, :1], 7), new[:, at:]], dim=1)
    kv.append_token_batch(0, rows, new[0], new[1])
    return kv, lists


@all_policies
def test_padding_changes_no_block_but_scratch(device: str, policy: AppendPolicy) -> None:
    plain, plain_lists = append_rows(device, policy, padded=False)
    padded, padded_lists = append_rows(device, policy, padded=True)
    assert padded_lists == plain_lists
    assert padded.num_free_blocks(0) == plain.num_free_blocks(0)
    assert_same_bits(padded.keys[0, 1:], plain.keys[0, 1:])
    assert_same_bits(padded.values[0, 1:], plain.values[0, 1:])
    assert padded.path_counts[Condition.PADDING] == 4


def test_step_of_padding_only_allocates_no_block(device: str) -> None:
    kv = build(device, policy=AppendPolicy(triton=False))
    before, free = kv.keys.clone(), kv.num_free_blocks(0)
    new = torch.ones(2, kv.num_heads, kv.head_dim, device=device, dtype=kv.dtype)
    kv.append_token_batch(0, [None, None], new, new)
    assert kv.num_free_blocks(0) == free
    assert_same_bits(kv.keys[0, 1:], before[0, 1:])


def test_padding_keeps_the_scalar_position_path(device: str) -> None:
    kv = build(device, policy=AppendPolicy(triton=False))
    lists: list[list[int]] = [[], []]
    new = torch.ones(3, kv.num_heads, kv.head_dim, device=device, dtype=kv.dtype)
    for _ in range(2):  # the second step writes at position 1
        kv.append_token_batch(0, [lists[0], None, lists[1]], new, new)
    assert kv.path_counts["torch_scalar"] == 2


def test_padding_row_has_one_token(device: str) -> None:
    kv = build(device, policy=AppendPolicy(triton=False))
    with pytest.raises(BadArgument, match="row 1 is padding and takes one token, not 3"):
        kv.plan_append(0, [[], None], [3, 3])
    assert kv.num_free_blocks(0) == kv.max_blocks_per_layer - 1
