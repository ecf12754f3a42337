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
MOST_AHEAD = 16
_LARGEST = 3.4e38
"""The largest number that a device, with its 32-bit floats, can be told."""
_LEAST_PENALTY = 1e-38
ADMISSION_POLICIES = ("fifo", "pack")

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
    """If off, every row goes through ``append_token``."""
    batched_rollover: bool = True
    """If off, rows that open a new block go through ``append_token``."""
    batched_copy_on_write: bool = True
    """If off, rows that must copy a shared block go through ``append_token``."""
    identity: bool = True
    """If off, rows are gathered even when the batch covers all of them in order."""
    scalar_position: bool = True
    """If off, positions travel as a tensor even when all rows share one."""
    triton: bool = True
    """If off, torch operations write, whatever the device."""
    triton_min_batch: int = 1
    """The least number of tokens that the Triton kernels write."""
    triton_full_batch_min_batch: int | None = None
    """The least number that the full-batch kernel writes; ``triton_min_batch`` when None."""

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
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, triton: bool = True
    ) -> AppendPolicy:
        """Return what the ``ROSELLM_TRITON_KV_APPEND*`` variables ask for.

        This is the policy wherever none was given. ``triton`` is what holds where the switch is
        not set.
        """
        env = os.environ if environ is None else environ
        return cls(
            triton=_switch(env, TRITON_SWITCH, default=triton),
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

    temperature: float = 0.0
    """0 takes the most likely token, whatever the next three say."""
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
    """Go on after a token that ends a text."""
    logprobs: bool = False
    """Return the log-probability of each chosen token by the model's own logits."""

    def __post_init__(self) -> None:
        whole = [self.top_k, self.max_new_tokens, 0 if self.seed is None else self.seed]
        numbers = [self.temperature, self.top_p, self.min_p, self.repetition_penalty]
        if not all(isinstance(value, int) for value in whole) or not all(
            isinstance(value, (int, float)) for value in numbers
        ):
            raise ConfigError(
                f"{self}: top_k, max_new_tokens and seed must be whole numbers, and temperature, "
                "top_p, min_p and repetition_penalty numbers"
            )
        allowed = {
            "temperature": (
                0 <= self.temperature <= _LARGEST,
                f"at least 0 and at most {_LARGEST}",
            ),
            "top_k": (0 <= self.top_k < 1 << 63, "at least 0 (0 turns it off) and below 2**63"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (1 turns it off)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 (which turns it off) and 1"),
            "repetition_penalty": (
                _LEAST_PENALTY <= self.repetition_penalty <= _LARGEST,
                f"at least {_LEAST_PENALTY} (1 turns it off) and at most {_LARGEST}",
            ),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "stop": (_are_texts(self.stop), "texts in a list, none of them empty"),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
            "logprobs": (isinstance(self.logprobs, bool), "True or False"),
        }
        for name, (holds, wanted) in allowed.items():
            if not holds:
                raise ConfigError(
                    f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {wanted}"
                )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests are served: sizes, limits and which optimisations run."""

    max_batch_size: int = 64
    """Requests that run at once."""
    block_size: int = 64
    """Tokens of a block of the KV cache."""
    kv_cache_tokens: int | None = None
    """Tokens the KV cache holds, in whole blocks; None for what the device has room for."""
    max_length: int | None = None
    """Most tokens of a request, prompt included; None for what the model was made for."""
    prefix_cache: bool = True
    """Prompts that begin alike share what is stored of their beginning."""
    prefill_admission_policy: str = "fifo"
    """``fifo`` admits in order of arrival; ``pack`` prefers prompts that fit whole."""
    prefill_max_batch_size: int = 16
    """Prompts that are worked on in one step."""
    prefill_max_tokens: int = 2048
    """Prompt tokens of one step, which bounds how long running requests wait for it."""
    chunked_prefill: bool = True
    """Off: a prompt is stored in one step, however long."""
    attention_backend: str | None = None
    """The name of what computes attention: ``triton``, ``reference``, which gathers every
    sequence, or another that was registered; None for the device's best."""
    paged_attention: bool | None = None
    """An older name for the same: True for ``triton`` and False for ``reference``."""
    resident_decode: bool | None = None
    """Whether the state of sequences that decode lives on the device; None for yes on a GPU."""
    fused_model: bool | None = None
    """Whether a model that there are fused kernels for runs on them; None for yes on a GPU."""
    pad_head: bool | None = None
    """Whether the head of a model on its own modules is made wider where its vocabulary is of an
    odd size; None for yes on a GPU."""
    compile_layers: bool = False
    """Have torch.compile fuse the layers of models that run on their own modules, which takes
    some ten seconds at the start."""
    cuda_graph: bool | None = None
    """Whether steps of resident sequences are replayed from CUDA graphs; None for yes on a GPU."""
    run_ahead: int | None = None
    """Steps that may be on their way when a step is launched, which is by how many tokens a
    stream may lag; None for 2 on a GPU and 0 elsewhere."""
    per_layer_kv: bool = False
    """A block list for every layer, which the append policy's per-token switches need."""
    append_policy: AppendPolicy | None = None
    """How the KV cache is written to; None for what the environment asks for, and the kernels on
    a GPU where it asks for nothing."""

    def __post_init__(self) -> None:
        if self.append_policy is None:
            AppendPolicy.from_env()  # refuses a bad variable now, before a model is loaded
        for name in ("max_batch_size", "block_size", "prefill_max_batch_size"):
            _require_at_least_1(name, getattr(self, name))
        _require_at_least_1("prefill_max_tokens", self.prefill_max_tokens)
        for name in ("kv_cache_tokens", "max_length"):
            if getattr(self, name) is not None:
                _require_at_least_1(name, getattr(self, name))
        for name in ("prefix_cache", "chunked_prefill", "compile_layers", "per_layer_kv"):
            _require_switch(name, getattr(self, name), "True or False")
        for name in ("paged_attention", "resident_decode", "fused_model", "pad_head", "cuda_graph"):
            if getattr(self, name) is not None:
                _require_switch(name, getattr(self, name), "True, False or None")
        self._choose_attention()
        if self.run_ahead is not None and (
            not isinstance(self.run_ahead, int)
            or isinstance(self.run_ahead, bool)
            or not 0 <= self.run_ahead <= MOST_AHEAD
        ):
            raise ConfigError(f"run_ahead must be 0 to {MOST_AHEAD}, not {self.run_ahead!r}")
        if self.resident_decode and self.per_layer_kv:
            raise ConfigError(
                "resident_decode needs one block list for all layers: leave per_layer_kv off"
            )
        if self.prefill_admission_policy not in ADMISSION_POLICIES:
            raise ConfigError(
                f"prefill_admission_policy is {self.prefill_admission_policy!r}; it must be "
                f"{' or '.join(ADMISSION_POLICIES)}"
            )

    def _choose_attention(self) -> None:
        chosen = self.attention_backend
        if chosen is not None and not isinstance(chosen, str):
            raise ConfigError(f"attention_backend must be a name or None, not {chosen!r}")
        if self.paged_attention is None:
            return
        meant = "triton" if self.paged_attention else "reference"
        if chosen not in (None, meant):
            raise ConfigError(
                f"paged_attention={self.paged_attention} means attention_backend={meant!r}, and "
                f"{chosen!r} was given too: leave paged_attention out"
            )
        object.__setattr__(self, "attention_backend", meant)

    def wants(self, switch: str, device: str) -> bool:
        """Return True if a switch is on there; one that nobody set is on on a GPU."""
        value: bool | None = getattr(self, switch)
        return device == "cuda" if value is None else value

    def decodes_in_slots(self, device: str) -> bool:
        """Return True if sequences that decode are resident on that kind of device."""
        return self.wants("resident_decode", device) and not self.per_layer_kv

    def replays_graphs(self, device: str) -> bool:
        """Return True if steps of resident sequences are replayed from graphs there."""
        return device == "cuda" and self.cuda_graph is not False

    def lag(self, device: str) -> int:
        """So many steps may be in flight there when another is launched."""
        if self.run_ahead is not None:
            return self.run_ahead
        return 2 if device == "cuda" else 0

    def policy_for(self, device: str) -> AppendPolicy:
        """The policy by which the cache is written to on that kind of device."""
        return self.append_policy or AppendPolicy.from_env(triton=device == "cuda")


def _are_texts(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(each, str) and each for each in value
    )


def _require_switch(name: str, value: object, wanted: str) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be {wanted}, not {value!r}")


def _require_at_least_1(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


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
