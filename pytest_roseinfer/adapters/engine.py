"""The base class of adapters, which let the harness drive a user's engine; mixes of requests."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.capabilities.return_values import (
    COUNTS,
    are_counts,
    are_tokens,
    is_bool,
    is_text,
    returns,
)
from pytest_roseinfer.engine_capabilities.capability import from_data
from pytest_roseinfer.engine_capabilities.endings import EndingMethods
from pytest_roseinfer.engine_capabilities.guides import GuidedFields, GuideFields, GuideMethods
from pytest_roseinfer.engine_capabilities.lifecycle import (
    CancelFields,
    LifecycleMethods,
    PauseFields,
    RefusalFields,
)
from pytest_roseinfer.engine_capabilities.logprobs import LogprobFields, LogprobMethods
from pytest_roseinfer.engine_capabilities.long_contexts import LongContextMethods
from pytest_roseinfer.engine_capabilities.prefix_reuse import PrefixReuseMethods
from pytest_roseinfer.engine_capabilities.sampling import (
    EarlyEndFields,
    SamplingFields,
    SamplingMethods,
)
from pytest_roseinfer.engine_capabilities.text import StopFields, StopSpanFields, TextMethods

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import FastPath

# Requests with the fields of all shipped capabilities; fields of the last base come first


@dataclass(frozen=True)
class Sampling(GuideFields, StopFields, LogprobFields, SamplingFields):
    """Parameters of a request, as ``submit`` gets them."""


@dataclass(frozen=True)
class RequestSpec(
    GuidedFields, RefusalFields, PauseFields, CancelFields, StopSpanFields, EarlyEndFields
):
    """A request as data: its prompt, parameters, arrival and cancellation."""

    sampling: Sampling = Sampling()
    """Parameters for ``submit``."""


@dataclass(frozen=True, slots=True)
class RequestMix:
    """An engine to build, and the requests that it serves."""

    requests: tuple[RequestSpec, ...]
    """Requests, numbered from 0."""
    block_size: int = 4
    """Tokens per block."""
    cache_tokens: int = 64
    """Capacity of the cache in tokens."""
    device: str = "cpu"
    """Name of a torch device."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Value of each switch of the engine."""

    @property
    def size(self) -> int:
        return len(self.requests)

    def describe(self) -> str:
        """Describe the mix, for failure messages."""
        cache = f"a cache of {self.cache_tokens} tokens in blocks of {self.block_size}"
        switches = (f"{name}={value!r}" for name, value in self.options.items())
        lines = [", ".join([cache, *switches])]
        lines += [f"{at}. {spec.describe()}" for at, spec in enumerate(self.requests)]
        return "\n  ".join(lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RequestMix:
        requests = (
            from_data(RequestSpec, {**each, "sampling": from_data(Sampling, each["sampling"])})
            for each in data["requests"]
        )
        return cls(**{**data, "requests": tuple(requests)})


class EngineAdapter(
    SamplingMethods,
    LogprobMethods,
    TextMethods,
    EndingMethods,
    LifecycleMethods,
    PrefixReuseMethods,
    LongContextMethods,
    GuideMethods,
    Adapter,
):
    """Base class of the adapters of engines.

    Override ``make``, ``submit``, ``step``, ``tokens``, ``is_finished``, ``find_leaks``,
    ``path_counts`` and ``generate_alone``; the other methods are optional.

    A token is a number below ``vocabulary``. A request must get the tokens that ``generate_alone``
    returns for it, whatever other requests the engine serves. An engine that is ``greedy_only`` may
    define ``logits`` in place of ``generate_alone``.

    Choose a model whose tokens depend on all that the cache holds: a trained one, or random weights
    that are scaled up. docs/tutorials/engine.md has an engine with either.
    """

    _renamed: ClassVar = {
        "ended": "is_finished(request)",
        "spelled": "spell(token)",
        "leftovers": "find_leaks()",
        "lag": "extra_steps",
        "longest": "large_mix_tokens",
        "most_tokens": "max_tokens",
        "most_requests": "max_requests",
        "request_in_words": "describe_request(spec)",
    }

    vocabulary: ClassVar[int] = 32
    """Size of the vocabulary; tokens of prompts are below it."""
    max_tokens: ClassVar[int] = 48
    """Most tokens of a prompt and its completion together, 3 or more."""
    max_requests: ClassVar[int | None] = None
    """Most requests at a time, 6 or more; None if unlimited. Only wide mixes have more than 6."""
    extra_steps: ClassVar[int] = 0
    """Extra steps, per request, that a mix may take until all requests have finished. Only
    ``never_idles`` limits the steps until a token further."""
    paths: ClassVar[Mapping[str, FastPath]] = {}
    """Fast paths that the engine declares, by their names in ``path_counts``."""
    conditions: ClassVar[Sequence[str]] = ()
    """Names that are not paths but must be met, counted by ``path_counts`` or by the harness."""
    unreachable: ClassVar[Collection[str]] = ()
    """Conditions of the harness that searches need not meet, since the engine or its model cannot,
    such as ``ended_by_stop_token_at_first_token``."""
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Values of each switch, the usual one first; drawn for ``mix.options``."""
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3, 8)
    """Tokens per block that the engine can be built with."""
    sizes: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Values of each switch that changes the sizes of the engine's allocations. On a GPU, a second
    search draws the first three of each, with blocks of up to 16 tokens and up to 100 requests of
    up to ``large_mix_tokens`` tokens. If empty, there is no such search."""
    large_mix_tokens: ClassVar[int] = 1000
    """Most tokens of a prompt and its completion together in the search of ``sizes``."""
    replays: ClassVar[int] = 1
    """Number of times that a failure is run again, by the search that found it and by a replay;
    more than 1 if results depend on more than the mix, as with a server."""

    def make(self, mix: RequestMix) -> None:
        """Build an engine with the mix's cache, device and options."""
        raise NotImplementedError

    @returns(lambda shown: shown is not None, "an object for the request")
    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        """Submit a request, which always fits the cache; return an object for it.

        The object is passed to the methods below.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Run one step of the engine, even if no request is unfinished."""
        raise NotImplementedError

    @returns(are_tokens, "a list of tokens")
    def tokens(self, request: Any) -> list[int]:
        """Return the tokens generated so far, which must never change later.

        They include the token that completes a stop string, and the end-of-sequence token, unless
        your own ``generate_alone`` leaves it out too.
        """
        raise NotImplementedError

    @returns(is_bool, "True or False")
    def is_finished(self, request: Any) -> bool:
        """Return True for a request that gets no more tokens."""
        raise NotImplementedError

    @returns(is_text, 'a text, which is "" if nothing is held')
    def find_leaks(self) -> str:
        """Describe resources that are still held after the last request; empty if none are."""
        raise NotImplementedError

    @returns(are_counts, COUNTS)
    def path_counts(self) -> Mapping[str, int]:
        """Return the runs of each path, and times each condition was met, since ``make``."""
        raise NotImplementedError

    @optional
    @returns(is_text, "a text")
    def spell(self, token: int) -> str:
        """Return a token as text for failure messages; its number by default."""
        return str(token)

    @classmethod
    def describe_request(cls, spec: RequestSpec) -> str:
        """Describe a request, for failure messages."""
        return spec.describe()
