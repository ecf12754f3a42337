"""The contract of a capability of engines: features of requests, and their tests.

A capability is a module with a mixin of adapter methods, the fields that it adds to requests, and
one ``EngineCapability`` that refers to them. Fields are frozen dataclasses: direct subclasses of
``SamplingCore`` are passed to ``submit``, direct subclasses of ``RequestCore`` are for the harness.
``Sampling`` and ``RequestSpec`` combine the shipped ones, as ``EngineAdapter`` combines the shipped
mixins. Fields of another capability are added to requests for adapters with its mixin, as in
``class Mine(BiasMethods, EngineAdapter)``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from inspect import get_annotations
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from pytest_roseinfer.capabilities.capability import CapabilityBase
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import numpy as np
    from hypothesis.strategies import DrawFn

    Floats = np.ndarray[Any, np.dtype[np.float64]]

_Spec = TypeVar("_Spec", bound="RequestCore")

# Fields of every request


@dataclass(frozen=True)
class SamplingCore:
    """Parameters that every request has."""

    max_new_tokens: int = 1
    """Most tokens of the completion."""
    ignore_eos: bool = field(default=False, kw_only=True)
    """True if the end-of-sequence token does not end the request."""


@dataclass(frozen=True)
class RequestCore:
    """A request and the step of its arrival."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, one or more."""
    sampling: Any = SamplingCore()
    """Parameters for ``submit``."""
    arrival: int = 0
    """Step that it is submitted before."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of the prompt and the completion together."""
        return len(self.prompt) + int(self.sampling.max_new_tokens)

    def describe(self) -> str:
        """Return the request as a failure shows it."""
        prompt = f"{format_count(len(self.prompt), 'token')} {list(self.prompt)}"
        parts = [f"at step {self.arrival}: {prompt}, up to {self.sampling.max_new_tokens} new"]
        parts += ["past the end of the text"] * self.sampling.ignore_eos
        for capability in _capabilities_of(self):
            parts += capability.describe(self) if capability.describe else ()
        return ", ".join(parts)


# Observers of a mix that is being served


@dataclass(slots=True)
class ServedRequest:
    """A submitted request, and its state after the latest step."""

    number: int
    """Index in the mix."""
    spec: Any
    """The settled request spec."""
    request: Any
    """The adapter's own object for it."""
    expected: list[int]
    """Tokens of its slow twin."""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated so far."""
    num_tokens_before: int = 0
    """Number of tokens generated before the latest step."""
    cancelled: bool = False
    paused: bool = False
    """True from its pause until it is resumed."""
    finished: bool = False
    """True once it has finished."""
    near_tie_index: int | None = None
    """Index of the first token decided by rounding; it and later ones may differ from ``expected``;
    None if none was so far."""

    @property
    def name(self) -> str:
        return f"request {self.number}"

    @property
    def new_tokens(self) -> range:
        """Indices of the tokens that the latest step generated."""
        return range(self.num_tokens_before, len(self.tokens))


class EngineRun(Protocol):
    """An engine that serves a mix, as observers use it."""

    adapter: Any
    mix: Any
    served: list[ServedRequest]
    """Requests submitted so far."""


class MixObserver:
    """Watcher of an engine that serves one mix: acts between steps, and judges requests.

    A judgement describes a problem; it is empty without one.
    """

    any_of: ClassVar[Collection[str]] = ()
    """Adapter methods; any one of them enables it; for every engine if empty."""

    def __init__(self, run: EngineRun) -> None:
        self.run = run
        self.counts: Counter[str] = Counter()
        """Times that each of its conditions was met, by name."""

    def act(self, step: int) -> str:  # noqa: ARG002
        """Act before a step, on requests that have arrived by then."""
        return ""

    def note(self, served: ServedRequest) -> None:
        """Record the state of a request after a step, before it is judged."""

    def judge(self, served: ServedRequest) -> str:  # noqa: ARG002
        """Judge a request, after its tokens were compared with those of its slow twin."""
        return ""

    def judge_step(self) -> str:
        """Judge a step, after all requests were judged."""
        return ""

    def added_steps(self) -> int:
        """Return the most steps that its actions may add to the mix."""
        return 0

    def describe_past(self, served: ServedRequest) -> str:  # noqa: ARG002
        """Describe the past of a request, for the end of its failure message."""
        return ""

    def describe_end(self, served: ServedRequest) -> str:  # noqa: ARG002
        """Describe the end of the request's slow twin; empty if unknown."""
        return ""

    def stage(self, served: ServedRequest) -> str:  # noqa: ARG002
        """Return the stage of a request for its timeline; empty if unknown."""
        return ""


# Capabilities and the requests with their fields


@dataclass(frozen=True, slots=True)
class MixCondition:
    """A condition that the harness counts in mixes."""

    name: str
    description: str
    required: Callable[[type[Any]], bool] | None = None
    """Function that returns True if the searches of an adapter class must meet it; None if those of
    every engine must. An adapter may also name it in ``conditions``."""
    conclusive_examples: int | None = None
    """Mixes without it that make it count as never met, where hardly any mix is without it; None
    for as many as for other conditions."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineCapability(CapabilityBase):
    """A feature that an engine may offer beyond serving requests to their ends."""

    fields: Sequence[type[SamplingCore] | type[RequestCore]] = ()
    """Its fields of a request. Minimising a failing mix resets each to its default if
    the mix still fails."""
    draw: Callable[[DrawFn, type[Any], Any], Any] | None = None
    """Function that draws its fields of a request, as far as the adapter class supports them."""
    restrict: Callable[[type[Any], Any], Any] | None = None
    """Function that resets the fields of a request that an adapter class does not support."""
    describe: Callable[[Any], Iterable[str]] | None = None
    """Function that describes its fields of a request, as parts of a sentence."""
    settle: Callable[[Any, Any, list[int], Any], tuple[Any, list[int]]] | None = None
    """Function that settles its fields of a request. It takes the adapter, the request, the tokens
    of its slow twin, and the mix; it returns the settled request and its expected tokens."""
    adjust: Callable[[Floats, Any, Sequence[int], int], Floats] | None = None
    """Function that adjusts logits before a token is chosen. It takes the logits, the parameters,
    the tokens so far, and the length of the prompt; it returns new logits."""
    permit: Callable[[Any, Any, Sequence[int]], Sequence[int] | None] | None = None
    """Function that returns the only tokens that may come next; None if any may. It takes the
    adapter, the parameters, and the new tokens so far."""
    observers: Sequence[type[MixObserver]] = ()
    """Its kinds of observers; each mix has one of each kind that applies to the adapter."""
    conditions: Sequence[MixCondition] = ()
    """Conditions that its observers count."""

    def __post_init__(self) -> None:
        CapabilityBase.__post_init__(self)
        _OF_FIELDS.update(dict.fromkeys(self.fields, self))


_OF_FIELDS: dict[type, EngineCapability] = {}


def offered_capabilities(adapter: type[Any]) -> list[EngineCapability]:
    """Return the capabilities with a method that an adapter class defines, or without methods."""
    return [
        each
        for each in adapter.capabilities
        if not (optional_methods := vars(each.methods).keys() & {*adapter.optional})
        or optional_methods & adapter.abilities
    ]


def mix_conditions(adapter: type[Any]) -> dict[str, str]:
    """Return descriptions of the conditions that the harness counts for an engine, by name."""
    every = (each for capability in adapter.capabilities for each in capability.conditions)
    return {each.name: each.description for each in every}


def required_conditions(adapter: type[Any]) -> list[str]:
    """Return the harness's conditions that searches of an adapter class must meet."""
    every = (each for capability in adapter.capabilities for each in capability.conditions)
    return [
        each.name
        for each in every
        if each.name not in adapter.unreachable
        and each.name not in adapter.conditions
        and (each.required is None or each.required(adapter))
    ]


def conclusive_examples(adapter: type[Any]) -> dict[str, int]:
    """Return the mixes that are enough to call a condition never met, where they are few."""
    every = (each for capability in adapter.capabilities for each in capability.conditions)
    return {each.name: each.conclusive_examples for each in every if each.conclusive_examples}


def capabilities_of_fields(kind: type) -> list[EngineCapability]:
    """Return the capabilities with fields in a class of requests or parameters, in their order."""
    capabilities = (_OF_FIELDS[each] for each in reversed(kind.__mro__) if each in _OF_FIELDS)
    return [*dict.fromkeys(capabilities)]


def _capabilities_of(spec: RequestCore) -> list[EngineCapability]:
    kinds = type(spec.sampling), type(spec)
    return [*dict.fromkeys(chain.from_iterable(map(capabilities_of_fields, kinds)))]


def change(spec: _Spec, **values: Any) -> _Spec:
    """Return a copy of a request with other values of its own fields or of its parameters."""
    spec_fields = {name: value for name, value in values.items() if hasattr(spec, name)}
    parameters = {name: value for name, value in values.items() if name not in spec_fields}
    if parameters:
        spec_fields["sampling"] = replace(spec.sampling, **parameters)
    return replace(spec, **spec_fields) if spec_fields else spec


def plain(spec: _Spec) -> _Spec:
    """Return a copy of a request with default values for all but the core parameters."""
    core = {each.name: getattr(spec.sampling, each.name) for each in fields(SamplingCore)}
    return replace(spec, sampling=type(spec.sampling)(**core))


# Requests with fields of capabilities that are not shipped


_EXTENDED: dict[tuple[type, frozenset[type]], type] = {}


def with_fields(kind: type[Any], added: frozenset[type]) -> type[Any]:
    """Return a class of requests or parameters with added fields; the same class on each call."""
    core = SamplingCore if issubclass(kind, SamplingCore) else RequestCore
    new = [
        each
        for each in _OF_FIELDS
        if each in added and issubclass(each, core) and not issubclass(kind, each)
    ]
    if new and (key := (kind, frozenset(new))) not in _EXTENDED:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        extended = type(kind.__name__, (*reversed(new), kind), names)
        _EXTENDED[key] = dataclass(frozen=True)(extended)
    return _EXTENDED[key] if new else kind


def for_adapter(adapter: type[Any], spec: _Spec) -> _Spec:
    """Return a request with the fields of all capabilities of an adapter class."""
    added = frozenset(kind for each in adapter.capabilities for kind in each.fields)
    kind, params = with_fields(type(spec), added), with_fields(type(spec.sampling), added)
    if (kind, params) == (type(spec), type(spec.sampling)):
        return spec
    changed: _Spec = kind(**{**vars(spec), "sampling": params(**vars(spec.sampling))})
    return changed


def from_data(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """Make a request or parameters from plain data, with the fields that occur in it."""
    added = frozenset(each for each in _OF_FIELDS if data.keys() & get_annotations(each).keys())
    return with_fields(kind, added)(**{name: _as_tuples(each) for name, each in data.items()})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
