"""The work that other systems are given, in plain values that another process can be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from roseinfer.bench.model_source import ModelSource
    from roseinfer.bench.serving.driving import Work
    from roseinfer.bench.serving.memory_floor import MemoryFloor

    Generate = Callable[[int], int]
    """Continues all prompts by so many tokens, and returns how many tokens that made."""


@dataclass(frozen=True, slots=True)
class PeerJob:
    """Prompts, how far each is continued, and how often."""

    source: ModelSource
    prompts: list[list[int]]
    max_new_tokens: int
    max_batch_size: int
    warmup_runs: int
    repeat_runs: int

    @classmethod
    def of(cls, args: argparse.Namespace, source: ModelSource, work: Work, slots: int) -> PeerJob:
        """``work`` has prompts of tokens."""
        prompts = [[int(token) for token in prompt] for prompt in work.prompts]
        new = work.params.max_new_tokens
        return cls(source, prompts, new, slots, args.warmup_runs, args.repeat_runs)

    @property
    def rounds(self) -> int:
        """How often the slots are filled until all prompts had one."""
        return -(-len(self.prompts) // self.max_batch_size)

    def floor_ms(self, floor: MemoryFloor) -> float:
        """Return the floor of a step in the middle of a run, or of the mean round."""
        stored = sum(len(prompt) + self.max_new_tokens / 2 for prompt in self.prompts)
        return floor.seconds(1, round(stored / self.rounds)) * 1e3
