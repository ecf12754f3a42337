"""The calls that the block manager must refuse, and its methods by which these are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.targets.own.read_manager import ReadManager
from pytest_roseinfer.targets.own.roseinfer_bad_calls import bad_calls
from roseinfer import BadArgument, BadBlock, BadRefcount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_roseinfer.adapters.cache import BadCall


class MisusedManager(ReadManager):
    """It is handed blocks that no caller may name."""

    standard_bad_calls: ClassVar[Sequence[str]] = (
        "free_unknown",
        "free_twice",
        "fork_unknown",
        "fork_freed",
        "decref_blocks_of_scratch",
        "decref_blocks_of_free_block",
        "decref_blocks_of_minus_1",
        "decref_blocks_of_other_pool",
        "decref_blocks_too_often",
        "incref_blocks_of_scratch",
        "incref_blocks_of_free_block",
        "incref_blocks_of_minus_1",
        "gather_blocks_of_scratch",
        "gather_blocks_of_free_block",
        "gather_blocks_of_minus_1",
        "gather_blocks_of_other_pool",
        "gather_blocks_past_the_end",
        "append_to_blocks_of_scratch",
        "append_to_blocks_of_free_block",
        "append_to_blocks_of_minus_1",
        "append_to_blocks_of_other_pool",
        "append_to_blocks_twice",
    )
    bad_call_errors = (BadBlock, BadRefcount, BadArgument, KeyError)

    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        self.manager.free_blocks(layer, self.ids(layer, blocks))

    def incref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        self.manager.incref_blocks(self.ids(layer, blocks))

    def gather_blocks(self, layer: int, blocks: list[int], length: int | None) -> object:
        return self.manager.gather_sequence(layer, self.ids(layer, blocks), length)

    def bad_calls(self) -> Iterable[BadCall]:
        return bad_calls(self.manager, list(self.lists.values()))
