"""Requests that come at different times, as plain data and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters by which one request's tokens are chosen."""

    max_new_tokens: int = 1
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class WiderSampling(Sampling):
    """The same with what only some engines take, for adapters that say they do."""

    min_p: float = 0.0
    """Only tokens at least this many times as likely as the likeliest."""
    logprobs: bool = False
    """The log-probability of each token is wanted too."""
    stop: tuple[str, ...] = ()
    """Texts that end the request."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that were generated."""
    frequency_penalty: float = 0.0
    """Taken off them as often as they were generated."""
    top_logprobs: int = 0
    """Those of so many likeliest tokens are wanted too, at the place of each token."""
    prompt_logprobs: bool = False
    """Those of the prompt's tokens are wanted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    arrives: int = 0
    """It is submitted before this step."""
    cancelled_after: int | None = None
    """It is cancelled so many steps later; None for a request that runs to its end."""
    stops: tuple[tuple[int, int], ...] = ()
    """Its stop strings: so many characters from there on of the text that it gets without any."""
    ends_early: bool = False
    """Its seed is the next one with which the model ends the text before the last token."""

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    def words(self) -> str:
        sampling = self.sampling
        prompt = f"{some(len(self.prompt), 'token')} {list(self.prompt)}"
        parts = [f"at step {self.arrives}: {prompt}, up to {sampling.max_new_tokens} new"]
        if sampling.temperature:
            parts.append(f"drawn at temperature {sampling.temperature} from seed {sampling.seed}")
        parts += [f"top_k {sampling.top_k}"] * (sampling.top_k > 0)
        parts += [f"top_p {sampling.top_p}"] * (sampling.top_p < 1)
        if sampling.repetition_penalty != 1:
            parts.append(f"repetition penalty {sampling.repetition_penalty}")
        if isinstance(sampling, WiderSampling):
            parts += [f"min_p {sampling.min_p}"] * (sampling.min_p > 0)
            parts += ["with log-probabilities"] * sampling.logprobs
            parts += [f"and of the {sampling.top_logprobs} likeliest"] * (sampling.top_logprobs > 0)
            parts += ["with those of its prompt"] * sampling.prompt_logprobs
            for name in ("presence_penalty", "frequency_penalty"):
                if value := getattr(sampling, name):
                    parts.append(f"{name.replace('_', ' ')} {value}")
            parts += [f"stopped by {text!r}" for text in sampling.stop]
        for begins, length in self.stops:
            parts.append(f"stopped by {some(length, 'character')} of its text, from {begins} on")
        if self.ends_early:
            parts.append("with the next seed that ends the text early")
        if sampling.ignore_eos:
            parts.append("past the end of the text")
        if self.cancelled_after is not None:
            parts.append(f"cancelled {some(self.cancelled_after, 'step')} later")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RequestMix:
    """An engine to build, and the requests that it is given."""

    requests: tuple[Asked, ...]
    block_size: int = 4
    cache_tokens: int = 64
    """The cache has room for so many tokens."""
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's switches."""

    @property
    def size(self) -> int:
        return len(self.requests)

    def words(self) -> str:
        cache = f"a cache of {self.cache_tokens} tokens in blocks of {self.block_size}"
        switches = (f"{name}={value!r}" for name, value in self.options.items())
        lines = [", ".join([cache, *switches])]
        lines += [f"{at}. {asked.words()}" for at, asked in enumerate(self.requests)]
        return "\n  ".join(lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RequestMix:
        requests = []
        for each in data["requests"]:
            fields = {
                **each,
                "prompt": tuple(each["prompt"]),
                "sampling": _sampling(each["sampling"]),
                "stops": tuple((begins, length) for begins, length in each.get("stops", ())),
            }
            requests.append(Asked(**fields))
        return cls(**{**data, "requests": tuple(requests)})


def _sampling(data: Mapping[str, Any]) -> Sampling:
    if "stop" in data:
        return WiderSampling(**{**data, "stop": tuple(data["stop"])})
    return Sampling(**data)
