"""The contract of a capability: a feature that a cache may offer, and its tests.

A capability is a module with a mixin of adapter methods and one ``Capability`` that refers to it.
The bases of an adapter class determine its capabilities: those of ``KVCacheAdapter`` are the
shipped ones, and another one is mixed in, as in ``class Toy(PinMethods, KVCacheAdapter)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
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
    from pytest_roseinfer.capabilities.operation import CacheUnderTest, Operation, Writer
    from pytest_roseinfer.capabilities.payload import Payload
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import State
    from pytest_roseinfer.oracle.texts import TextSlice

_Method = TypeVar("_Method", bound=Callable[..., Any])
AnyObserver = TypeVar("AnyObserver", bound="Observer")
_Part = TypeVar("_Part", bound="OptionalPart")


@dataclass(frozen=True)
class Traits:
    """Declarations of an adapter about one capability; unknown choices raise ``TypeError``."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            choices, chosen = get_args(hint), getattr(self, name)
            if get_origin(hint) is Literal and chosen not in choices:
                allowed = ", ".join(map(repr, choices))
                raise TypeError(
                    f"{type(self).__name__}: {name} is {chosen!r}; choose one of {allowed}"
                )

    def but(self, **changes: Any) -> Self:
        """Return a copy with some choices changed, for a class that inherits the others."""
        return replace(self, **changes)


def optional(method: _Method) -> _Method:
    """Mark a method as optional: it is tested if an adapter defines it."""
    method.__dict__["optional"] = True
    return method


class RankPolicy(Enum):
    """A way to run one adapter method on all ranks of a cache."""

    WRITE = "each rank stores its heads of the keys and values, which are the last arguments"
    READ = "the heads that the ranks return are concatenated"
    STORED = "the heads that the ranks store are concatenated, block by block"
    SAME = "all ranks must return equal values"
    EACH = "the return values are returned as a list"
    FIRST = "the first rank's return value stands for all"


class Ranks(Protocol):
    """The ranks of one cache, as passed to functions in ``Capability.sharded``."""

    def each(self, call: Callable[[int, Any], Any]) -> list[Any]:
        """Call a function for every rank; raise the error that all of them raise."""

    def heads(self, *tensors: Any) -> list[tuple[Any, ...]]:
        """Split ``[..., heads, head_dim]`` tensors into the heads of each rank."""

    def require_equal_answers(self, name: str, answers: Sequence[Any]) -> Any:
        """Return the value that all ranks returned; raise an error if they differ."""


class Run(Protocol):
    """The run of a history on one cache, as observers use it."""

    adapter: Any
    declared: type[Any]
    """The adapter class, for its declarations."""
    spec: CacheSpec
    gathers_every: int
    """Steps from one read by ``gather`` to the next, as in ``History``."""
    features: frozenset[str]
    """Optional methods that the adapter defines, its conditions, its choices as in
    "prefixes.shares=equal prefixes", and "tolerance" and "windows" if the cache has them."""
    oracle: Oracle
    payload: Payload
    cache_under_test: CacheUnderTest
    observers: dict[type[Observer], Observer]
    completed_steps: list[Operation]
    """Steps so far, including the present one."""
    last: bool
    """True during the last step of the history."""
    first_writers: dict[int, int]
    """The first sequence that wrote each token, by token; refused writes count too."""
    snapshot: Snapshot
    """The cache after the latest step."""

    def observer(self, kind: type[AnyObserver]) -> AnyObserver | None:
        """Return the observer of this kind; None if the run has none."""

    def fail(self, finding: Finding) -> NoReturn:
        """Raise the failure of the history so far."""


class OptionalPart(Protocol):
    """A part of a capability that applies to some of the caches that offer it."""

    @property
    def any_of(self) -> Collection[str]:
        """Features as in ``Run.features``; one of them is enough; every cache if empty."""


class Observer:
    """Watcher of one run: counts conditions, and records facts that span several steps."""

    any_of: ClassVar[Collection[str]] = ()
    """Features of the caches that it watches, as in ``OptionalPart``."""
    conditions: ClassVar[Mapping[str, str]] = {}
    """Descriptions of the conditions that it counts, by name; ``path_counts`` omits these."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def before(self, step: Operation) -> Mapping[str, int]:  # noqa: ARG002
        """Observe the run before a step; return counts by condition."""
        return {}

    def before_call(self, step: Operation, text_slices: Sequence[TextSlice]) -> None:
        """Prepare the adapter right before a step, whose rows have these texts."""

    def after(self, observation: Observation) -> Mapping[str, int]:  # noqa: ARG002
        """Observe the run after a step without findings; return counts by condition."""
        return {}

    def notes(self, after: Snapshot) -> object:  # noqa: ARG002
        """Return facts about earlier steps that invariants need; None if they need none."""
        return None

    def explain_refusal(self) -> str:
        """Describe a possible cause of the refusal of a step that fits; empty if unknown."""
        return ""


@dataclass(frozen=True, slots=True)
class SnapshotScope:
    """The scope of one snapshot."""

    reads: bool
    """True if sequences are also read, and prefixes looked up."""
    copies: bool
    """True if the storage is copied; False if the snapshot refers to the live storage."""


@dataclass(frozen=True, slots=True)
class Prelude:
    """Fixed first steps of drawn histories, for states that random steps rarely reach."""

    any_of: Collection[str]
    """Methods of an adapter; any one of them enables the prelude."""
    rank: int
    """Position among preludes; the lowest comes first."""
    open: Callable[[Writer], None]
    """Function that adds the steps to a history; it may add none."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a snapshot."""

    any_of: Collection[str]
    """Features of the caches that have it, as in ``OptionalPart``."""
    show: Callable[[Run, SnapshotScope], Mapping[str, Any]]
    """Function that returns the fields of a ``Snapshot``."""
    in_pictures: bool = False
    """True if pictures of failures show it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A preparation of a cache right after ``make``, before the first snapshot."""

    any_of: Collection[str]
    """Features of the caches that are prepared, as in ``OptionalPart``."""
    prepare: Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Calls between two steps that must not change the cache."""

    any_of: Collection[str]
    """Features of the caches that have it, as in ``OptionalPart``."""
    every: int
    """Steps between two inquiries; the last step of a history is always followed by one."""
    ask: Callable[[Run], Sequence[Any]]
    """Function that makes the calls and returns their results; empty if no call was possible."""
    after: str
    """Kind of observation that carries the results to the invariants."""


class Walk(NamedTuple):
    """The state of a small history whose every possible next step is to be listed."""

    oracle: Oracle
    names: list[int]
    """Names available to a new sequence."""
    adapter: type[Any]

    @property
    def filled(self) -> list[int]:
        """Sequences with at least one token."""
        return [seq for seq in self.oracle.sequences if self.oracle.length(seq)]


@dataclass(slots=True)
class Large:
    """A history of large batches or long sequences, under construction."""

    adapter: type[Any]
    block_size: int
    names: list[int]
    """Sequences so far, in the order of a batch of all of them."""
    max_names: int

    def fresh(self) -> int:
        """Return a name that was not used before."""
        return max(self.names) + 1


@dataclass(frozen=True, slots=True, eq=False)
class CapabilityBase:
    """A feature that an adapter of some kind may offer."""

    methods: type
    """Mixin of adapter methods, and of attributes for the adapter's declarations about them.

    It has no ``__init__`` and calls no ``super()``. Methods that are marked ``optional`` are tested
    if an adapter defines them."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Replacements for former attributes and methods, by their old names."""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Other methods that an optional method needs in order to be called, by its name."""
    refuse: Sequence[Callable[[type[Any]], None]] = ()
    """Checks of an adapter class, each raising ``TypeError`` for inconsistent declarations."""

    def __post_init__(self) -> None:
        _OF_METHODS[self.methods] = self


_OF_METHODS: dict[type, CapabilityBase] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Capability(CapabilityBase):
    """A feature that a cache may offer beyond ``make``, ``append`` and ``peek``."""

    states: Sequence[type[State]] = ()
    """Its parts of the oracle."""
    setups: Sequence[Setup] = ()
    """Its preparations of a cache right after ``make``."""
    preludes: Sequence[Prelude] = ()
    """Its fixed first steps of drawn histories."""
    operations: Sequence[type[Operation]] = ()
    """Its kinds of steps; each is drawn if the adapter defines the methods that it needs."""
    finishing_steps: Callable[[Oracle], Iterable[Operation]] | None = None
    """Function that lists the last steps of a history, which complete all pending work."""
    return_steps: Callable[[Oracle], Sequence[Operation]] | None = None
    """Function that lists the next step to bring back each sequence that it made absent."""
    invariants: Sequence[Invariant] = ()
    """Checks that must hold after each step."""
    views: Sequence[View] = ()
    """Its parts of snapshots."""
    inquiries: Sequence[Inquiry] = ()
    """Its calls to a cache between two steps."""
    observers: Sequence[type[Observer]] = ()
    """Its kinds of observers; a run has one of each kind that applies to its cache."""
    required_conditions: Callable[[type[Any]], Iterable[str]] | None = None
    """Function that lists the conditions that a class's declarations make required. It is called
    for an adapter class that defines some of its methods."""
    walk: Callable[[Walk], Iterable[Operation]] | None = None
    """Function that lists its possible next steps in a walk, without steps that differ from another
    one only in names."""
    large: Callable[[Large], Iterator[Operation]] | None = None
    """Function that yields its steps for a large history and updates the history's ``names``."""
    sharded: Mapping[str, RankPolicy | Callable[..., Any]] = field(default_factory=dict)
    """Ways to run its methods on ranks, by method; a function takes ``Ranks`` and the arguments. A
    sharded adapter has these methods if the adapter of one rank defines them."""
    misuse: Sequence[Misuse] = ()
    """Its kinds of bad calls, for adapters to list in ``standard_bad_calls``."""


def cache_features(adapter: type[Any], spec: CacheSpec) -> frozenset[str]:
    """Return the features of a cache with this spec, as in ``Run.features``."""
    names = {*adapter.abilities, *adapter.conditions}
    for name in chain.from_iterable(_trait_names(each.methods) for each in adapter.capabilities):
        traits = vars(getattr(adapter, name))
        names |= {f"{name}.{key}={choice}" for key, choice in traits.items()}
    names |= {"windows"} if spec.windows else set()
    names |= {"tolerance"} if spec.dtype in adapter.tolerance else set()
    return frozenset(names)


@cache
def _trait_names(methods: type) -> list[str]:
    """Return the names of a mixin's attributes that hold traits."""
    return [name for name, value in vars(methods).items() if isinstance(value, Traits)]


def select_parts(parts: Iterable[_Part], can: frozenset[str]) -> list[_Part]:
    """Return the parts of capabilities that apply to a cache with these features."""
    return [each for each in parts if not each.any_of or can.intersection(each.any_of)]


def counted_conditions(adapter: type[Any]) -> dict[str, str]:
    """Return descriptions of the conditions that the harness counts for an adapter, by name."""
    every = (observer for each in capabilities_of(adapter) for observer in each.observers)
    return dict(chain.from_iterable(observer.conditions.items() for observer in every))


def required_conditions(adapter: type[Any]) -> list[str]:
    """Return the conditions that searches of a cache must meet for its declarations."""
    return [
        name
        for each in capabilities_of(adapter)
        if each.required_conditions and not adapter.abilities.isdisjoint(vars(each.methods))
        for name in each.required_conditions(adapter)
    ]


def capabilities_of(adapter: type[Any]) -> list[Any]:
    """Return the capabilities among the bases of an adapter class, in their order."""
    return [_OF_METHODS[each] for each in adapter.__mro__ if each in _OF_METHODS]
