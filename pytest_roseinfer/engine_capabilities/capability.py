"""The contract of a capability of engines: what a request may have, and what tests it.

A capability is a module with a mixin of adapter methods, the fields that it adds to requests, and
one ``EngineCapability`` that names them. Fields are frozen dataclasses: those right under
``SamplingCore`` are passed to ``submit``, those right under ``RequestCore`` are for the harness.
``Sampling`` and ``RequestSpec`` are made of the shipped ones, as ``EngineAdapter`` is made of the
shipped mixins. Those of another capability are added where an adapter has its mixin, as in
``class Mine(BiasMethods, EngineAdapter)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from inspect import get_annotations
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from pytest_roseinfer.capabilities.capability import CapabilityBase
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import numpy as np
    from hypothesis.strategies import DrawFn

    Floats = np.ndarray[Any, np.dtype[np.float64]]

_Spec = TypeVar("_Spec", bound="RequestCore")

# Fields of every request.


@dataclass(frozen=True)
class SamplingCore:
    """The parameters that every request has."""

    max_new_tokens: int = 1
    """Most tokens that the request gets."""
    ignore_eos: bool = field(default=False, kw_only=True)
    """True if the token that ends a text does not end the request."""


@dataclass(frozen=True)
class RequestCore:
    """A request, and when it arrives."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, one or more."""
    sampling: Any = SamplingCore()
    """Parameters that ``submit`` gets."""
    arrival: int = 0
    """Step before which it is submitted."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of the prompt and the completion."""
        return len(self.prompt) + int(self.sampling.max_new_tokens)

    def words(self) -> str:
        """Return the request as a failure shows it."""
        prompt = f"{some(len(self.prompt), 'token')} {list(self.prompt)}"
        parts = [f"at step {self.arrival}: {prompt}, up to {self.sampling.max_new_tokens} new"]
        parts += ["past the end of the text"] * self.sampling.ignore_eos
        for capability in _capabilities_of(self):
            parts += capability.words(self) if capability.words else ()
        return ", ".join(parts)


# A mix that is being served, and its observers.


@dataclass(slots=True)
class ServedRequest:
    """A request that was submitted, and what is known of it."""

    number: int
    """Its place in the mix."""
    spec: Any
    """The request, with what the mix left open."""
    request: Any
    """The adapter's own object for it."""
    expected: list[int]
    """Tokens that it gets alone."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that it had when it was last looked at."""
    known: int = 0
    """Number of tokens that it had one look earlier."""
    cancelled: bool = False
    finished: bool = False
    """True if it had finished when it was last looked at."""
    tied: int | None = None
    """First token that rounding decided, from which on it need not get what it gets alone; None
    while there is none."""

    @property
    def name(self) -> str:
        return f"request {self.number}"

    @property
    def new_tokens(self) -> range:
        """The numbers of the tokens that it got since the previous look."""
        return range(self.known, len(self.tokens))


class EngineRun(Protocol):
    """An engine that serves a mix, as observers know it."""

    adapter: Any
    mix: Any
    served: list[ServedRequest]
    """The requests that were submitted by now."""


class MixObserver:
    """Watches an engine serve one mix: it acts between steps, and judges what requests got.

    Judgements are returned in words: what is wrong, or an empty text.
    """

    any_of: ClassVar[Collection[str]] = ()
    """Methods of the adapter, any of which is defined where it watches; for every engine if there
    are none."""

    def __init__(self, run: EngineRun) -> None:
        self.run = run

    def act(self, step: int) -> str:  # noqa: ARG002
        """Act before a step, on requests that have arrived by then."""
        return ""

    def note(self, served: ServedRequest) -> None:
        """Look at a request after a step, before it is judged."""

    def judge(self, served: ServedRequest) -> str:  # noqa: ARG002
        """Judge a request, after its tokens were compared with those that it gets alone."""
        return ""

    def judge_step(self) -> str:
        """Judge a step, after each of its requests."""
        return ""

    def past(self, served: ServedRequest) -> str:  # noqa: ARG002
        """Return the past of a request, in words that its failure ends with."""
        return ""

    def stage(self, served: ServedRequest) -> str:  # noqa: ARG002
        """Return the stage of a request for its timeline; empty if that is not known."""
        return ""


# The capability itself, and the requests that have its fields.


@dataclass(frozen=True, slots=True, eq=False)
class EngineCapability(CapabilityBase):
    """A feature that an engine may offer beyond serving requests to their ends."""

    fields: Sequence[type[SamplingCore] | type[RequestCore]] = ()
    """Its fields of a request. In a failing mix, each goes back to its default if it can."""
    draw: Callable[[DrawFn, type[Any], Any], Any] | None = None
    """Function that adds to a drawn request what an adapter class offers."""
    restrict: Callable[[type[Any], Any], Any] | None = None
    """Function that takes out of a request what an adapter class does not offer."""
    words: Callable[[Any], Iterable[str]] | None = None
    """Function that describes its fields of a request, as parts of a sentence."""
    settle: Callable[[Any, Any, list[int], Any], tuple[Any, list[int]]] | None = None
    """Function that settles what a request leaves open. It takes the adapter, the request, the
    tokens that it gets alone, and the mix; it returns the request and these tokens anew."""
    adjust: Callable[[Floats, Any, Sequence[int], int], Floats] | None = None
    """Function that changes logits before a token is chosen. It takes the logits, the parameters,
    the tokens before, and the length of the prompt; it returns logits of its own."""
    observers: Sequence[type[MixObserver]] = ()
    """Kinds of observers; each mix is watched by one of each kind that is due."""

    def __post_init__(self) -> None:
        CapabilityBase.__post_init__(self)
        _OF_FIELDS.update(dict.fromkeys(self.fields, self))


_OF_FIELDS: dict[type, EngineCapability] = {}


def offered(adapter: type[Any]) -> list[EngineCapability]:
    """Return the capabilities of which an adapter class defines a method, or that have none."""
    return [
        each
        for each in adapter.capabilities
        if not (own := vars(each.methods).keys() & {*adapter.optional}) or own & adapter.abilities
    ]


def capabilities_of_fields(kind: type) -> list[EngineCapability]:
    """Return the capabilities with fields in a class of requests or parameters, in their order."""
    found = (_OF_FIELDS[each] for each in reversed(kind.__mro__) if each in _OF_FIELDS)
    return [*dict.fromkeys(found)]


def _capabilities_of(spec: RequestCore) -> list[EngineCapability]:
    kinds = type(spec.sampling), type(spec)
    return [*dict.fromkeys(chain.from_iterable(map(capabilities_of_fields, kinds)))]


def change(spec: _Spec, **values: Any) -> _Spec:
    """Return a request with other values of some fields, be they its own or its parameters'."""
    own = {name: value for name, value in values.items() if hasattr(spec, name)}
    others = {name: value for name, value in values.items() if name not in own}
    if others:
        own["sampling"] = replace(spec.sampling, **others)
    return replace(spec, **own) if own else spec


def plain(spec: _Spec) -> _Spec:
    """Return a request with nothing but the parameters that every request has."""
    core = {each.name: getattr(spec.sampling, each.name) for each in fields(SamplingCore)}
    return replace(spec, sampling=type(spec.sampling)(**core))


# Requests with the fields of capabilities that are not shipped.


_EXTENDED: dict[tuple[type, frozenset[type]], type] = {}


def with_fields(kind: type[Any], added: frozenset[type]) -> type[Any]:
    """Return a class of requests or parameters with more fields; the same one every time."""
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
    """Return a request that has the fields of all capabilities of an adapter class."""
    added = frozenset(kind for each in adapter.capabilities for kind in each.fields)
    kind, params = with_fields(type(spec), added), with_fields(type(spec.sampling), added)
    if (kind, params) == (type(spec), type(spec.sampling)):
        return spec
    changed: _Spec = kind(**{**vars(spec), "sampling": params(**vars(spec.sampling))})
    return changed


def from_data(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """Return a request or parameters of plain data, with the fields that the data has."""
    added = frozenset(each for each in _OF_FIELDS if data.keys() & get_annotations(each).keys())
    return with_fields(kind, added)(**{name: _as_tuples(each) for name, each in data.items()})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
