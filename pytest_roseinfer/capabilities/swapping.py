"""Swapping a sequence out of the cache and back, each in two steps."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, optional
from pytest_roseinfer.capabilities.misuse import Call, Situation, misuse
from pytest_roseinfer.capabilities.observation import Finding, Observation, invariant
from pytest_roseinfer.capabilities.writes import floods
from pytest_roseinfer.oracle.pages import Absence, State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping


class SwappingMethods:
    """The methods that swap sequences out and in."""

    swap_out_holds: ClassVar[bool] = True
    """True if a sequence holds its blocks until ``finish_swap_out``; False if they are free as soon
    as ``swap_out`` returns, since they were copied by then."""

    @optional
    def swap_out(self, seq: int) -> object:
        """Begin to copy a sequence out of the cache; ``finish_swap_out`` gets the result.

        Until then the sequence reads back as before, unless ``swap_out_holds`` is False, and no
        step uses it but ``free``. Swap space for ``spec.num_blocks`` blocks of each layer is
        enough.
        """

    @optional
    def finish_swap_out(self, swap: Any) -> None:
        """Wait until the copy is done; from here on the sequence holds no block.

        Blocks that others hold are copied too, and have a holder less.
        """

    @optional
    def swap_in(self, seq: int) -> object:
        """Take blocks for a sequence and begin to copy it back; ``finish_swap_in`` gets the result.

        They are in its ``table`` from here on, none of them shared. It is not read before
        ``finish_swap_in``.
        """

    @optional
    def finish_swap_in(self, swap: Any) -> None:
        """Wait until the copy is done; the sequence reads back as before it was swapped out."""


class Stage(Enum):
    """A stage of swapping a sequence out or back in."""

    LEAVING = "on its way out"
    """It is being copied out."""
    OUT = "swapped out"
    """It was copied out, and has given up its blocks."""
    COMING = "on its way back"
    """It has blocks again, and is being copied to them."""


@dataclass(slots=True)
class Swapped(State):
    """The sequences that are swapped out, or half way."""

    any_of: ClassVar = ("swap_out",)
    holds: bool = True
    """As ``SwappingMethods.swap_out_holds``."""
    stages: dict[int, Stage] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """What each sequence holds when it is back."""

    @classmethod
    def of(cls, adapter: Any) -> Swapped:
        return cls(adapter.swap_out_holds)

    @property
    def absent(self) -> Mapping[int, Absence]:
        stages = self.stages.items()
        return {seq: Absence(stage.value, self.tokens[seq]) for seq, stage in stages}

    @property
    def hidden(self) -> Collection[int]:
        return self.at(Stage.COMING)

    def unwritten(self, seq: int) -> int:
        return len(self.tokens[seq]) if self.stages.get(seq) is Stage.COMING else 0

    def freed(self, seq: int) -> None:
        self.stages.pop(seq, None)
        self.tokens.pop(seq, None)

    def at(self, stage: Stage) -> list[int]:
        return [seq for seq, own in self.stages.items() if own is stage]

    def blocks(self, block_size: int) -> int:
        """Count the blocks of swap space that these sequences need at most."""
        return sum(-(-len(own) // block_size) for own in self.tokens.values())


def swapped(oracle: operation.Oracle) -> Swapped:
    return oracle.begun(Swapped)


def _at(oracle: operation.Oracle, seq: int, stage: Stage) -> bool:
    return swapped(oracle).stages.get(seq) is stage


_TOGETHER = ("swap_out", "finish_swap_out", "swap_in", "finish_swap_in")
"""Methods that are nothing without each other."""


class _Move(operation.Operation):
    """An operation that moves one sequence a step further, out of the cache or back."""

    __slots__ = ()

    seq: int
    needs = frozenset(_TOGETHER)

    def changed(self) -> list[int]:
        return [self.seq]

    def copies_blocks(self, oracle: operation.Oracle) -> bool:  # noqa: ARG002
        return True


@operation.register("SwapOut")
class SwapOut(_Move):
    """Begin to copy a sequence out of the cache."""

    seq: int

    of_tokens = True

    def words(self) -> str:
        return f"begin to swap sequence {self.seq} out"

    def uses(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        if not operation.Operation.possible(self, oracle):
            return False
        taken = swapped(oracle).blocks(oracle.block_size)
        return taken + len(oracle.sequences[self.seq]) <= oracle.capacity

    def change(self, oracle: operation.Oracle) -> None:
        out = swapped(oracle)
        out.stages[self.seq], out.tokens[self.seq] = Stage.LEAVING, oracle.tokens(self.seq)
        if not out.holds:
            oracle.give_up(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.moving[self.seq] = cache.adapter.swap_out(self.seq)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if fitting := [seq for seq in writer.filled if cls(seq).possible(writer.oracle)]:
            yield operation.Move(130, 6, lambda: cls(writer.pick(fitting)))


@operation.register("FinishSwapOut")
class FinishSwapOut(_Move):
    """Finish copying a sequence out; its blocks are free for others from here on."""

    seq: int

    def words(self) -> str:
        return f"finish swapping sequence {self.seq} out"

    def possible(self, oracle: operation.Oracle) -> bool:
        return _at(oracle, self.seq, Stage.LEAVING)

    def change(self, oracle: operation.Oracle) -> None:
        swapped(oracle).stages[self.seq] = Stage.OUT
        if swapped(oracle).holds:
            oracle.give_up(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.finish_swap_out(cache.moving.pop(self.seq))

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if leaving := swapped(writer.oracle).at(Stage.LEAVING):
            yield operation.Move(130, 10, lambda: cls(writer.pick(leaving)))


@operation.register("SwapIn")
class SwapIn(_Move):
    """Take blocks for a sequence that is swapped out, and begin to copy it back."""

    seq: int

    def words(self) -> str:
        return f"begin to swap sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return _at(oracle, self.seq, Stage.OUT)

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.fits([(self.seq, len(swapped(oracle).tokens[self.seq]))])

    def may_find_blocks(self) -> bool:
        return True

    def change(self, oracle: operation.Oracle) -> None:
        tokens = swapped(oracle).tokens[self.seq]
        oracle.append([(self.seq, len(tokens))], tokens)
        swapped(oracle).stages[self.seq] = Stage.COMING

    def drive(self, cache: operation.Driven) -> None:
        cache.moving[self.seq] = cache.adapter.swap_in(self.seq)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        steps = [cls(seq) for seq in swapped(writer.oracle).at(Stage.OUT)]
        fitting = [step for step in steps if step.fits(writer.oracle)]
        if steps:
            yield operation.Move(130, 10 if fitting else 3, lambda: writer.pick(fitting or steps))
            yield from floods(writer)


@operation.register("FinishSwapIn")
class FinishSwapIn(_Move):
    """Finish copying a sequence back; it can be read and appended to from here on."""

    seq: int

    def words(self) -> str:
        return f"finish swapping sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return _at(oracle, self.seq, Stage.COMING)

    def brings_back(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        swapped(oracle).freed(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.finish_swap_in(cache.moving.pop(self.seq))

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if coming := swapped(writer.oracle).at(Stage.COMING):
            yield operation.Move(130, 10, lambda: cls(writer.pick(coming)))


@invariant(rank=22, needs=("ledger", "swap_out"))
def swap_space(seen: Observation) -> Finding | None:
    """Swap space in use must belong to sequences that are swapped out."""
    most = swapped(seen.oracle).blocks(seen.spec.block_size)
    for layer in range(seen.spec.num_layers):
        taken = seen.after.ledger(layer).swapped or 0
        if taken > most:
            return Finding(
                f"layer {layer}: {taken} blocks of swap space are taken, and what is swapped out "
                f"fills {most}"
            )
    return None


_NEXT = {Stage.LEAVING: FinishSwapOut, Stage.OUT: SwapIn, Stage.COMING: FinishSwapIn}


def _way_back(oracle: operation.Oracle) -> list[operation.Operation]:
    return [_NEXT[stage](seq) for seq, stage in swapped(oracle).stages.items()]


# Calls that must be refused.


@misuse("gather", "swap_out", "swap_in")
def gather_swapped_out(at: Situation) -> Iterator[Call]:
    for stage in (Stage.OUT, Stage.COMING):
        yield from at.gather_absent(swapped(at.oracle).at(stage))


@misuse("swap_out", "swap_in")
def append_to_swapped_out(at: Situation) -> Iterator[Call]:
    new = at.tokens(1)
    for stage in (Stage.LEAVING, Stage.OUT, Stage.COMING):
        for seq in swapped(at.oracle).at(stage)[-1:]:
            call = partial(at.adapter.append, [seq], new, new)
            yield f"append to a sequence that is {stage.value}", call


SWAPPING = Capability(
    methods=SwappingMethods,
    renamed={
        "swapped_out": "finish_swap_out(swap)",
        "swapped_in": "finish_swap_in(swap)",
    },
    misuse=(gather_swapped_out, append_to_swapped_out),
    states=(Swapped,),
    way_back=_way_back,
    needs=dict.fromkeys(_TOGETHER, _TOGETHER),
    operations=(
        SwapOut,
        FinishSwapOut,
        SwapIn,
        FinishSwapIn,
    ),
    invariants=(swap_space,),
)
