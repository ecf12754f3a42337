"""The class that drives somebody's engine, and the mixes of requests that it serves."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.capabilities.answers import (
    COUNTS,
    are_counts,
    are_tokens,
    is_text,
    is_truth,
    returns,
)
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.engine_capabilities.capability import from_data
from pytest_roseinfer.engine_capabilities.lifecycle import CancelFields, LifecycleMethods
from pytest_roseinfer.engine_capabilities.logprobs import LogprobFields, LogprobMethods
from pytest_roseinfer.engine_capabilities.sampling import (
    EarlyEndFields,
    SamplingFields,
    SamplingMethods,
)
from pytest_roseinfer.engine_capabilities.text import StopFields, StopSpanFields, TextMethods

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import FastPath

# Requests, made of the fields of all shipped capabilities, the last base first.


@dataclass(frozen=True)
class Sampling(StopFields, LogprobFields, SamplingFields):
    """The parameters of a request, as ``submit`` gets them."""


@dataclass(frozen=True)
class RequestSpec(CancelFields, StopSpanFields, EarlyEndFields):
    """A request: what it has, when it arrives, and what becomes of it."""

    sampling: Sampling = Sampling()
    """Parameters that ``submit`` gets."""


@dataclass(frozen=True, slots=True)
class RequestMix:
    """An engine to build, and the requests that it gets."""

    requests: tuple[RequestSpec, ...]
    """Requests, numbered from 0 on."""
    block_size: int = 4
    """Tokens of a block."""
    cache_tokens: int = 64
    """Tokens that the cache has room for."""
    device: str = "cpu"
    """Device as of torch."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Value of each of the engine's switches."""

    @property
    def size(self) -> int:
        return len(self.requests)

    def words(self) -> str:
        """Return the mix as a failure shows it."""
        cache = f"a cache of {self.cache_tokens} tokens in blocks of {self.block_size}"
        switches = (f"{name}={value!r}" for name, value in self.options.items())
        lines = [", ".join([cache, *switches])]
        lines += [f"{at}. {spec.words()}" for at, spec in enumerate(self.requests)]
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
    LifecycleMethods,
    Adapter,
):
    """Override ``make``, ``submit``, ``step``, ``tokens``, ``is_finished``, ``find_leaks``,
    ``path_counts`` and ``generate_alone``; the other methods are optional.

    A token is a number below ``vocabulary``. A request must get the tokens that ``generate_alone``
    returns for it, whatever else the engine has to do. An engine that is ``greedy_only`` may define
    ``logits`` in place of ``generate_alone``.
    """

    _renamed: ClassVar = {
        "ended": "is_finished(request)",
        "spelled": "spell(token)",
        "leftovers": "find_leaks()",
        "lag": "extra_steps",
        "longest": "large_mix_tokens",
        "request_in_words": "describe_request(spec)",
    }

    vocabulary: ClassVar[int] = 32
    """Number of tokens; those of prompts are below it."""
    most_tokens: ClassVar[int] = 48
    """Most tokens of a prompt and its completion together, 3 or more."""
    most_requests: ClassVar[int | None] = None
    """Most requests at a time that it is made for, 6 or more; None if nothing bounds them. Only
    wide mixes have more than 6."""
    extra_steps: ClassVar[int] = 0
    """Steps more, for each of its requests, that a mix may take until all have finished. Nothing
    else but ``never_idles`` bounds the step at which a token must come."""
    paths: ClassVar[Mapping[str, FastPath]] = {}
    """Fast paths that the engine declares, by their names in ``path_counts``."""
    conditions: ClassVar[Sequence[str]] = ()
    """Names in ``path_counts`` that are no paths but must be met."""
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Switches and their values, the usual one first; drawn for ``mix.options``."""
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3, 8)
    """Numbers of tokens in a block that the engine can be built with."""
    sizes: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Switches that change the sizes of what the engine allocates, and their values. On a GPU, a
    second search draws the first three of each, with blocks of up to 16 tokens and up to 100
    requests of up to ``large_mix_tokens`` tokens. Without any, such a search is left out."""
    large_mix_tokens: ClassVar[int] = 1000
    """Most tokens of a prompt and its completion together in the search of ``sizes``."""
    replays: ClassVar[int] = 1
    """Number of times that a failure is run again, by a search that found it and by a replay: more
    where what happens depends on more than the mix, as with a server."""

    def make(self, mix: RequestMix) -> None:
        """Build an engine with the mix's cache, device and options."""
        raise NotImplementedError

    @returns(lambda shown: shown is not None, "an object for the request")
    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        """Take a request, which always fits the cache; return an object for it.

        The methods below get that object.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Let the engine do one step, whether or not it has something to do."""
        raise NotImplementedError

    @returns(are_tokens, "a list of tokens")
    def tokens(self, request: Any) -> list[int]:
        """Return the tokens that it has generated by now, which nothing takes back.

        The token that ends a text is among them, unless your own ``generate_alone`` leaves it out
        too, and so is the one that completes a stop string.
        """
        raise NotImplementedError

    @returns(is_truth, "True or False")
    def is_finished(self, request: Any) -> bool:
        """Return True for a request that gets no more tokens."""
        raise NotImplementedError

    @returns(is_text, 'a text, which is "" where nothing is held')
    def find_leaks(self) -> str:
        """Return what is still held after the last request, in words; an empty text is right."""
        raise NotImplementedError

    @returns(are_counts, COUNTS)
    def path_counts(self) -> Mapping[str, int]:
        """Return how often each path ran, and each condition was met, since ``make``."""
        raise NotImplementedError

    @optional
    @returns(is_text, "a text")
    def spell(self, token: int) -> str:
        """Return a token as a failure shows it; its number if this is left out."""
        return str(token)

    @classmethod
    def describe_request(cls, spec: RequestSpec) -> str:
        """Return a request as a failure shows it."""
        return spec.words()
