"""Block records (``KVBlockInfo``): their contents, and their updates in place."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from roseinfer import AppendPolicy, KVBlockInfo, KVBlockManager
from tests.kv.recording import record_new_blocks
from tests.kv.twins import BLOCK_SIZE, Twins, build

POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "gather": AppendPolicy(identity=False),
    "per_token": AppendPolicy(batched=False),
}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def contents(info: KVBlockInfo) -> tuple[int, int, int, int]:
    return info.layer, info.block_index, info.start, info.length


def test_record_is_a_slots_dataclass_of_four_fields() -> None:
    assert is_dataclass(KVBlockInfo)
    assert [f.name for f in fields(KVBlockInfo)] == ["layer", "block_index", "start", "length"]
    assert not hasattr(KVBlockInfo(0, 1, 0, 0), "__dict__")


@all_policies
def test_in_place_appends_update_the_record_and_build_none(
    device: str, policy: AppendPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(device, policy, lengths=(1, 1))
    records = [twins.fast.block_info(ids[0]) for ids in twins.fast_lists]
    with record_new_blocks(monkeypatch) as records_built:
        twins.append()
        twins.append()
    assert not records_built
    for ids, record in zip(twins.fast_lists, records, strict=True):
        assert twins.fast.block_info(ids[0]) is record
        assert record.length == 3


@all_policies
def test_new_block_builds_one_record(
    device: str, policy: AppendPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder used above does detect new records."""
    twins = Twins(device, policy, lengths=(BLOCK_SIZE, BLOCK_SIZE))
    key, value = twins.token(2), twins.token(2)
    with record_new_blocks(monkeypatch) as records_built:
        twins.fast.append_token_batch(twins.layer, twins.fast_lists, key, value)
    assert len(records_built) == 2


@all_policies
def test_recycled_block_keeps_its_record(
    device: str, policy: AppendPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(device, policy, lengths=(3,))
    (block,) = twins.fast_lists[0]
    record = twins.fast.block_info(block)
    twins.free(0)
    assert contents(record)[2:] == (0, 0)
    with record_new_blocks(monkeypatch) as records_built:
        twins.append([0])
    assert not records_built
    assert twins.fast_lists[0] == [block]
    assert twins.fast.block_info(block) is record
    assert record.length == 1


@all_policies
def test_start_is_the_position_of_the_first_token_in_its_sequence(
    device: str, policy: AppendPolicy
) -> None:
    twins = Twins(device, policy, lengths=(0,))
    for _ in range(2 * BLOCK_SIZE + 1):
        twins.append([0])
    infos = [twins.fast.block_info(block) for block in twins.fast_lists[0]]
    assert [info.start for info in infos] == [0, BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert [info.length for info in infos] == [BLOCK_SIZE, BLOCK_SIZE, 1]


@all_policies
def test_copy_has_the_start_and_length_of_its_source(device: str, policy: AppendPolicy) -> None:
    twins = Twins(device, policy, lengths=(BLOCK_SIZE + 2,))
    twins.fork(0)
    (_, old) = twins.fast_lists[0]
    twins.append([1])
    (_, new) = twins.fast_lists[1]
    assert contents(twins.fast.block_info(old))[2:] == (BLOCK_SIZE, 2)
    assert contents(twins.fast.block_info(new))[2:] == (BLOCK_SIZE, 3)


def test_global_ids_are_layer_times_pool_size_plus_index(device: str) -> None:
    kv = build(device, num_layers=3)
    lists: list[list[int]] = [[], [], []]
    for layer, block_ids in enumerate(lists):
        key = kv.keys.new_zeros(kv.num_heads, kv.head_dim)
        kv.append_token(layer, block_ids, key, key)
        info = kv.block_info(block_ids[0])
        assert block_ids[0] == layer * kv.max_blocks_per_layer + info.block_index
        assert info.layer == layer
    assert len({block for ids in lists for block in ids}) == 3


def free_block_lengths(kv: KVBlockManager) -> set[int]:
    return {
        kv.block_info(block).length
        for block in range(1, kv.max_blocks_per_layer)
        if not kv.refcount(block)
    }


def test_free_blocks_have_length_zero(device: str) -> None:
    twins = Twins(device, lengths=(3, BLOCK_SIZE + 1))
    twins.free(1)
    assert free_block_lengths(twins.fast) == {0}
