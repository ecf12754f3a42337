"""Sampling parameters of a request, validated, as one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

from roseinfer.config import setting as _setting
from roseinfer.errors import ConfigError, short_repr
from roseinfer.guided.guide import Guide

if TYPE_CHECKING:
    from collections.abc import Callable

setting = partial(_setting, group="sampling")
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256
"""Characters of a stop string. With ``MAX_STOP_STRINGS``, bounds the time to build the matcher."""
MAX_TOP_LOGPROBS = 20
_LARGEST = 3.4e38
"""Largest number that fits into 32-bit floats."""
_LEAST_PENALTY = 1e-38


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request."""

    temperature: float = setting(
        0.0, "divisor of the logits; 0 takes the argmax, whatever top_k, top_p and min_p say"
    )
    top_k: int = setting(0, "keep the K tokens with the highest logits; 0 keeps all", unit="K")
    top_p: float = setting(
        1.0,
        "nucleus sampling: keep the fewest top tokens whose probabilities add up to P or more",
        unit="P",
    )
    min_p: float = setting(0.0, "drop tokens below P times the top probability", unit="P")
    repetition_penalty: float = setting(
        1.0,
        "divide the positive logits of tokens in the prompt and completion by X, and multiply "
        "negative ones",
        unit="X",
    )
    presence_penalty: float = setting(
        0.0,
        "subtract X, from -2 to 2, once from the logit of every token already generated",
        unit="X",
    )
    frequency_penalty: float = setting(
        0.0, "subtract X for each time that the token was generated", unit="X"
    )
    seed: int | None = setting(
        None,
        "seed of the draws; the same seed and tokens give the same choice in any batch",
        unset="another one for each request",
    )
    max_new_tokens: int = setting(16, "tokens of a completion, at most")
    stop: tuple[str, ...] = setting(
        (),
        "stop string, which the completion does not include; up to 32 of 256 characters",
        unit="TEXT",
        listed="repeated",
    )
    ignore_eos: bool = setting(False, "continue after an end-of-sequence token")
    guide: Guide | None = setting(  # noqa: RUF009 - it makes a field
        None, "form of the completion; one that cannot continue ends", unit="JSON"
    )
    logprobs: bool = setting(
        False,
        "return the log-probability of each token by the model's own logits; with a guide, among "
        "the tokens that it allows",
    )
    top_logprobs: int = setting(
        0, "return the N highest log-probabilities at each position too, which turns logprobs on"
    )
    prompt_logprobs: bool = setting(
        False, "return the log-probability of each prompt token after those before it"
    )

    def __post_init__(self) -> None:
        for name, (kinds, holds, requirement) in _SAMPLING.items():
            value = getattr(self, name)
            # bool is a subclass of int, but True is a mistake for a numeric parameter.
            typed = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if not (typed and holds(value)):
                kind = (
                    f" of type {type(value).__name__}" if kinds[0] in _NUMBER and not typed else ""
                )
                raise ConfigError(
                    f"SamplingParams.{name} is {short_repr(value)}{kind}; it must be {requirement}"
                )
        object.__setattr__(self, "stop", tuple(self.stop))  # a list could still grow
        if self.top_logprobs:
            object.__setattr__(self, "logprobs", True)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ConfigError(
                f"SamplingParams.stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are "
                "allowed"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise ConfigError(
                f"SamplingParams.stop has a string of {longest} characters; at most "
                f"{MAX_STOP_LENGTH} are allowed"
            )

    @property
    def has_penalties(self) -> bool:
        """True if tokens in prompt or completion change the logits of the next one."""
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
        "a list of strings, none of them empty",
    ),
    "ignore_eos": ((bool,), lambda _: True, "True or False"),
    "guide": ((Guide, NoneType), lambda _: True, "a Guide or None"),
    "logprobs": ((bool,), lambda _: True, "True or False"),
    "top_logprobs": (
        (int,),
        lambda x: 0 <= x <= MAX_TOP_LOGPROBS,
        f"at least 0 and at most {MAX_TOP_LOGPROBS}, a whole number",
    ),
    "prompt_logprobs": ((bool,), lambda _: True, "True or False"),
}
"""Types, condition and expected value (for the error message) of each parameter."""
