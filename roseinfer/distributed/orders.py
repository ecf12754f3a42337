"""What the leading rank tells the others to do, with all the numbers that it takes.

The leader alone plans: blocks, tables and tokens go to the others as they are here, so that ranks
cannot disagree on them.
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
class Copies:
    """Copy blocks of a group of layers, all at once."""

    layer: int
    """First layer of those that the blocks have room for."""
    source: list[int]
    target: list[int]

    @classmethod
    def of(cls, plan: AppendPlan) -> Self:
        return cls(plan.layer, plan.copy_from, plan.copy_to)


@dataclass(frozen=True, slots=True)
class Forward:
    """Run new tokens of some sequences through the model."""

    token_ids: list[int]
    positions: list[int]
    rows: list[int] | None
    """The rows whose logits are wanted; None for all of them."""
    plans: dict[int, AppendPlan]
    """Where the new tokens go in each group of layers."""
    block_lists: Sequence[Sequence[list[int]]]
    counts: Sequence[int]
    lengths: Sequence[int]
    singles: int

    @classmethod
    def of(
        cls, batch: StepBatch, token_ids: list[int], positions: list[int], rows: list[int] | None
    ) -> Self:
        plans = {
            group: replace(plan, copy_from=[], copy_to=[], staged=None)  # copies were told before
            for group, plan in batch.new.plans.items()
        }
        lists, counts, lengths = batch.block_lists, batch.counts, batch.lengths
        return cls(token_ids, positions, rows, plans, lists, counts, lengths, batch.singles)


@dataclass(frozen=True, slots=True)
class PutRows:
    """Replace whole rows of slots."""

    flat: list[int]
    """Each row's slot and its numbers, one after the other."""
    count: int


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """Replace single numbers in rows of slots."""

    places: list[int]
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class PutTokens:
    """Take the newest tokens of some slots from the leader."""

    slots: list[int]


@dataclass(frozen=True, slots=True)
class Decode:
    """Run a step of the first slots."""

    count: int
    kind: Any
    """The ``StepKind``, of which there is a graph on every rank."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Answer with something that a rank knows: ``tables`` or ``caches``."""

    what: str


Order = Copies | Forward | PutRows | PutBlocks | PutTokens | Decode | Tell
