"""How a request's tokens are chosen, as one frozen dataclass that refuses what makes no sense."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

from roseinfer.errors import ConfigError, short_repr
from roseinfer.guided.guide import Guide

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_STOPS = 32
LONGEST_STOP = 256
"""In characters. With ``MOST_STOPS`` it bounds the time that looking for them takes to prepare."""
MOST_TOP_LOGPROBS = 20
_LARGEST = 3.4e38
"""The largest number that fits into the 32-bit floats of a device."""
_LEAST_PENALTY = 1e-38


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends."""

    temperature: float = 0.0
    """0 takes the most likely token, whatever the next three say."""
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens seen before, and multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Taken off them as often as they were generated."""
    seed: int | None = None
    """The same seed and tokens give the same choice, whatever else is in the batch."""
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    """Texts that end the request, up to 32 of 256 characters. The output does not include them."""
    ignore_eos: bool = False
    """Go on after a token that ends a text."""
    guide: Guide | None = None
    """The form that the text must have. A text that cannot go on ends, whatever else is asked."""
    logprobs: bool = False
    """Return the log-probability of each chosen token by the model's own logits. With a guide these
    are among the tokens that it allows, as vLLM's are."""
    top_logprobs: int = 0
    """Return those of so many likeliest tokens at each place too; this turns ``logprobs`` on."""
    prompt_logprobs: bool = False
    """Return those of the prompt's tokens, each behind the tokens before it."""

    def __post_init__(self) -> None:
        for name, (kinds, holds, wanted) in _SAMPLING.items():
            value = getattr(self, name)
            # True is an int to Python, and a mistake wherever a number is meant.
            right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if not (right and holds(value)):
                kind = (
                    f" of type {type(value).__name__}" if kinds[0] in _NUMBER and not right else ""
                )
                raise ConfigError(
                    f"SamplingParams.{name} is {short_repr(value)}{kind}; it must be {wanted}"
                )
        object.__setattr__(self, "stop", tuple(self.stop))  # a list could still grow
        if self.top_logprobs:
            object.__setattr__(self, "logprobs", True)
        if len(self.stop) > MOST_STOPS:
            raise ConfigError(
                f"SamplingParams.stop has {len(self.stop)} texts; at most {MOST_STOPS} can be "
                "looked for"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > LONGEST_STOP:
            raise ConfigError(
                f"SamplingParams.stop has a text of {longest} characters; at most {LONGEST_STOP} "
                "can be looked for"
            )

    @property
    def penalised(self) -> bool:
        """True if the tokens that a request has weigh on what it gets next."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


_NUMBER = (int, float)
_OFF_LOGITS = (_NUMBER, lambda x: -2 <= x <= 2, "between -2 and 2 (0 turns it off)")
_SAMPLING: dict[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "temperature": (_NUMBER, lambda x: 0 <= x <= _LARGEST, f"at least 0 and at most {_LARGEST}"),
    "top_k": (
        (int,),
        lambda x: 0 <= x < 1 << 63,
        "at least 0 (0 turns it off) and below 2**63, a whole number",
    ),
    "top_p": (_NUMBER, lambda x: 0 < x <= 1, "above 0 and at most 1 (1 turns it off)"),
    "min_p": (_NUMBER, lambda x: 0 <= x <= 1, "between 0 (which turns it off) and 1"),
    "repetition_penalty": (
        _NUMBER,
        lambda x: _LEAST_PENALTY <= x <= _LARGEST,
        f"at least {_LEAST_PENALTY} (1 turns it off) and at most {_LARGEST}",
    ),
    "presence_penalty": _OFF_LOGITS,
    "frequency_penalty": _OFF_LOGITS,
    "seed": (
        (int, NoneType),
        lambda x: x is None or -(1 << 64) < x < 1 << 64,
        "a whole number of at most 64 bits, or None",
    ),
    "max_new_tokens": (
        (int,),
        lambda x: 1 <= x < 1 << 63,
        "at least 1 and below 2**63, a whole number",
    ),
    "stop": (
        (tuple, list),
        lambda texts: all(isinstance(text, str) and text for text in texts),
        "texts in a list, none of them empty",
    ),
    "ignore_eos": ((bool,), lambda _: True, "True or False"),
    "guide": ((Guide, NoneType), lambda _: True, "a Guide or None"),
    "logprobs": ((bool,), lambda _: True, "True or False"),
    "top_logprobs": (
        (int,),
        lambda x: 0 <= x <= MOST_TOP_LOGPROBS,
        f"at least 0 and at most {MOST_TOP_LOGPROBS}, a whole number",
    ),
    "prompt_logprobs": ((bool,), lambda _: True, "True or False"),
}
"""For each parameter: its types, a condition, and what an error asks for."""
