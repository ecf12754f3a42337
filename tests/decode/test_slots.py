"""Rows of slots on the device: uploaded when they change, and only then."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from roseinfer import SamplingParams
from roseinfer.decode.slots import DecodeSlots, SlotRows
from roseinfer.kv.sequence import CachedSequence
from roseinfer.kv.storage import IndexStaging
from roseinfer.paths import Work
from roseinfer.sampling import SamplingBatch

SLOTS, WIDTH = 5, 3
GREEDY = SamplingParams(temperature=0)
DIFFERENT_PARAMS = [
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.5, top_k=0, top_p=0.25, min_p=0.5),
    GREEDY,
]
SEEDS = [3, (1 << 64) - 1, 1 << 63]


def slots_on(device: str, num_slots: int = SLOTS, width: int = WIDTH) -> DecodeSlots:
    where, work = torch.device(device), Counter[str]()
    return DecodeSlots(SlotRows(num_slots, width, 1, IndexStaging(where, work)))


def count_uploads(slots: DecodeSlots) -> int:
    """Return the number of rows uploaded so far."""
    return slots.rows._staging.work_counts[Work.TABLE_ROWS]


def new_sequence(*blocks: int, stored: int = 4) -> CachedSequence:
    return CachedSequence([list(blocks)], num_stored=stored)


def rows(slots: DecodeSlots, count: int = SLOTS) -> list[tuple[int, int, list[int]]]:
    """Return the length, active flag and blocks of each row."""
    columns = slots.rows.lengths(count), slots.rows.active(count), slots.rows.tables(count)[0]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_slots_have_a_table_per_layer_group(device: str) -> None:
    staging = IndexStaging(torch.device(device), Counter[str]())
    slots = DecodeSlots(SlotRows(2, 3, 2, staging))
    sequence = CachedSequence([[0, 5], [7, 8]], num_stored=5)
    slot = slots.assign_slot(sequence, GREEDY, 0)
    slots.upload()
    tables = [table[slot].tolist() for table in slots.rows.tables(2)]
    assert tables == [[0, 5, 0], [7, 8, 0]]
    for blocks, new in zip(sequence.block_lists, (9, 6), strict=True):
        blocks.append(new)
    slots.mark_new_blocks(slot)
    slots.upload()
    tables = [table[slot].tolist() for table in slots.rows.tables(2)]
    assert tables == [[0, 5, 9], [7, 8, 6]]


EMPTY = (0, 0, [0, 0, 0])


def test_unassigned_rows_are_padding(device: str) -> None:
    assert rows(slots_on(device)) == [EMPTY] * SLOTS
    assert slots_on(device).rows_in_use == 0


def test_upload_writes_the_current_state_of_a_sequence(device: str) -> None:
    slots = slots_on(device)
    sequence = new_sequence(7, stored=3)
    assert slots.assign_slot(sequence, GREEDY, 0) == 0
    assert rows(slots)[0] == EMPTY, "the row changed before its upload"
    sequence.block_lists[0].append(9)
    sequence.num_stored = 5
    slots.upload()
    assert rows(slots) == [(5, 1, [7, 9, 0]), *[EMPTY] * 4]


def test_lowest_free_row_is_assigned(device: str) -> None:
    slots = slots_on(device)
    assert [slots.assign_slot(new_sequence(at), GREEDY, 0) for at in range(4)] == [0, 1, 2, 3]
    for slot in (2, 0, 3):
        slots.release_slot(slot)
    assert slots.rows_in_use == 2
    assert [slots.assign_slot(new_sequence(at), GREEDY, 0) for at in range(4)] == [0, 2, 3, 4]
    assert slots.rows_in_use == SLOTS


def test_failed_assignment_keeps_the_row_free(device: str) -> None:
    slots = slots_on(device)
    broken = SamplingParams()
    object.__setattr__(broken, "temperature", "hot")
    with pytest.raises(Exception, match="argument"):
        slots.assign_slot(new_sequence(1), broken, 0)
    assert [slots.assign_slot(new_sequence(at), GREEDY, 0) for at in range(SLOTS)] == list(
        range(SLOTS)
    )


def test_only_changed_rows_are_uploaded(device: str) -> None:
    slots = slots_on(device)
    sessions = [new_sequence(1), new_sequence(2), new_sequence(3)]
    for each in sessions:
        slots.assign_slot(each, GREEDY, 0)
    slots.upload()
    slots.upload()
    assert count_uploads(slots) == 3
    sessions[1].block_lists[0].append(8)
    slots.mark_new_blocks(1)
    slots.mark_new_blocks(1)
    slots.upload()
    assert count_uploads(slots) == 4
    assert rows(slots, 3) == [(4, 1, [1, 0, 0]), (4, 1, [2, 8, 0]), (4, 1, [3, 0, 0])]


def test_growing_row_keeps_the_length_on_the_device(device: str) -> None:
    slots = slots_on(device)
    sequence = new_sequence(1, 2)
    slots.assign_slot(sequence, GREEDY, 0)
    slots.upload()
    slots.rows.lengths(1)[:] += 3
    sequence.block_lists[0][-1] = 7  # the copy of a shared block
    sequence.block_lists[0].append(8)
    slots.mark_new_blocks(0)
    slots.upload()
    assert rows(slots, 2) == [(7, 1, [1, 7, 8]), EMPTY]


def test_row_released_with_new_blocks_is_padding(device: str) -> None:
    slots = slots_on(device)
    sequence = new_sequence(1)
    slots.assign_slot(sequence, GREEDY, 0)
    slots.upload()
    sequence.block_lists[0].append(8)
    slots.mark_new_blocks(0)
    slots.release_slot(0)
    slots.upload()
    assert rows(slots, 1) == [EMPTY]


def test_released_row_is_padding(device: str) -> None:
    slots = slots_on(device)
    for block in (1, 2):
        slots.assign_slot(new_sequence(block), DIFFERENT_PARAMS[0], 5)
    slots.upload()
    slots.release_slot(0)
    slots.upload()
    assert rows(slots, 2) == [EMPTY, (4, 1, [2, 0, 0])]
    assert slots.rows.sampling(1, greedy=False).temperature.tolist() == [[0]]
    assert slots.rows_in_use == 2


def test_row_reassigned_before_an_upload_has_its_new_sequence(device: str) -> None:
    slots = slots_on(device)
    slots.assign_slot(new_sequence(1), GREEDY, 0)
    slots.upload()
    slots.release_slot(0)
    slots.assign_slot(new_sequence(2, stored=1), GREEDY, 0)
    slots.upload()
    assert rows(slots, 1) == [(1, 1, [2, 0, 0])]
    assert count_uploads(slots) == 2


def test_sampling_columns_equal_those_of_a_batch(device: str) -> None:
    """Equal bit for bit, in rows of 64-bit numbers."""
    slots = slots_on(device)
    for params, seed in zip(DIFFERENT_PARAMS, SEEDS, strict=True):
        slots.assign_slot(new_sequence(1), params, seed)
    slots.upload()
    sampling, expected = (
        slots.rows.sampling(3, greedy=False),
        SamplingBatch.of(DIFFERENT_PARAMS, SEEDS, device),
    )
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        column, expected_column = getattr(sampling, name), getattr(expected, name)
        assert column.dtype == expected_column.dtype, name
        assert torch.equal(column, expected_column), name
    assert not sampling.greedy
    assert sampling.penalties is None
    torch.manual_seed(0)
    logits, positions = torch.randn(3, 50, device=device), torch.arange(3, device=device)
    assert torch.equal(
        sampling.sample_tokens(logits, positions), expected.sample_tokens(logits, positions)
    )


def test_put_tokens_writes_to_the_given_rows(device: str) -> None:
    slots = slots_on(device)
    slots.rows.put_tokens([3, 1], torch.tensor([30, 10], device=device))
    assert slots.rows.tokens.tolist() == [0, 10, 0, 30, 0]


def test_lengths_counted_on_the_device_are_visible(device: str) -> None:
    """Columns are views: writing to them changes the rows."""
    slots = slots_on(device)
    slots.assign_slot(new_sequence(1, stored=7), GREEDY, 0)
    slots.upload()
    lengths = slots.rows.lengths(2)
    lengths += slots.rows.active(2)
    assert rows(slots, 2) == [(8, 1, [1, 0, 0]), EMPTY]


def test_all_padding_restores_rows(device: str) -> None:
    """This holds after an exception, too. Changes on the host meanwhile are uploaded afterwards."""
    slots = slots_on(device)
    slots.assign_slot(new_sequence(1, 2), DIFFERENT_PARAMS[0], 11)
    slots.upload()
    slots.rows.put_tokens([0], torch.tensor([42], device=device))
    columns = slots.rows.sampling(SLOTS, greedy=False)
    before, seeds, rows_before = rows(slots), columns.seeds.clone(), count_uploads(slots)

    def overwrite_and_fail() -> None:
        assert rows(slots) == [EMPTY] * SLOTS
        assert not columns.seeds.any()
        slots.rows.tokens.fill_(5)
        lengths = slots.rows.lengths(SLOTS)
        lengths += 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), slots.rows.all_padding():
        overwrite_and_fail()
    assert rows(slots) == before
    assert torch.equal(columns.seeds, seeds)
    assert slots.rows.tokens.tolist() == [42, 0, 0, 0, 0]
    slots.upload()
    assert count_uploads(slots) == rows_before


def test_rows_too_wide_for_the_ring_are_uploaded(device: str) -> None:
    """Rows of thousands of blocks are staged outside the ring."""
    slots = slots_on(device, 3, 9000)
    for first in (10, 20, 30):
        slots.assign_slot(new_sequence(*range(first, first + 5)), GREEDY, 0)
    slots.upload()
    assert slots.rows.tables(3)[0][:, :6].tolist() == [
        [*range(first, first + 5), 0] for first in (10, 20, 30)
    ]
