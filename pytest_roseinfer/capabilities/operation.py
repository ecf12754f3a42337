"""The contract of an operation, and the registry of all of them by name.

A new operation is a class under ``@operation.register(name)``, which makes it a frozen dataclass.
Its annotated fields are what a trace holds of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, dataclass_transform

from pytest_roseinfer.capabilities.answers import WrongAnswer
from pytest_roseinfer.capabilities.payload import Poison, poison_of
from pytest_roseinfer.oracle.pages import Written as Written

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from pytest_roseinfer.oracle.oracle import Oracle as Oracle
    from pytest_roseinfer.oracle.texts import Said as Said

Rows = list[tuple[int, int]]
"""Sequences, and how many tokens each gets."""
Tokens = Sequence[int]
MOST_SEQUENCES = 6
"""The most sequences that a history has at a time."""
NAMING = ("seq", "seqs", "parent", "child")
"""The fields of operations that name sequences, whatever the operation."""
_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound="Operation")


class Device:
    """The device that a cache works on. This one does at once all that it is asked for."""

    @property
    def idle(self) -> bool:
        return True

    def last_steps(self) -> Sequence[Operation]:
        """Return the steps that a history ends with, for all to be looked at."""
        return ()

    def run(self, count: int, stream: int) -> None:
        """Make the next calls that a stream was asked for."""

    def finish(self) -> None:
        """Make all calls that the device was asked for."""

    def working(self) -> AbstractContextManager[object]:
        """Return a context in which torch may be asked for what the device does later."""
        return nullcontext()

    def hand_over(self, *tensors: torch.Tensor) -> None:
        """Say that these are the device's: the cache is about to be handed them."""

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Use what was handed over for something else, behind all that the device was asked for."""
        tensor.copy_(poison_of(tensor.dtype, Poison.INPUT))


@dataclass(slots=True)
class Driven:
    """A cache under test, and what an operation needs in order to drive it."""

    adapter: Any
    options: Mapping[str, Any]
    """The switches as they stand."""
    planned_with: Mapping[str, Any] = field(default_factory=dict)
    """The switches under which the present step was planned."""
    reserved: list[tuple[object, Mapping[str, Any]]] = field(default_factory=list)
    """For each open reservation: what the cache returned, and the switches at that time."""
    looked_up: dict[int, object] = field(default_factory=dict)
    """For each sequence that is to begin with what is found: what the lookup returned."""
    moving: dict[int, object] = field(default_factory=dict)
    """For each sequence that is being copied out or back: what the cache returned."""
    said: list[Said] = field(default_factory=list)
    """What the rows of the present step say, where sequences have texts."""
    device: Device = field(default_factory=lambda: Device())
    key: Any = None
    value: Any = None
    """What the present step writes: ``[layers, tokens, heads, head_dim]`` tensors."""


def asked(ask: Callable[..., _T], *arguments: Any) -> _T | Exception:
    """Ask a cache, which may be so broken that it raises; return the error then.

    What is no answer at all is not judged, and ends the step.
    """
    try:
        return ask(*arguments)
    except WrongAnswer:
        raise
    except Exception as error:
        return error


class Writer(Protocol):
    """What an operation may ask for while it is drawn."""

    adapter: type[Any]
    oracle: Oracle

    @property
    def live(self) -> list[int]:
        """The sequences whose tokens are all written, and that are not away."""

    @property
    def filled(self) -> list[int]:
        """Those of the live sequences that were not cut to nothing."""

    @property
    def finds_prompts(self) -> bool:
        """Whether the cache takes prompts, and may find what they begin with."""

    over: bool
    """No step may follow."""

    def take(self, step: Operation) -> None:
        """Add a step."""

    def pick(self, choices: Sequence[_T]) -> _T: ...

    def between(self, least: int, most: int) -> int: ...

    def shuffled(self, choices: Sequence[_T]) -> Sequence[_T]:
        """Draw an order of these."""

    def length(self, seq: int) -> int:
        """Draw a length to cut a sequence to, most of them near the boundary of a block."""

    def fresh(self, count: int) -> tuple[int, ...]:
        """Draw names that no sequence has."""

    def beginner(self) -> int:
        """Draw a name that no sequence has, most often one that says again what was said before."""

    def repeater(self, tokens: int) -> int:
        """Draw a name that no sequence has, and that says again what was said for so long."""

    def parting(self, tokens: int) -> int | None:
        """Draw one that says something else before so many tokens, or None where none does."""

    def batch(self, fresh: Sequence[int]) -> tuple[int, ...]:
        """Draw live and fresh sequences to append to."""

    def count(self, seq: int) -> int:
        """Draw a number of tokens that ends a sequence near the boundary of a block."""

    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw sequences to append to, and a number of tokens for each."""

    def layout(self) -> str: ...

    def switches(self) -> dict[str, Any]:
        """Draw a value for every switch of the adapter."""


class Move(NamedTuple):
    """One way to draw an operation."""

    rank: int
    """Moves of a lower rank are simpler; Hypothesis shrinks towards them."""
    times: int
    """How often it is listed among all moves: twice is twice as likely."""
    draw: Callable[[], Operation]


Moves = Iterable[Move]


class Operation:
    """One step of a history. The methods defined here suit most; a kind overrides the rest."""

    __slots__ = ()

    trace_name: ClassVar[str]
    """Its name in traces, which stays as it is when the class gets another."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Abilities that an adapter must offer for it to be drawn."""
    in_parts: ClassVar[bool] = False
    """A cache may be handed its tokens one by one, so that its rows are no batch."""

    looks: ClassVar[bool] = False
    """Everything is looked at behind it, for which the device must finish."""
    of_tokens: ClassVar[bool] = False
    """The sequences that it uses must hold a token."""
    least: ClassVar[int] = 1
    """The smallest number that its fields may hold, those in ``NAMING`` apart."""

    def words(self) -> str:
        raise NotImplementedError

    def rows(self) -> Rows:
        """List the rows that it appends to the books of a cache."""
        return []

    def padding(self) -> int:
        """Count the rows that belong to no sequence."""
        return 0

    def changed(self) -> list[int]:
        """List the sequences that it begins, adds to, cuts or frees."""
        return [seq for seq, _ in self.rows()]

    # ------------------------------------------------------------------ on the oracle

    def written(self, oracle: Oracle) -> Written | None:  # noqa: ARG002
        """Return the tokens that it is about to store."""
        return None

    def said(self, oracle: Oracle) -> list[Said]:
        """List what the tokens of its rows say, where sequences have texts."""
        return oracle.said(self.rows())

    def fits(self, oracle: Oracle) -> bool:
        return oracle.fits(self.rows())

    def possible(self, oracle: Oracle) -> bool:
        """Return True if what it is about is there, which in a drawn history it mostly is.

        A cache that shares by prefix may have had no room where the drawing had.
        """
        others = {*oracle.absent, *oracle.promised}
        if not others.isdisjoint([*self.changed(), *self.uses()]):
            return False
        if not (others | oracle.sequences.keys()).isdisjoint(self.begins()):
            return False
        there = {seq for seq in oracle.sequences if oracle.length(seq) or not self.of_tokens}
        return there.issuperset(self.uses())

    def uses(self) -> list[int]:
        """List the sequences that must be there."""
        return []

    def begins(self) -> list[int]:
        """List the names that no sequence may have yet."""
        return []

    def fitted(self, oracle: Oracle) -> Operation:  # noqa: ARG002
        """Return the same with the numbers that follow from what the oracle holds."""
        return self

    def allowed(self, oracle: Oracle) -> bool:  # noqa: ARG002
        """Return False if a cache must refuse it, however much room there is."""
        return True

    def refusal(self, oracle: Oracle) -> Refusal:
        """Return how a cache must refuse it, where it must."""
        rows = self.rows()
        room = f" ({oracle.room(rows)})" if rows else ""
        return Refusal("full_errors", f"does not fit{room}", f"no room{room}", room)

    def may_find_blocks(self) -> bool:
        """Return True if a cache that shares by prefix may find some of what it stores."""
        return bool(self.rows())

    def brings_back(self) -> list[int]:
        """List the sequences whose blocks it may fill with what was copied out."""
        return []

    def first(self, rows: int) -> Operation | None:  # noqa: ARG002
        """Return the same with its first rows alone; None where it is all or nothing."""
        return None

    def admitted(self, oracle: Oracle) -> Operation | None:
        """Return what is done of it: all where it fits, else the first rows or nothing."""
        if not self.allowed(oracle):
            return None
        if self.fits(oracle):
            return self
        rows = self.rows()
        fit = 0 if oracle.atomic_batches else len(rows)
        while fit and not oracle.fits(rows[:fit]):
            fit -= 1
        return self.first(fit) if fit else None

    def apply(self, oracle: Oracle) -> bool:
        """Do what is admitted of it to the oracle; return False when not all of it is."""
        admitted = self.admitted(oracle)
        if admitted:
            admitted.change(oracle)
        if admitted is not self:
            self.refuse(oracle, admitted)
        return admitted is self

    def refuse(self, oracle: Oracle, admitted: Operation | None) -> None:
        """Do to the oracle what the first row does that is not admitted."""
        behind = self.rows()[len(admitted.rows()) if admitted else 0 :]
        if behind and self.allowed(oracle):
            oracle.try_in_vain(behind[0][0])

    def change(self, oracle: Oracle) -> None:
        """Do it to an oracle in which it fits."""

    # ------------------------------------------------------------------- on a cache

    def inputs(self, tokens: Tokens) -> Tokens:
        """Return the tokens that the cache is handed, padding included."""
        return tokens

    def drive(self, cache: Driven) -> object:
        """Do it to a cache; return what ``settle`` needs of its answer."""
        raise NotImplementedError

    def settle(self, oracle: Oracle, answer: object) -> str | None:  # noqa: ARG002
        """Do to the oracle what depends on the cache's answer; say what is wrong with that."""
        return None

    def copies_blocks(self, oracle: Oracle) -> bool:  # noqa: ARG002
        """Return True if it may copy blocks though it stores no token."""
        return False

    # ------------------------------------------- other histories that must end alike

    def reversed(self) -> Operation:
        """Return the same with the rows of a batch in reverse order."""
        return self

    def halves(self) -> list[Operation]:
        """Return the same as two batches of half the rows each."""
        return [self]

    def unshared(self, oracle: Oracle) -> Operation:  # noqa: ARG002
        """Return the same without sharing what the oracle holds."""
        return self

    # ------------------------------------------------------------------ as a drawing

    @classmethod
    def moves(cls, writer: Writer) -> Moves:  # noqa: ARG003
        """List the ways to draw one now; none where none makes sense."""
        return ()

    # --------------------------------------------------------------------- as JSON

    def to_json(self) -> dict[str, Any]:
        return {"do": self.trace_name, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Operation:
        fields = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in data.items()
            if name != "do"
        }
        return OPERATIONS[data["do"]](**fields)


class Refusal(NamedTuple):
    """The refusal that a step must meet, in the terms of an adapter and in words."""

    errors: str
    """The attribute of its adapter that names the errors to raise."""
    problem: str
    """The fault of the step, after "a write that"."""
    reason: str
    room: str = ""
    """Room that the step needs and the cache has, in brackets; empty if it needs none."""


class Write(Operation):
    """An operation that stores new tokens of its rows at once."""

    __slots__ = ()

    layout: str

    def laid_out(self) -> str:
        return "" if self.layout == "plain" else f" (inputs {self.layout})"

    def tokens(self, oracle: Oracle) -> Tokens:
        return oracle.new_tokens(self.rows())

    def written(self, oracle: Oracle) -> Written | None:
        return Written(self.rows(), self.tokens(oracle), self.layout)

    def change(self, oracle: Oracle) -> None:
        oracle.append(self.rows(), self.tokens(oracle))


def take_while_they_fit(writer: Writer, steps: Iterator[Operation]) -> None:
    """Add steps to a history until one finds no room."""
    for step in steps:
        if writer.over or not step.fits(writer.oracle):
            return
        writer.take(step)


OPERATIONS: dict[str, type[Operation]] = {}
"""Every kind of operation, by the name that a trace gives it."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(name: str) -> Callable[[type[_Kind]], type[_Kind]]:
    """Make a class a frozen dataclass, and a kind of operation that traces have by this name."""

    def registered(kind: type[_Kind]) -> type[_Kind]:
        kind.trace_name = name
        OPERATIONS[name] = made = dataclass(frozen=True, slots=True)(kind)
        return made

    return registered
