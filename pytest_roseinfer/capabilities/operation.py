"""The contract of an operation, and the registry of all operations by name.

A new operation is a class under ``@operation.register(name)``, which makes it a frozen dataclass.
Traces store its annotated fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, dataclass_transform

from pytest_roseinfer.capabilities.payload import Poison, poison
from pytest_roseinfer.capabilities.return_values import InvalidReturnValue
from pytest_roseinfer.oracle.pages import Written as Written

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from pytest_roseinfer.capabilities.cache_data import Transfer
    from pytest_roseinfer.oracle.oracle import Oracle as Oracle
    from pytest_roseinfer.oracle.texts import TextSlice as TextSlice

Rows = list[tuple[int, int]]
"""Sequences, and the number of tokens that each gets."""
Tokens = Sequence[int]
MAX_SEQUENCES = 6
"""Most sequences that a drawn history has at a time."""
NAMING = ("seq", "seqs", "parent", "child", "sources")
"""Fields that hold names of sequences, in all operations."""
_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound="Operation")


class Device:
    """The device that a cache works on; this base class is synchronous."""

    @property
    def idle(self) -> bool:
        """True if no call is in flight."""
        return True

    def last_steps(self) -> Sequence[Operation]:
        """Return the last steps of a history, which make its final state readable."""
        return ()

    def run(self, count: int, stream: int) -> None:
        """Make the next ``count`` calls of a stream."""

    def finish(self) -> None:
        """Make all calls in flight."""

    def torch_context(self) -> AbstractContextManager[object]:
        """Return a context that defers torch operations on the device's tensors."""
        return nullcontext()

    def hand_over(self, *tensors: torch.Tensor) -> None:
        """Register tensors as the device's, right before they are passed to the cache."""

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor that was handed over, after all calls in flight."""
        poison(tensor, Poison.INPUT)


class OpenReservation(NamedTuple):
    """Room that a cache reserved for tokens that are not written yet."""

    handle: object
    """Return value of ``reserve``."""
    options: Mapping[str, Any]
    """Values of the switches at that time."""
    seqs: Sequence[int]


@dataclass(slots=True)
class CacheUnderTest:
    """A cache under test, and the state that operations need to drive it."""

    adapter: Any
    options: Mapping[str, Any]
    """Current values of the switches."""
    planned_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of the switches when the present step was planned."""
    open_reservations: list[OpenReservation] = field(default_factory=list)
    """Reservations whose tokens are not written, the oldest first."""
    lookup_handles: dict[int, object] = field(default_factory=dict)
    """Return values of ``look_up``, by the sequence that is to begin with them."""
    swap_handles: dict[int, object] = field(default_factory=dict)
    """Handles that the cache returned, by the sequence that is being swapped out or in."""
    sessions: dict[int, object] = field(default_factory=dict)
    """Handles of sessions, by the sequences that they were."""
    loads: dict[int, Transfer] = field(default_factory=dict)
    """Loads in flight, by the sequence that waits for them."""
    text_slices: list[TextSlice] = field(default_factory=list)
    """Texts of the rows of the present step; empty if sequences have no texts."""
    device: Device = field(default_factory=lambda: Device())
    key: Any = None
    value: Any = None
    """Keys and values that the present step writes, ``[layers, tokens, heads, head_dim]``."""
    other_inputs: list[torch.Tensor] = field(default_factory=list)
    """Tensors in addition to keys and values that the cache got for the present step."""
    pass_parts: list[Callable[[slice], None]] = field(default_factory=list)
    """Functions that each pass some tokens of ``other_inputs``, for a write in several calls."""

    def pass_input(
        self, tensors: Iterable[torch.Tensor], pass_part: Callable[[slice], None]
    ) -> None:
        """Pass tensors to the cache that the present step also writes.

        ``pass_part`` calls the cache's method with the tensors of some tokens.
        """
        for tensor in tensors:
            self.device.hand_over(tensor)
            self.other_inputs.append(tensor)
        self.pass_parts.append(pass_part)
        pass_part(slice(None))

    def overwrite_inputs(self) -> None:
        """Overwrite the tensors that the cache got for the present step, in case it keeps them."""
        for tensor in (self.key, self.value, *self.other_inputs):
            self.device.overwrite(tensor)
        self.other_inputs, self.pass_parts = [], []


def call_or_error(ask: Callable[..., _T], *arguments: Any) -> _T | Exception:
    """Call a method of a cache that may be broken; return its result or the error that it raised.

    An invalid return value is not judged: its error is raised and ends the step.
    """
    try:
        return ask(*arguments)
    except InvalidReturnValue:
        raise
    except Exception as error:
        return error


class Writer(Protocol):
    """Source of random choices, and the history so far, for operations that are drawn."""

    adapter: type[Any]
    oracle: Oracle

    @property
    def live(self) -> list[int]:
        """Sequences that are not absent and have no reserved tokens to write."""

    @property
    def filled(self) -> list[int]:
        """Live sequences with at least one token."""

    @property
    def reuses_prefixes(self) -> bool:
        """True if the cache takes prompts and may reuse their prefixes."""

    no_more_steps: bool
    """True if the history has its last step."""

    def take(self, step: Operation) -> None:
        """Add a step."""

    def pick(self, choices: Sequence[_T]) -> _T: ...

    def between(self, min_value: int, max_value: int) -> int: ...

    def shuffle(self, choices: Sequence[_T]) -> Sequence[_T]:
        """Draw an order of these choices."""

    def length(self, seq: int) -> int:
        """Draw a length to truncate a sequence to, most often near the boundary of a block."""

    def fresh(self, count: int) -> tuple[int, ...]:
        """Draw names that no sequence has."""

    def name_reusing_prefix(self) -> int:
        """Draw a name that no sequence has, most often one whose text repeats a stored prefix."""

    def name_with_prefix(self, tokens: int, text: int | None = None) -> int:
        """Draw a name that no sequence has, whose text repeats ``tokens`` tokens of another.

        The other one is ``text``, or any stored text if None.
        """

    def name_without_prefix(self, tokens: int) -> int | None:
        """Draw a name whose text differs within its first ``tokens`` tokens; None if none does."""

    def batch(self, fresh: Sequence[int]) -> tuple[int, ...]:
        """Draw live and fresh sequences to append to."""

    def count(self, seq: int) -> int:
        """Draw a number of tokens that ends a sequence near the boundary of a block."""

    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw sequences to append to, and a number of tokens for each."""

    def layout(self) -> str: ...

    def switches(self) -> dict[str, Any]:
        """Draw a value for every switch of the adapter."""


class DrawOption(NamedTuple):
    """One way to draw an operation."""

    rank: int
    """Complexity of the operation; Hypothesis shrinks towards the lowest rank."""
    times: int
    """Weight among all options: 2 is twice as likely as 1."""
    draw: Callable[[], Operation]


DrawOptions = Iterable[DrawOption]


class Operation:
    """One step of a history; subclasses override the defaults that do not fit them."""

    __slots__ = ()

    trace_name: ClassVar[str]
    """Its name in traces, which is kept when the class is renamed."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Methods that an adapter must define for it to be drawn."""
    in_parts: ClassVar[bool] = False
    """True if the cache may get its tokens one by one, so that its rows are not one batch."""

    moves_tokens: ClassVar[bool] = False
    """True if it stores tokens that the cache has already, so that the cache gets none."""
    waits_for_device: ClassVar[bool] = False
    """True if the device must finish after it, since the whole cache is read then."""
    needs_tokens: ClassVar[bool] = False
    """True if each sequence that it uses must have at least one token."""
    least: ClassVar[int] = 1
    """Smallest number that its fields may hold, except those in ``NAMING``."""

    def describe(self) -> str:
        raise NotImplementedError

    def rows(self) -> Rows:
        """List the rows that it appends to tables of a cache."""
        return []

    def padding(self) -> int:
        """Count the rows that belong to no sequence."""
        return 0

    def changed_seqs(self) -> list[int]:
        """List the sequences that it begins, appends to, truncates or frees."""
        return [seq for seq, _ in self.rows()]

    # ------------------------------------------------------------------ on the oracle

    def written(self, oracle: Oracle) -> Written | None:  # noqa: ARG002
        """Return the tokens that it is about to store; None if it stores none."""
        return None

    def text_slices(self, oracle: Oracle) -> list[TextSlice]:
        """List the texts of its rows; empty if sequences have no texts."""
        return oracle.text_slices(self.rows())

    def fits(self, oracle: Oracle) -> bool:
        return oracle.fits(self.rows())

    def possible(self, oracle: Oracle) -> bool:
        """Return True if its sequences exist and are usable, and its new names are unused.

        In a drawn history that can be False only after the cache had room where the drawing had
        none, or the reverse, as with a cache that shares by prefix.
        """
        names = {*oracle.named, *oracle.pending_seqs}
        if not names.isdisjoint(self.new_seqs()):
            return False
        if not (names - {*oracle.usable}).isdisjoint([*self.changed_seqs(), *self.uses()]):
            return False
        there = {seq for seq in oracle.sequences if oracle.length(seq) or not self.needs_tokens}
        return there.issuperset(self.uses())

    def uses(self) -> list[int]:
        """List the sequences that must exist."""
        return []

    def new_seqs(self) -> list[int]:
        """List the names that no sequence may have yet."""
        return []

    def fill_in_numbers(self, oracle: Oracle) -> Operation:  # noqa: ARG002
        """Return a copy with the numbers that follow from the oracle's contents."""
        return self

    def allowed(self, oracle: Oracle) -> bool:  # noqa: ARG002
        """Return False if a cache must refuse it, however much room it has."""
        return True

    def refusal(self, oracle: Oracle) -> Refusal:
        """Return the refusal that a cache must raise if it does not fit."""
        rows = self.rows()
        room = f" ({oracle.describe_free_blocks(rows)})" if rows else ""
        return Refusal("full_errors", f"does not fit{room}", f"no room{room}", room)

    def may_find_blocks(self) -> bool:
        """Return True if a cache that shares by prefix may reuse stored blocks for it."""
        return bool(self.rows())

    def restored_seqs(self) -> list[int]:
        """List the sequences whose blocks it may fill with swapped-out tokens."""
        return []

    def first(self, rows: int) -> Operation | None:  # noqa: ARG002
        """Return a copy with only its first rows; None if it is all or nothing."""
        return None

    def admitted_part(self, oracle: Oracle) -> Operation | None:
        """Return the part that is admitted: itself if it fits, else its first rows or None."""
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
        """Apply its admitted part to the oracle; return False if that is not all of it."""
        admitted = self.admitted_part(oracle)
        if admitted:
            admitted.change(oracle)
        if admitted is not self:
            self.refuse(oracle, admitted)
        return admitted is self

    def refuse(self, oracle: Oracle, admitted: Operation | None) -> None:
        """Apply the effects of its first refused row to the oracle."""
        refused = self.rows()[len(admitted.rows()) if admitted else 0 :]
        if refused and self.allowed(oracle):
            oracle.slide_refused(refused[0][0])

    def change(self, oracle: Oracle) -> None:
        """Apply it to an oracle that has room for it."""

    # ------------------------------------------------------------------- on a cache

    def inputs(self, tokens: Tokens) -> Tokens:
        """Return the tokens that are passed to the cache, padding included."""
        return tokens

    def drive(self, cache: CacheUnderTest) -> object:
        """Apply it to a cache; return the cache's answer for ``settle``."""
        raise NotImplementedError

    def settle(self, oracle: Oracle, answer: object) -> str | None:  # noqa: ARG002
        """Apply effects that depend on the cache's answer; return a problem with it, or None."""
        return None

    def copies_blocks(self, oracle: Oracle) -> bool:  # noqa: ARG002
        """Return True if it may copy blocks although it stores no token."""
        return False

    # ------------------------------------------ variants that must have equal results

    def reversed(self) -> Operation:
        """Return a copy with the rows of its batch in reverse order."""
        return self

    def halves(self) -> list[Operation]:
        """Split its batch in two, each with half of the rows."""
        return [self]

    def without_sharing(self, oracle: Oracle) -> Operation:  # noqa: ARG002
        """Return an equivalent operation that shares no blocks with other sequences."""
        return self

    def forked_seqs(self) -> list[int]:
        """List the sequences that it forks, if ``without_sharing`` forks them too."""
        return []

    def simpler(self) -> Iterable[Operation]:
        """List simpler variants of fields that are neither names, numbers nor rows of numbers."""
        return ()

    # ----------------------------------------------------------------------- drawing

    @classmethod
    def draw_options(cls, writer: Writer) -> DrawOptions:  # noqa: ARG003
        """List the ways to draw one in the present state; empty if it makes no sense there."""
        return ()

    # --------------------------------------------------------------------- as JSON

    def to_json(self) -> dict[str, Any]:
        return {"do": self.trace_name, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Operation:
        fields = {name: _as_tuples(value) for name, value in data.items() if name != "do"}
        return OPERATIONS[data["do"]](**fields)


def _as_tuples(value: Any) -> Any:
    """Return a value of a trace with tuples in place of lists, those in lists too."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class Refusal(NamedTuple):
    """The refusal that a cache must raise for a step: its errors, and the reason in words."""

    errors: str
    """Attribute of the adapter that lists the errors to raise."""
    problem: str
    """Fault of the step, as in "a write that <problem>"."""
    reason: str
    """The same fault as a noun phrase."""
    room: str = ""
    """Room that the step needs and the cache has, in brackets; empty if it needs none."""


class Write(Operation):
    """An operation that stores new tokens for its rows in one call."""

    __slots__ = ()

    layout: str

    def describe_layout(self) -> str:
        return "" if self.layout == "plain" else f" (inputs {self.layout})"

    def tokens(self, oracle: Oracle) -> Tokens:
        return oracle.new_tokens(self.rows())

    def written(self, oracle: Oracle) -> Written | None:
        return Written(self.rows(), self.tokens(oracle), self.layout)

    def change(self, oracle: Oracle) -> None:
        oracle.append(self.rows(), self.tokens(oracle))


def add_while_fitting(writer: Writer, steps: Iterator[Operation]) -> None:
    """Add steps to a history until one finds no room."""
    for step in steps:
        if writer.no_more_steps or not step.fits(writer.oracle):
            return
        writer.take(step)


OPERATIONS: dict[str, type[Operation]] = {}
"""All kinds of operations, by their names in traces."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(name: str) -> Callable[[type[_Kind]], type[_Kind]]:
    """Turn a class into a frozen dataclass, and register it under its name in traces."""

    def registered(kind: type[_Kind]) -> type[_Kind]:
        kind.trace_name = name
        OPERATIONS[name] = operation_class = dataclass(frozen=True, slots=True)(kind)
        return operation_class

    return registered
