"""The sequences that are away: preempted, or swapped out and on their way out or back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    """How a sequence is away."""

    PREEMPTED = "preempted"
    """It has given up its blocks, and its tokens are to be written again."""
    LEAVING = "on its way out"
    """It is being copied out."""
    OUT = "swapped out"
    """It was copied out, and has given up its blocks."""
    COMING = "on its way back"
    """It has blocks again, and is being copied to them."""


@dataclass(slots=True)
class Away:
    stages: dict[int, Stage] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """What each sequence holds when it is back."""

    def leave(self, seq: int, stage: Stage, tokens: list[int]) -> None:
        self.stages[seq] = stage
        self.tokens[seq] = tokens

    def end(self, seq: int) -> None:
        """Know no more of a sequence, which is back or was freed, if it was away."""
        self.stages.pop(seq, None)
        self.tokens.pop(seq, None)

    def at(self, stage: Stage) -> list[int]:
        return [seq for seq, own in self.stages.items() if own is stage]

    def swapped_blocks(self, block_size: int) -> int:
        """Count the blocks of swap space that these sequences need at most."""
        swapped = (seq for seq, stage in self.stages.items() if stage is not Stage.PREEMPTED)
        return sum(-(-len(self.tokens[seq]) // block_size) for seq in swapped)
