"""Swapping a sequence out of the cache and back, each in two steps."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, optional
from pytest_roseinfer.capabilities.observation import Finding, Observation, invariant
from pytest_roseinfer.capabilities.writes import floods
from pytest_roseinfer.oracle.oracle import Stage


class SwappingMethods:
    """The methods that swap sequences out and in."""

    swap_out_holds: ClassVar[bool] = True
    """The blocks of a sequence are its own until ``swapped_out``. False where they are free as soon
    as ``swap_out`` returns, since they were copied by then."""

    @optional
    def swap_out(self, seq: int) -> object:
        """Begin to copy a sequence out of the cache; what it returns goes to ``swapped_out``.

        Until then the sequence reads back as before, and nothing is done to it but ``free``. Swap
        space for ``spec.num_blocks`` blocks of each layer is enough.
        """

    @optional
    def swapped_out(self, leaving: Any) -> None:
        """Make sure that the copy is done; from here on the sequence holds no block.

        Blocks that others hold are copied too. They stay with the others, with a holder less.
        """

    @optional
    def swap_in(self, seq: int) -> object:
        """Take blocks for a sequence and begin to copy it back; returns what ``swapped_in`` gets.

        They are in its ``table`` from here on, none of them shared. It is not read until then.
        """

    @optional
    def swapped_in(self, coming: Any) -> None:
        """Make sure that the copy is done; the sequence reads back as before it was swapped out."""


@operation.register("SwapOut")
class SwapOut(operation.Operation):
    seq: int

    of_tokens = True
    needs = frozenset({"swap_out", "swapped_out", "swap_in", "swapped_in"})

    def words(self) -> str:
        return f"begin to swap sequence {self.seq} out"

    def uses(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        if not operation.Operation.possible(self, oracle):
            return False
        taken = oracle.away.swapped_blocks(oracle.block_size)
        return taken + len(oracle.sequences[self.seq]) <= oracle.capacity

    def changed(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.away.leave(self.seq, Stage.LEAVING, oracle.tokens(self.seq))
        if not oracle.swap_out_holds:
            oracle.give_up(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.moving[self.seq] = cache.adapter.swap_out(self.seq)

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if fitting := [seq for seq in writer.filled if cls(seq).possible(writer.oracle)]:
            yield operation.Move(130, 6, lambda: cls(writer.pick(fitting)))


@operation.register("SwappedOut")
class SwappedOut(operation.Operation):
    """Finish copying a sequence out; its blocks are free for others from here on."""

    seq: int

    needs = SwapOut.needs

    def words(self) -> str:
        return f"finish swapping sequence {self.seq} out"

    def possible(self, oracle: operation.Oracle) -> bool:
        return oracle.away.stages.get(self.seq) is Stage.LEAVING

    def changed(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.away.stages[self.seq] = Stage.OUT
        if oracle.swap_out_holds:
            oracle.give_up(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.swapped_out(cache.moving.pop(self.seq))

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if leaving := writer.oracle.away.at(Stage.LEAVING):
            yield operation.Move(130, 10, lambda: cls(writer.pick(leaving)))


@operation.register("SwapIn")
class SwapIn(operation.Operation):
    """Take blocks for a sequence that is swapped out, and begin to copy it back."""

    seq: int

    needs = SwapOut.needs

    def words(self) -> str:
        return f"begin to swap sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return oracle.away.stages.get(self.seq) is Stage.OUT

    def changed(self) -> list[int]:
        return [self.seq]

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.fits([(self.seq, len(oracle.away.tokens[self.seq]))])

    def may_find_blocks(self) -> bool:
        return True

    def change(self, oracle: operation.Oracle) -> None:
        tokens = oracle.away.tokens[self.seq]
        oracle.append([(self.seq, len(tokens))], tokens)
        oracle.away.stages[self.seq] = Stage.COMING

    def drive(self, cache: operation.Driven) -> None:
        cache.moving[self.seq] = cache.adapter.swap_in(self.seq)

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        steps = [cls(seq) for seq in writer.oracle.away.at(Stage.OUT)]
        fitting = [step for step in steps if step.fits(writer.oracle)]
        if steps:
            yield operation.Move(130, 10 if fitting else 3, lambda: writer.pick(fitting or steps))
            yield from floods(writer)


@operation.register("SwappedIn")
class SwappedIn(operation.Operation):
    """Finish copying a sequence back; it can be read and appended to from here on."""

    seq: int

    needs = SwapOut.needs

    def words(self) -> str:
        return f"finish swapping sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return oracle.away.stages.get(self.seq) is Stage.COMING

    def changed(self) -> list[int]:
        return [self.seq]

    def brings_back(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.away.end(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.swapped_in(cache.moving.pop(self.seq))

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if coming := writer.oracle.away.at(Stage.COMING):
            yield operation.Move(130, 10, lambda: cls(writer.pick(coming)))


@invariant(rank=22, needs=("ledger", "swap_out"))
def swap_space(seen: Observation) -> Finding | None:
    """Swap space that is taken must belong to sequences that are swapped out."""
    most = seen.oracle.away.swapped_blocks(seen.spec.block_size)
    for layer in range(seen.spec.num_layers):
        taken = seen.after.ledger(layer).swapped or 0
        if taken > most:
            return Finding(
                f"layer {layer}: {taken} blocks of swap space are taken, and what is swapped out "
                f"fills {most}"
            )
    return None


SWAPPING = Capability(
    methods=SwappingMethods,
    needs={
        "swap_out": ("swap_out", "swapped_out", "swap_in", "swapped_in"),
        "swapped_out": ("swap_out", "swapped_out", "swap_in", "swapped_in"),
        "swap_in": ("swap_out", "swapped_out", "swap_in", "swapped_in"),
        "swapped_in": ("swap_out", "swapped_out", "swap_in", "swapped_in"),
    },
    operations=(
        SwapOut,
        SwappedOut,
        SwapIn,
        SwappedIn,
    ),
    invariants=(swap_space,),
)
