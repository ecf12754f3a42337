"""Swapping of sequences out of the cache and back in, each in two steps."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, optional
from pytest_roseinfer.capabilities.misuse import Call, MisuseState, misuse
from pytest_roseinfer.capabilities.observation import Finding, Observation, invariant
from pytest_roseinfer.capabilities.writes import draw_long_writes
from pytest_roseinfer.oracle.pages import Absence, State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping


class SwappingMethods:
    """Adapter methods for swapping."""

    swap_out_holds: ClassVar[bool] = True
    """True if a sequence holds its blocks until ``finish_swap_out``; False if they are free as soon
    as ``swap_out`` returns, since they were copied by then."""
    swap_shared_errors: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors of ``swap_out``: it raises one of them, and changes nothing, for a sequence that
    shares a block with another one; empty if such sequences are swapped out too."""

    @optional
    def swap_out(self, seq: int) -> object:
        """Begin to copy a sequence out; the result is passed to ``finish_swap_out``.

        Until then the sequence reads back as before, unless ``swap_out_holds`` is False, and
        ``free`` is the only step that may use it. Swap space of ``spec.num_blocks`` blocks per
        layer is enough.
        """

    @optional
    def finish_swap_out(self, swap: Any) -> None:
        """Wait until the copy is done; from then on the sequence holds no block.

        Blocks that others hold are copied too, and their refcount decreases.
        """

    @optional
    def swap_in(self, seq: int) -> object:
        """Allocate blocks and begin to copy back; the result is passed to ``finish_swap_in``.

        The blocks are in its ``table`` from then on, and none of them is shared. The sequence is
        not read before ``finish_swap_in``.
        """

    @optional
    def finish_swap_in(self, swap: Any) -> None:
        """Wait until the copy is done; the sequence reads back as before it was swapped out."""


class Stage(Enum):
    """A stage of swapping a sequence out and back in."""

    SWAPPING_OUT = "being swapped out"
    """Copy out of the cache in progress."""
    SWAPPED_OUT = "swapped out"
    """Copied out, without blocks."""
    SWAPPING_IN = "being swapped in"
    """Blocks allocated, and copy back in progress."""


@dataclass(slots=True)
class Swapped(State):
    """Sequences that are swapped out, or being swapped out or in."""

    any_of: ClassVar = ("swap_out",)
    holds_blocks: bool = True
    """Value of ``SwappingMethods.swap_out_holds``."""
    refuses_shared: bool = False
    """True if sequences that share a block are not swapped out."""
    stages: dict[int, Stage] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each sequence, as it must read back after the swap-in."""

    @classmethod
    def of(cls, adapter: Any, spec: Any) -> Swapped:  # noqa: ARG003
        return cls(adapter.swap_out_holds, bool(adapter.swap_shared_errors))

    @property
    def absent(self) -> Mapping[int, Absence]:
        stages = self.stages.items()
        return {seq: Absence(stage.value, self.tokens[seq]) for seq, stage in stages}

    @property
    def hidden(self) -> Collection[int]:
        return self.at(Stage.SWAPPING_IN)

    def unwritten(self, seq: int) -> int:
        return len(self.tokens[seq]) if self.stages.get(seq) is Stage.SWAPPING_IN else 0

    def on_free(self, seq: int) -> None:
        self.stages.pop(seq, None)
        self.tokens.pop(seq, None)

    def at(self, stage: Stage) -> list[int]:
        """Return the sequences at a stage."""
        return [seq for seq, current in self.stages.items() if current is stage]

    def blocks(self, block_size: int) -> int:
        """Count the blocks of swap space that these sequences need at most."""
        return sum(-(-len(tokens) // block_size) for tokens in self.tokens.values())


def swap_state(oracle: operation.Oracle) -> Swapped:
    return oracle.ensure_state(Swapped)


def _is_at_stage(oracle: operation.Oracle, seq: int, stage: Stage) -> bool:
    return swap_state(oracle).stages.get(seq) is stage


_TOGETHER = ("swap_out", "finish_swap_out", "swap_in", "finish_swap_in")
"""Methods that each need the three others."""


class _Swap(operation.Operation):
    """An operation that moves one sequence to the next stage of swapping."""

    __slots__ = ()

    seq: int
    needs = frozenset(_TOGETHER)

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def copies_blocks(self, oracle: operation.Oracle) -> bool:  # noqa: ARG002
        return True


@operation.register("SwapOut")
class SwapOut(_Swap):
    """Begin to copy a sequence out of the cache."""

    seq: int

    needs_tokens = True

    def describe(self) -> str:
        return f"begin to swap sequence {self.seq} out"

    def uses(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        if not operation.Operation.possible(self, oracle):
            return False
        used = swap_state(oracle).blocks(oracle.block_size)
        return used + len(oracle.sequences[self.seq]) <= oracle.capacity

    def allowed(self, oracle: operation.Oracle) -> bool:
        shares = any(page.holders > 1 for page in oracle.sequences[self.seq])
        return not (shares and swap_state(oracle).refuses_shared)

    def refusal(self, oracle: operation.Oracle) -> operation.Refusal:
        if self.allowed(oracle):
            return operation.Operation.refusal(self, oracle)
        return operation.Refusal("swap_shared_errors", "it must refuse", "it shares a block")

    def change(self, oracle: operation.Oracle) -> None:
        out = swap_state(oracle)
        out.stages[self.seq], out.tokens[self.seq] = Stage.SWAPPING_OUT, oracle.tokens(self.seq)
        if not out.holds_blocks:
            oracle.release_pages(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.swap_handles[self.seq] = cache.adapter.swap_out(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if fitting := [seq for seq in writer.filled if cls(seq).possible(writer.oracle)]:
            yield operation.DrawOption(130, 6, lambda: cls(writer.pick(fitting)))


@operation.register("FinishSwapOut")
class FinishSwapOut(_Swap):
    """Finish copying a sequence out, which frees its blocks."""

    seq: int

    def describe(self) -> str:
        return f"finish swapping sequence {self.seq} out"

    def possible(self, oracle: operation.Oracle) -> bool:
        return _is_at_stage(oracle, self.seq, Stage.SWAPPING_OUT)

    def change(self, oracle: operation.Oracle) -> None:
        swap_state(oracle).stages[self.seq] = Stage.SWAPPED_OUT
        if swap_state(oracle).holds_blocks:
            oracle.release_pages(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.finish_swap_out(cache.swap_handles.pop(self.seq))

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if leaving := swap_state(writer.oracle).at(Stage.SWAPPING_OUT):
            yield operation.DrawOption(130, 10, lambda: cls(writer.pick(leaving)))


@operation.register("SwapIn")
class SwapIn(_Swap):
    """Allocate blocks for a swapped-out sequence, and begin to copy it back."""

    seq: int

    def describe(self) -> str:
        return f"begin to swap sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return _is_at_stage(oracle, self.seq, Stage.SWAPPED_OUT)

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.fits([(self.seq, len(swap_state(oracle).tokens[self.seq]))])

    def may_find_blocks(self) -> bool:
        return True

    def change(self, oracle: operation.Oracle) -> None:
        tokens = swap_state(oracle).tokens[self.seq]
        oracle.append([(self.seq, len(tokens))], tokens)
        swap_state(oracle).stages[self.seq] = Stage.SWAPPING_IN

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.swap_handles[self.seq] = cache.adapter.swap_in(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        steps = [cls(seq) for seq in swap_state(writer.oracle).at(Stage.SWAPPED_OUT)]
        fitting = [step for step in steps if step.fits(writer.oracle)]
        if steps:
            yield operation.DrawOption(
                130, 10 if fitting else 3, lambda: writer.pick(fitting or steps)
            )
            yield from draw_long_writes(writer)


@operation.register("FinishSwapIn")
class FinishSwapIn(_Swap):
    """Finish copying a sequence back; from then on it can be read and appended to."""

    seq: int

    def describe(self) -> str:
        return f"finish swapping sequence {self.seq} in"

    def possible(self, oracle: operation.Oracle) -> bool:
        return _is_at_stage(oracle, self.seq, Stage.SWAPPING_IN)

    def restored_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        swap_state(oracle).on_free(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.finish_swap_in(cache.swap_handles.pop(self.seq))

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if coming := swap_state(writer.oracle).at(Stage.SWAPPING_IN):
            yield operation.DrawOption(130, 10, lambda: cls(writer.pick(coming)))


@invariant(rank=22, needs=("ledger", "swap_out"))
def swap_space(observation: Observation) -> Finding | None:
    """Swap space in use must belong to sequences that are swapped out."""
    max_blocks = swap_state(observation.oracle).blocks(observation.spec.block_size)
    for layer in range(observation.spec.num_layers):
        used = observation.after.ledger(layer).swapped or 0
        if used > max_blocks:
            return Finding(
                f"layer {layer}: {used} blocks of swap space are in use, and sequences swapped out "
                f"need {max_blocks}"
            )
    return None


_NEXT = {
    Stage.SWAPPING_OUT: FinishSwapOut,
    Stage.SWAPPED_OUT: SwapIn,
    Stage.SWAPPING_IN: FinishSwapIn,
}


def _way_back(oracle: operation.Oracle) -> list[operation.Operation]:
    return [_NEXT[stage](seq) for seq, stage in swap_state(oracle).stages.items()]


# Bad calls


@misuse("gather", "swap_out", "swap_in")
def gather_swapped_out(at: MisuseState) -> Iterator[Call]:
    for stage in (Stage.SWAPPED_OUT, Stage.SWAPPING_IN):
        yield from at.gather_absent(swap_state(at.oracle).at(stage))


@misuse("swap_out", "swap_in")
def append_to_swapped_out(at: MisuseState) -> Iterator[Call]:
    new = at.tokens(1)
    for stage in (Stage.SWAPPING_OUT, Stage.SWAPPED_OUT, Stage.SWAPPING_IN):
        for seq in swap_state(at.oracle).at(stage)[-1:]:
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
    return_steps=_way_back,
    needs=dict.fromkeys(_TOGETHER, _TOGETHER),
    operations=(
        SwapOut,
        FinishSwapOut,
        SwapIn,
        FinishSwapIn,
    ),
    invariants=(swap_space,),
)
