"""How the harness drives somebody's engine, and the requests that it is given."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import FastPath

# Requests that come at different times, as plain data and in words.


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


class EngineAdapter(Adapter):
    """Override all but the last thirteen, which are optional.

    A token is a number below ``vocabulary``. What a request gets must be what ``alone``
    gives for it, whatever else the engine has to do.
    """

    vocabulary: ClassVar[int] = 32
    most_tokens: ClassVar[int] = 48
    """The most tokens of a prompt and what follows it."""
    most_requests: ClassVar[int | None] = None
    """How many requests it is made for at a time; None for no bound."""
    lag: ClassVar[int] = 0
    """A mix may take so many steps more, for each of its requests, until all have ended."""
    never_idles: ClassVar[bool] = False
    """No more than ``lag`` steps in a row bring no token while all requests are decoding by
    ``stage``."""
    paths: ClassVar[Mapping[str, FastPath]] = {}
    """Fast paths the engine declares, by their names in ``path_counts``."""
    conditions: ClassVar[Sequence[str]] = ()
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Switches to vary; the first value of each is the usual one."""
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3, 8)
    """Numbers of tokens in a block that the engine can be built with."""
    sizes: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Switches that change the sizes of what the engine allocates. On a GPU, a second search draws
    them from the first three values of each, and up to a hundred requests of up to ``longest``
    tokens. Without any there is no such search."""
    longest: ClassVar[int] = 1000
    takes_sampling: ClassVar[bool] = True
    """Requests say how their tokens are chosen, by seeds of their own where they are drawn. False
    for an engine that is held to the likeliest tokens alone: of ``Sampling``, a request then has
    ``max_new_tokens`` and ``ignore_eos`` only."""
    end: ClassVar[int | None] = None
    """The token that ends a text, for an adapter without an ``alone`` of its own."""
    takes_min_p: ClassVar[bool] = False
    """Requests may ask for a ``min_p`` too."""
    takes_counted_penalties: ClassVar[bool] = False
    """Requests may ask for presence and frequency penalties too."""
    replays: ClassVar[int] = 1
    """So many times what failed is run again: more where that depends on more than what is done."""
    rounding: ClassVar[float] = 3e-5
    """How much the engine's logits may differ from ``logits``, relative to the largest."""

    def make(self, mix: RequestMix) -> None:
        """Build an engine with the mix's cache, device and options."""
        raise NotImplementedError

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        """Take a request; return what stands for it from here on."""
        raise NotImplementedError

    def step(self) -> None:
        """Let the engine do one step."""
        raise NotImplementedError

    def tokens(self, request: Any) -> list[int]:
        """Return what it has generated by now, which nothing takes back."""
        raise NotImplementedError

    def ended(self, request: Any) -> bool:
        raise NotImplementedError

    def leftovers(self) -> str:
        """Say what is still held though every request has ended; an empty text is right."""
        raise NotImplementedError

    def path_counts(self) -> Mapping[str, int]:
        """Return how often each path ran since ``make``."""
        raise NotImplementedError

    @classmethod
    def request_in_words(cls, asked: Asked) -> str:
        """Return one request as a failure tells it."""
        return asked.words()

    @optional
    def alone(self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix) -> list[int]:
        """Return what the slow twin generates: this request alone, on no fast path.

        Where requests have no say in sampling, these are the likeliest tokens by ``logits`` unless
        the adapter knows better.
        """
        new: list[int] = []
        while len(new) < sampling.max_new_tokens and (sampling.ignore_eos or self.end not in new):
            logits = self.logits([*prompt, *new], mix)
            new.append(max(range(len(logits)), key=logits.__getitem__))
        return new

    @optional
    def cancel(self, request: Any) -> None:
        """End a request, which may have ended already. Without it, none is cancelled."""
        raise NotImplementedError

    @optional
    def forked(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        """Store the prompt once and continue it in several ways."""
        raise NotImplementedError

    @optional
    def undecided(
        self,
        tokens: Sequence[int],
        sampling: Sampling,  # noqa: ARG002
        mix: RequestMix,
    ) -> bool:
        """Return True if rounding could change what follows these tokens.

        Where ``logits`` say what is likeliest, it could if two are as near to each other.
        """
        if self.takes_sampling or not self.defines("logits"):
            return False
        *_, second, first = sorted(logits := self.logits(tokens, mix))
        return first - second < 2 * self.rounding * max(map(abs, logits))

    @optional
    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Sequence[float]:
        """Return the logits of the token after these, by the model alone.

        Each token that a request gets must then be one that its parameters allow.
        """
        raise NotImplementedError

    @optional
    def logprobs(self, request: Any) -> Sequence[float]:
        """Return the log-probability of each token by now, if the request asked for them."""
        raise NotImplementedError

    @optional
    def top_logprobs(self, request: Any) -> Sequence[Sequence[tuple[int, float]]]:
        """Return for each token by now the likeliest at its place, each with its log-probability.

        There are as many as the request asked for, the likeliest first.
        """
        raise NotImplementedError

    @optional
    def prompt_logprobs(self, request: Any) -> Sequence[float | None]:
        """Return the log-probability of each token of the prompt, None for the first."""
        raise NotImplementedError

    @optional
    def pieces(self, request: Any) -> Sequence[str]:
        """Return the pieces of text that the engine has shown by now. Some may be empty."""
        raise NotImplementedError

    @optional
    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of a whole request's tokens, by the tokenizer alone."""
        raise NotImplementedError

    @optional
    def stage(self, request: Any) -> str:
        """Return what a request that goes on is at, for a failure and its timeline.

        That is "waiting", "prefilling", "decoding" or "preempted".
        """
        raise NotImplementedError

    @optional
    def cached_tokens(self, request: Any) -> int:
        """Return how many of its first tokens were found in the prefix cache, for a failure.

        That is when it last began; one that was preempted begins again.
        """
        raise NotImplementedError

    @optional
    def spelled(self, token: int) -> str:
        """Return how a token is written where a failure is told."""
        return str(token)
