"""Commands that the leading rank sends to the others, with all data that they need.

The leader alone plans: commands contain its blocks, tables and tokens, so that ranks cannot
disagree on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from roseinfer.attention.backend import StepBatch
    from roseinfer.kv.plan import AppendPlan


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """A command to copy blocks of a group of layers, all at once."""

    layer: int
    """First layer of the group."""
    source: list[int]
    target: list[int]

    @classmethod
    def of(cls, plan: AppendPlan) -> Self:
        return cls(plan.layer, plan.copy_from, plan.copy_to)


@dataclass(frozen=True, slots=True)
class Forward:
    """A command to run new tokens of some sequences through the model."""

    token_ids: list[int]
    positions: list[int]
    rows: list[int] | None
    """Rows whose logits are computed; None for all."""
    plans: dict[int, AppendPlan]
    """Append plan of the new tokens, by group of layers."""
    block_lists: Sequence[Sequence[list[int]]]
    counts: Sequence[int]
    lengths: Sequence[int]
    num_decodes: int

    @classmethod
    def of(
        cls, batch: StepBatch, token_ids: list[int], positions: list[int], rows: list[int] | None
    ) -> Self:
        plans = {
            # Copies were sent before, as CopyBlocks.
            group: replace(plan, copy_from=[], copy_to=[], staged_indices=None)
            for group, plan in batch.step_append.plans.items()
        }
        lists, counts, lengths = batch.block_lists, batch.counts, batch.lengths
        return cls(token_ids, positions, rows, plans, lists, counts, lengths, batch.num_decodes)


@dataclass(frozen=True, slots=True)
class PutRows:
    """A command to replace whole rows of slots."""

    flat: list[int]
    """Slot and numbers of each row, concatenated."""
    count: int


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """A command to replace single numbers in rows of slots."""

    places: list[int]
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class PutTokens:
    """A command to receive the newest tokens of some slots from the leader."""

    slots: list[int]


@dataclass(frozen=True, slots=True)
class Decode:
    """A command to run a decode step of the first ``count`` slots."""

    count: int
    kind: Any
    """``StepKind`` of the step, for which every rank has a graph."""


@dataclass(frozen=True, slots=True)
class ReportState:
    """A command to reply with a part of the rank's state: ``tables`` or ``caches``."""

    what: str


RankCommand = CopyBlocks | Forward | PutRows | PutBlocks | PutTokens | Decode | ReportState
