"""The contract of a capability: what a cache may offer, and what tests it.

A capability is a module with a mixin of adapter methods and one ``Capability`` that names them.
What an adapter offers follows from its own bases: those of ``KVCacheAdapter`` are the shipped
capabilities, and another one is mixed in, as in ``class Toy(PinningMethods, KVCacheAdapter)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from typing import NoReturn, Self

    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.capabilities.misuse import Misuse
    from pytest_roseinfer.capabilities.observation import (
        Finding,
        Invariant,
        Observation,
        Snapshot,
    )
    from pytest_roseinfer.capabilities.operation import Driven, Operation, Writer
    from pytest_roseinfer.capabilities.payload import Payload
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import State
    from pytest_roseinfer.oracle.texts import Said

_Method = TypeVar("_Method", bound=Callable[..., Any])
AnyObserver = TypeVar("AnyObserver", bound="Observer")
_Part = TypeVar("_Part", bound="OfSome")


@dataclass(frozen=True)
class Traits:
    """The declarations of an adapter about one capability; unknown choices are refused."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            choices, chosen = get_args(hint), getattr(self, name)
            if get_origin(hint) is Literal and chosen not in choices:
                known = ", ".join(map(repr, choices))
                raise TypeError(
                    f"{type(self).__name__}: {name} is {chosen!r}; choose one of {known}"
                )

    def but(self, **changes: Any) -> Self:
        """Return the same with some of the choices changed, for a class that inherits others."""
        return replace(self, **changes)


def optional(method: _Method) -> _Method:
    """Mark a method that is tested where an adapter defines it."""
    method.__dict__["optional"] = True
    return method


class Across(Enum):
    """A way in which the ranks of a cache do a method together."""

    WRITE = "each stores its heads of the keys and values, which come last"
    READ = "the heads that each returns are put together"
    STORED = "the heads that each stores are put together, block by block"
    SAME = "all must answer alike"
    EACH = "the answers are returned as a list"
    FIRST = "the first rank answers for all"


class Ranks(Protocol):
    """The ranks of one cache, as functions in ``Capability.sharded`` get them."""

    def each(self, call: Callable[[int, Any], Any]) -> list[Any]:
        """Have every rank do something; raise what all of them raise."""

    def heads(self, *tensors: Any) -> list[tuple[Any, ...]]:
        """Return for each rank its heads of ``[..., heads, head_dim]`` tensors."""

    def agreed(self, name: str, answers: Sequence[Any]) -> Any:
        """Return the answer that all ranks gave; raise where they differ."""


class Run(Protocol):
    """The run of a history on one cache, as observers know it."""

    adapter: Any
    declared: type[Any]
    """The class of the adapter, for what it declares of its cache."""
    spec: CacheSpec
    gathers_every: int
    """Steps from one reading by ``gather`` to the next, as in ``History``."""
    can: frozenset[str]
    """The methods that the adapter defines, its conditions, its choices as in
    "prefixes.shares=equal prefixes", and "tolerance" and "windows" where it is built with them."""
    oracle: Oracle
    payload: Payload
    driven: Driven
    observers: dict[type[Observer], Observer]
    done: list[Operation]
    """The steps so far, the present one included."""
    last: bool
    """True during the last step of the history."""
    seen: dict[int, int]
    """Every token that was ever to be written, and the sequence that was the first to do it."""
    now: Snapshot
    """The cache after the latest step."""

    def observer(self, kind: type[AnyObserver]) -> AnyObserver | None:
        """Return the observer of this kind, if the run has it."""

    def fail(self, finding: Finding) -> NoReturn:
        """Raise the failure of the history so far."""


class OfSome(Protocol):
    """A part of a capability that is for some of the caches that offer it."""

    @property
    def any_of(self) -> Collection[str]:
        """Names as in ``Run.can``, of which the cache has any; for every cache if there is none."""


class Observer:
    """Watches one run: it counts what steps meet, and knows what no single step shows."""

    any_of: ClassVar[Collection[str]] = ()
    """The caches that it is made for, as in ``OfSome``."""
    conditions: ClassVar[Mapping[str, str]] = {}
    """Descriptions of the conditions that it counts, by their names; caches leave these out."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def before(self, step: Operation) -> Mapping[str, int]:  # noqa: ARG002
        """Look before a step; return what is counted."""
        return {}

    def driving(self, step: Operation, said: Sequence[Said]) -> None:
        """Act right before the cache does a step, whose rows have these texts."""

    def after(self, seen: Observation) -> Mapping[str, int]:  # noqa: ARG002
        """Look after a step in which all invariants held; return what is counted."""
        return {}

    def notes(self, after: Snapshot) -> object:  # noqa: ARG002
        """Return what invariants must know of the steps before this one; None if nothing."""
        return None

    def about_refusals(self) -> str:
        """Say what may explain that a step was refused which fits."""
        return ""


@dataclass(frozen=True, slots=True)
class Look:
    """The scope of one snapshot."""

    reads: bool
    """True if sequences are read and prefixes are looked up as well."""
    copies: bool
    """True if the storage is copied; False if the snapshot has the live storage."""


@dataclass(frozen=True, slots=True)
class Prelude:
    """First steps of drawn histories, without which a capability is hard to test."""

    any_of: Collection[str]
    """The methods of an adapter, any of which is defined where a history opens so."""
    rank: int
    """The lowest comes first."""
    open: Callable[[Writer], None]
    """Function that takes the steps; it may take none."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a snapshot."""

    any_of: Collection[str]
    """The caches that it is taken of, as in ``OfSome``."""
    show: Callable[[Run, Look], Mapping[str, Any]]
    """Function that returns the fields of a ``Snapshot``."""
    in_pictures: bool = False
    """True if the picture of a failure shows it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A preparation of a cache right after it was made, before anything looks at it."""

    any_of: Collection[str]
    """The caches that are prepared, as in ``OfSome``."""
    prepare: Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Questions that a cache is asked after a step, which change nothing."""

    any_of: Collection[str]
    """The caches that are asked, as in ``OfSome``."""
    every: int
    """The number of steps after which it is due; it is due after the last step, too."""
    ask: Callable[[Run], Sequence[Any]]
    """Function that returns the answers; none where there was nothing to ask."""
    after: str
    """The kind of observation that invariants judge the answers by."""


class Walk(NamedTuple):
    """A small history that goes on with every step that may come next."""

    oracle: Oracle
    names: list[int]
    """The names that a sequence can begin under."""

    @property
    def filled(self) -> list[int]:
        """The sequences that hold a token."""
        return [seq for seq in self.oracle.sequences if self.oracle.length(seq)]


@dataclass(slots=True)
class Large:
    """A history of many rows, or of long sequences, that is being made."""

    adapter: type[Any]
    block_size: int
    names: list[int]
    """The sequences that it has by now, in the order in which a batch of all has them."""
    most_names: int

    def fresh(self) -> int:
        """Return a name that no sequence has had."""
        return max(self.names) + 1


@dataclass(frozen=True, slots=True, eq=False)
class CapabilityBase:
    """A feature that an adapter of some kind may offer."""

    methods: type
    """A mixin with the adapter methods, and with the attributes by which an adapter describes them.

    It has no ``__init__`` and calls no ``super()``. Methods that are marked ``optional`` are tested
    where an adapter defines them."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Replacements for former attributes and methods, by their old names."""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For optional methods, the others without which nothing would call them."""
    refuse: Sequence[Callable[[type[Any]], None]] = ()
    """Checks of an adapter class, each of which raises ``TypeError`` where it makes no sense."""

    def __post_init__(self) -> None:
        _OF_METHODS[self.methods] = self


_OF_METHODS: dict[type, CapabilityBase] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Capability(CapabilityBase):
    """A feature that a cache may offer beyond ``make``, ``append`` and ``peek``."""

    states: Sequence[type[State]] = ()
    """Its parts of the oracle."""
    setups: Sequence[Setup] = ()
    """Its preparations of a cache that was just made."""
    preludes: Sequence[Prelude] = ()
    """Its first steps of histories."""
    operations: Sequence[type[Operation]] = ()
    """Steps that histories may have; each is drawn where the adapter offers what it needs."""
    endings: Callable[[Oracle], Iterable[Operation]] | None = None
    """Lists the steps that finish what is open, which histories end with."""
    way_back: Callable[[Oracle], Sequence[Operation]] | None = None
    """Lists, for each sequence that it made absent, the next step of its way back."""
    invariants: Sequence[Invariant] = ()
    """Checks that must hold after each step."""
    views: Sequence[View] = ()
    """Its parts of snapshots."""
    inquiries: Sequence[Inquiry] = ()
    """Questions to a cache between two steps."""
    observers: Sequence[type[Observer]] = ()
    """Kinds of observers; each run has one of each kind that is due."""
    walk: Callable[[Walk], Iterable[Operation]] | None = None
    """Lists its steps that may come next where a walk does every one, those that differ in names
    alone once."""
    large: Callable[[Large], Iterator[Operation]] | None = None
    """Yields its steps for a large history, whose names it keeps up to date."""
    sharded: Mapping[str, Across | Callable[..., Any]] = field(default_factory=dict)
    """Ways in which ranks do its methods; a function takes ``Ranks`` and the arguments. An adapter
    of ranks offers these methods where the adapter of one rank defines them."""
    misuse: Sequence[Misuse] = ()
    """Its kinds of bad calls, which an adapter may name in ``standard_bad_calls``."""


def offered(adapter: type[Any], spec: CacheSpec) -> frozenset[str]:
    """Return what a cache built so offers, as in ``Run.can``."""
    names = {*adapter.abilities, *adapter.conditions}
    for name in chain.from_iterable(vars(each.methods) for each in adapter.capabilities):
        if isinstance(traits := getattr(adapter, name), Traits):
            names |= {f"{name}.{key}={choice}" for key, choice in vars(traits).items()}
    names |= {"windows"} if spec.windows else set()
    names |= {"tolerance"} if spec.dtype in adapter.tolerance else set()
    return frozenset(names)


def due(parts: Iterable[_Part], can: frozenset[str]) -> list[_Part]:
    """Return the parts of capabilities that are for a cache that offers this."""
    return [each for each in parts if not each.any_of or can.intersection(each.any_of)]


def counted_conditions(adapter: type[Any]) -> dict[str, str]:
    """Return when each condition is met that the harness counts for an adapter, by names."""
    every = (observer for each in capabilities_of(adapter) for observer in each.observers)
    return dict(chain.from_iterable(observer.conditions.items() for observer in every))


def capabilities_of(adapter: type[Any]) -> list[Any]:
    """Return the capabilities that are among the bases of an adapter class, in their order."""
    return [_OF_METHODS[each] for each in adapter.__mro__ if each in _OF_METHODS]
