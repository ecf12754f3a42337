"""The picture of a failure marks the wrong place and leaves out unrelated sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Ledger, run_history
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

SPEC = CacheSpec(num_layers=2, num_heads=2, block_size=16, num_blocks=12)
STEPS = (Prefill(0, 18), Prefill(7, 3), Fork(0, 1))
"""Blocks 1 and 2 belong to sequence 0 and its fork 1, block 3 to sequence 7."""


def picture_lines(adapter: type[GroupedManager]) -> list[str]:
    """Return the lines of the picture."""
    with pytest.raises(Divergence) as caught:
        run_history(adapter, History(SPEC, STEPS))
    return [line.strip() for line in str(caught.value).split("\n\n")[-1].splitlines()]


class ReadsAnotherToken(GroupedManager):
    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().peek(seq, layer)
        if (seq, layer) == (1, 1):
            values = values.clone()
            values[6, 1] = values[2, 1]
        return keys, values


def test_wrong_token_is_marked_in_a_long_page() -> None:
    assert picture_lines(ReadsAnotherToken) == [
        "> < marks the error in layer 1, head 1, V",
        "expected contents, page by page (sequence.token, x holders where shared):",
        "sequence 0: [0.0 0.1 0.2 0.3 ... 0.13 0.14 0.15]x2 [0.16 0.17]x2",
        "sequence 1: [0.0 0.1 0.2 0.3 ... >0.6< ... 0.13 0.14 0.15]x2 [0.16 0.17]x2",
        "other sequences, not drawn: 1",
        "tables of layer 1 (block, x its refcount):",
        "sequence 0: 1x2 2x2",
        "sequence 1: >1x2< 2x2",
    ]


class WritesElsewhere(GroupedManager):
    """Changes an unrelated slot when it forks."""

    slot = (0, 0, 0)
    """Block, head, position."""

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        keys, _ = self.arena()
        block, head, position = self.slot
        keys[0, block, head, position] = keys[0, 3, head, 2]


class WritesPastTheEnd(WritesElsewhere):
    slot = (2, 1, 9)


def test_wrong_write_is_marked_in_every_holder_of_the_block() -> None:
    legend, _, *lines = picture_lines(WritesPastTheEnd)
    assert legend == "> < marks the error in layer 0, block 2, head 1, K"
    full_block = "[0.0 0.1 0.2 0.3 ... 0.13 0.14 0.15]x2"
    assert lines == [
        f"sequence 0: {full_block} [0.16 0.17 >nothing<]x2",
        f"sequence 1: {full_block} [0.16 0.17 >nothing<]x2",
        "sequence 7: [7.0 7.1 7.2]",
        "tables of layer 0 (block, x its refcount):",
        "sequence 0: 1x2 >2x2<",
        "sequence 1: 1x2 >2x2<",
        "sequence 7: 3x1",
    ]


class WritesToAFreeBlock(WritesElsewhere):
    slot = (5, 0, 0)


def test_wrong_free_block_is_marked_next_to_its_token_owner() -> None:
    assert picture_lines(WritesToAFreeBlock) == [
        "> < marks the error in layer 0, block 5, head 0, K",
        "expected contents, page by page (sequence.token, x holders where shared):",
        "sequence 7: [7.0 7.1 7.2]",
        "other sequences, not drawn: 2",
        "tables of layer 0 (block, x its refcount):",
        "sequence 7: 3x1",
        "held by no sequence: >5x?<",
    ]


class CountsAHolderTooMany(GroupedManager):
    def ledger(self, layer: int) -> Ledger:
        books = super().ledger(layer)
        return Ledger({**books.refcounts, 2: 5}, books.free, books.total)


def test_wrong_refcount_marks_the_whole_block() -> None:
    """The failure comes after the first step, when there is only one sequence."""
    legend, _, pages, _, table = picture_lines(CountsAHolderTooMany)
    assert legend == "> < marks the error in layer 0, block 2"
    assert pages == "sequence 0: [0.0 0.1 0.2 0.3 ... 0.13 0.14 0.15] >[0.16 0.17]<"
    assert table == "sequence 0: 1x1 >2x5<"


class CannotRead(GroupedManager):
    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq == 7:
            self.lists[7] = []  # from here on the tables cannot be read
            raise KeyError(seq)
        return super().peek(seq, layer)

    def ledger(self, layer: int) -> Ledger:
        if not self.lists.get(7, [0]):
            raise RuntimeError("books are gone")
        return super().ledger(layer)


def test_unreadable_sequence_is_marked() -> None:
    _, _, pages, other_sequences, _, table = picture_lines(CannotRead)
    assert pages == ">sequence 7<: [7.0 7.1 7.2]"
    assert other_sequences == "other sequences, not drawn: 1"
    assert table == ">sequence 7<: unreadable, IndexError: list index out of range"


class Raises(GroupedManager):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        raise ValueError(f"not today: {list(seqs)}, {key.shape}, {value.shape}")


def test_failure_without_a_location_shows_all_sequences() -> None:
    with pytest.raises(Divergence) as caught:
        run_history(Raises, History(SPEC, (*STEPS, Append((7,)))))
    lines = str(caught.value).split("\n\n")[-1].splitlines()
    assert [line.split(":")[0].strip() for line in lines if "sequence " in line] == [
        "sequence 0",
        "sequence 1",
        "sequence 7",
    ] * 3
    assert [line for line in lines if line.startswith("tables")] == [
        "tables of layer 0 (block, x its refcount):",
        "tables of layer 1 (block, x its refcount):",
    ]
    assert ">" not in "".join(lines)
