"""Every knob, one frozen dataclass each. No other module reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

TRITON_SWITCH = "ROSELLM_TRITON_KV_APPEND"
TRITON_MIN_BATCH = "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"
TRITON_FULL_BATCH_MIN_BATCH = "ROSELLM_TRITON_KV_APPEND_FULL_BATCH_MIN_BATCH"

_APPEND_SWITCHES = (
    "batched",
    "batched_rollover",
    "batched_copy_on_write",
    "identity",
    "scalar_position",
    "triton",
)
_ON = frozenset({"1", "on", "true", "yes"})
_OFF = frozenset({"0", "off", "false", "no"})


@dataclass(frozen=True, slots=True)
class AppendPolicy:
    """Which append optimisations may run; each can be turned off to measure what it is worth.

    ``batched``, ``batched_rollover`` and ``batched_copy_on_write`` decide which rows of an
    ``append_token_batch`` leave the batch and go through ``append_token``. In a group of
    several layers there is no per-token call to go to, so rows stay in the batch and
    ``batched_copy_on_write=False`` copies the blocks one at a time.
    """

    batched: bool = True
    """Off: every row goes through ``append_token``."""
    batched_rollover: bool = True
    """Off: rows that open a new block go through ``append_token``."""
    batched_copy_on_write: bool = True
    """Off: rows that must copy a shared block go through ``append_token``."""
    identity: bool = True
    """Off: rows are gathered even when the batch covers all of them in order."""
    scalar_position: bool = True
    """Off: positions travel as a tensor even when all rows share one."""
    triton: bool = True
    """Off: torch operations write, whatever the device."""
    triton_min_batch: int = 1
    """Tokens from which the Triton kernels write."""
    triton_full_batch_min_batch: int | None = None
    """Tokens from which the full-batch kernel does; ``triton_min_batch`` when None."""

    def __post_init__(self) -> None:
        for name in _APPEND_SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"AppendPolicy.{name} must be True or False, not {getattr(self, name)!r}"
                )
        for name in ("triton_min_batch", "triton_full_batch_min_batch"):
            value = getattr(self, name)
            if value is None and name == "triton_full_batch_min_batch":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"AppendPolicy.{name} must be a whole number >= 0, not {value!r}")

    @property
    def full_batch_threshold(self) -> int:
        own = self.triton_full_batch_min_batch
        return self.triton_min_batch if own is None else own

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> AppendPolicy:
        """The default policy with the ``ROSELLM_TRITON_KV_APPEND*`` variables applied."""
        env = os.environ if environ is None else environ
        return cls(
            triton=_switch(env, TRITON_SWITCH, default=cls().triton),
            triton_min_batch=_whole_number(env, TRITON_MIN_BATCH, default=cls().triton_min_batch),
            triton_full_batch_min_batch=(
                _whole_number(env, TRITON_FULL_BATCH_MIN_BATCH, default=0)
                if TRITON_FULL_BATCH_MIN_BATCH in env
                else None
            ),
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens seen before."""
    seed: int | None = None
    """The same seed and tokens give the same choice, whatever else is in the batch."""
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    """Texts that end the request; they are not part of its output."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0 turns it off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (1 turns it off)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 (which turns it off) and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 turns it off)"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "stop": (not isinstance(self.stop, str) and all(self.stop), "texts, none empty"),
        }
        for name, (holds, wanted) in allowed.items():
            if not holds:
                raise ConfigError(
                    f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {wanted}"
                )


def _switch(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = env.get(name)
    if text is None:
        return default
    word = text.strip().lower()
    if word not in _ON | _OFF:
        raise ConfigError(f"{name}={text!r}: expected on or off (1/0, true/false, yes/no)")
    return word in _ON


def _whole_number(env: Mapping[str, str], name: str, *, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise ConfigError(f"{name}={text!r}: expected a whole number, 0 or larger")
    return value
