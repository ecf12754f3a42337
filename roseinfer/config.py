"""All settings of caches, engines and servers. No other module reads the environment."""

from __future__ import annotations

import ipaddress
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

from roseinfer.errors import ConfigError, did_you_mean, short_repr

TRITON_SWITCH = "ROSEINFER_TRITON_KV_APPEND"
TRITON_MIN_BATCH = "ROSEINFER_TRITON_KV_APPEND_MIN_BATCH"
TRITON_FULL_BATCH_MIN_BATCH = "ROSEINFER_TRITON_KV_APPEND_FULL_BATCH_MIN_BATCH"

MAX_RUN_AHEAD = 16
MAX_UNREAD_UPDATES = 128
"""Number of unread updates of a stream that pauses its request."""
RESUME_UNREAD_UPDATES = MAX_UNREAD_UPDATES // 2
"""Number of unread updates that resumes a paused request."""
ADMISSION_POLICIES = ("fifo", "pack")
SPECULATIONS = ("ngram",)

_SWITCH = dict.fromkeys(("1", "on", "true", "yes"), True) | dict.fromkeys(
    ("0", "off", "false", "no"), False
)
_MAX_INTEGER = 1 << 62
"""Largest integer of a setting. Sums of a few fit into torch's 64-bit integers."""


def setting(
    default: Any,
    text: str,
    *,
    unset: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    unit: str = "",
    listed: str = "commas",
    also: Sequence[str] = (),
    group: str = "engine",
    secret: bool = False,
) -> Any:
    """Declare a setting: a field that also defines an option, its bounds and a line of the docs.

    ``text`` is a noun phrase or an imperative. ``unset`` is the effect of leaving the setting
    unset; ``unit`` names the value of the option, and ``also`` are further names of it. Several
    texts are separated by ``commas`` or are ``words``, or the option is ``repeated``.
    """
    bounds = {"minimum": minimum, "maximum": maximum}
    metadata = {
        **{name: bound for name, bound in bounds.items() if bound is not None},
        "text": text,
        "unset": unset,
        "choices": choices,
        "unit": unit,
        "listed": listed,
        "also": also,
        "group": group,
    }
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class AppendPolicy:
    """Switches of append optimisations; each can be turned off to measure its benefit.

    ``batched``, ``batched_rollover`` and ``batched_copy_on_write`` decide which rows of an
    ``append_token_batch`` leave the batch and go through ``append_token``. A group of several
    layers has no per-token call, so rows stay in the batch and ``batched_copy_on_write=False``
    copies the blocks one at a time.
    """

    batched: bool = True
    """Batched appends; if off, every row goes through ``append_token``."""
    batched_rollover: bool = True
    """Batched rollovers; if off, rows that begin a new block go through ``append_token``."""
    batched_copy_on_write: bool = True
    """Batched copies; if off, rows that must copy a shared block go through ``append_token``."""
    identity: bool = True
    """Use of whole batches; if off, rows are gathered even if all are used in order."""
    scalar_position: bool = True
    """Scalar positions; if off, positions are a tensor even if all rows have the same one."""
    triton: bool = True
    """Triton kernels; if off, torch operations write, whatever the device."""
    triton_min_batch: int = 1
    """Smallest number of tokens that the Triton kernels write."""
    triton_full_batch_min_batch: int | None = None
    """Smallest number that the full-batch kernel writes; ``triton_min_batch`` when None."""

    def __post_init__(self) -> None:
        _check_kinds(self, "AppendPolicy.", default_minimum=0)

    @property
    def full_batch_threshold(self) -> int:
        threshold = self.triton_full_batch_min_batch
        return self.triton_min_batch if threshold is None else threshold

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, triton: bool = True
    ) -> AppendPolicy:
        """Return the policy of the ``ROSEINFER_TRITON_KV_APPEND*`` variables.

        This is the default policy. ``triton`` applies if the variable of the switch is not set.
        Each variable has an alias that begins with ``ROSELLM``.
        """
        env: Any = os.environ if environ is None else environ
        if not isinstance(env, Mapping):
            raise ConfigError(
                f"environ must be a mapping of variables to texts or None, not {environ!r}"
            )
        if (switch := _variable(env, TRITON_SWITCH)) is not None:
            name, word = switch
            if word.strip().lower() not in _SWITCH:
                raise ConfigError(f"{name}={word!r}: expected on or off (1/0, true/false, yes/no)")
            triton = _SWITCH[word.strip().lower()]
        thresholds = {
            "triton_min_batch": _variable(env, TRITON_MIN_BATCH),
            "triton_full_batch_min_batch": _variable(env, TRITON_FULL_BATCH_MIN_BATCH),
        }
        values: dict[str, Any] = {
            threshold: _whole_number(*variable)
            for threshold, variable in thresholds.items()
            if variable is not None
        }
        return cls(triton=triton, **values)


def _variable(env: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """Return a variable and its value, by its name or its alias; None if neither is set."""
    alias = name.replace("ROSEINFER", "ROSELLM", 1)
    values = {each: str(env[each]) for each in (name, alias) if each in env}
    if len({*values.values()}) > 1:
        raise ConfigError(
            f"{name}={values[name]!r} and {alias}={values[alias]!r} are one setting: unset one of "
            "them"
        )
    return next(iter(values.items()), None)


DTYPES = ("float32", "float16", "bfloat16")


def require_dtype(name: str) -> None:
    """Raise for an unsupported dtype."""
    if not (isinstance(name, str) and name in DTYPES):
        suggestion = did_you_mean(str(name), DTYPES)
        raise ConfigError(f"dtype {name!r}: it must be one of {', '.join(DTYPES)}{suggestion}")


_DEVICES = ("cpu", "cuda")
_GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")
"""Device files on Linux of NVIDIA's drivers, of WSL's and of AMD's."""


def require_device(name: str, devices: Path = Path("/dev")) -> None:
    """Raise for an unsupported device, as far as is known without torch."""
    kind, colon, number = name.partition(":")
    if kind not in _DEVICES or (colon and not number.isdecimal()):
        suggestion = "; did you mean cuda?" if kind == "gpu" else did_you_mean(kind, _DEVICES)
        raise ConfigError(f"device {name!r}: the engine runs on cpu, cuda or cuda:1{suggestion}")
    if kind == "cuda" and sys.platform == "linux":
        if not any(file for pattern in _GPU_FILES for file in devices.glob(pattern)):
            raise ConfigError(f"device {name!r}: there is no GPU here; device='cpu' works")


_MIN_PROMPT_TOKENS, _MAX_PROMPT_TOKENS = 2048, 8192
_WEIGHTS_TIMES_PROMPT_TOKENS = 2**43
"""Weights times prompt tokens of a step that takes 35 to 55 ms on an H200.

Steps of small models with fewer tokens take longer to launch than to compute. docs/lab/engine.md
has the measurements.
"""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes, limits and optimisations of an engine."""

    max_batch_size: int = setting(64, "requests that run at once", maximum=1 << 20)
    block_size: int = setting(
        64,
        "tokens in a block of the KV cache; smaller blocks waste less at the end of a sequence, "
        "and cost more bookkeeping",
    )
    kv_cache_tokens: int | None = setting(
        None,
        "tokens that the KV cache holds, in whole blocks",
        unset="85 % of a GPU's free memory, or 2 GiB without one, and never more than "
        "max_batch_size requests can fill",
    )
    max_length: int | None = setting(
        None,
        "tokens of a request, prompt and completion together, at most",
        unset="the model's number of positions",
    )
    prefix_cache: bool = setting(True, "share the stored blocks of prompts with equal prefixes")
    prefill_admission_policy: str = setting(
        "fifo",
        "order in which prompts begin: fifo is the order of arrival; pack prefers prompts that fit "
        "into a step whole",
        choices=ADMISSION_POLICIES,
    )
    prefill_max_batch_size: int = setting(64, "prompts that are prefilled in one step, at most")
    prefill_max_tokens: int | None = setting(
        None,
        "prompt tokens of one step, at most; it bounds how long running requests wait for it",
        unset="2,048; up to 8,192 on several GPUs, and on one for models of fewer than 3 billion "
        "weights",
    )
    prompt_rows: int | None = setting(
        None,
        "prompt tokens, at most, that one launch stores as rows of a decode step, so that a CUDA "
        "graph can be replayed",
        unset="128 where decode steps are CUDA graphs, else 0",
        minimum=0,
        maximum=1 << 10,
    )
    chunked_prefill: bool = setting(True, "prefill long prompts in chunks over several steps")
    attention_backend: str | None = setting(
        None,
        "triton, batched, reference, or another backend that was registered",
        unset="triton on a GPU, else batched",
    )
    paged_attention: bool | None = setting(
        None,
        "older name of attention_backend: on is triton, off is reference",
        unset="attention_backend decides",
        also=("--paged-attn",),
    )
    resident_decode: bool | None = setting(
        None, "keep the state of decoding sequences on the device", unset="on a GPU"
    )
    fused_model: bool | None = setting(
        None,
        "run the model on fused kernels, where there are some for its family",
        unset="on a GPU, and on a CPU on few operations of torch for Llama and its kin, unless a "
        "check at load finds that its own modules compute something else",
    )
    batch_invariant: bool | None = setting(
        None,
        "give a request the same bits whatever else is in its batch; prefill is a tenth slower",
        unset="where the model's kernels can, which takes a GPU",
    )
    pad_head: bool | None = setting(
        None,
        "pad the language-model head of a model without fused kernels, if its vocabulary has an "
        "odd size",
        unset="on a GPU",
    )
    compile_layers: bool = setting(
        False,
        "torch.compile the layers of a model without fused kernels, which takes some ten seconds",
    )
    cuda_graph: bool | None = setting(
        None, "replay decode steps of resident sequences from CUDA graphs", unset="on a GPU"
    )
    run_ahead: int | None = setting(
        None,
        "steps in flight when another is launched; a stream may lag by as many tokens",
        unset="2 on a GPU, else 0",
        minimum=0,
        maximum=MAX_RUN_AHEAD,
    )
    speculation: str | None = setting(
        None,
        "n-gram speculative decoding: propose tokens that followed the same n-gram before, and "
        "verify several in one step",
        unset="one token a step",
        choices=SPECULATIONS,
    )
    tensor_parallel_size: int = setting(
        1, "GPUs that compute the model together, each with a share of its heads"
    )
    exchange: bool | None = setting(
        None,
        "all-reduce inside of fused kernels, through memory that all ranks write to",
        unset="on GPUs that can",
    )
    guide_cpu_seconds: float = setting(
        2.0,
        "seconds of processor time in which a guide must compile in its own process",
        minimum=0.05,
        maximum=3600.0,
        unit="S",
    )
    guide_memory_mb: int = setting(
        512,
        "megabytes that a guide may take there, and that all cached grammars may take together",
        minimum=64,
        maximum=1 << 20,
        unit="MB",
    )
    per_layer_kv: bool = setting(
        False, "give every layer a block list, which the per-token switches of AppendPolicy need"
    )
    append_policy: AppendPolicy | None = None
    """Switches for writing the KV cache; None for those of the environment."""

    def __post_init__(self) -> None:
        if self.append_policy is None:
            AppendPolicy.from_env()  # refuses a bad variable now, before a model is loaded
        _check_kinds(self, "", default_minimum=1)
        if self.paged_attention is not None:
            meant = "triton" if self.paged_attention else "reference"
            if self.attention_backend not in (None, meant):
                raise ConfigError(
                    f"paged_attention={self.paged_attention} means attention_backend={meant!r}, "
                    f"and {self.attention_backend!r} was given too: leave paged_attention out"
                )
            object.__setattr__(self, "attention_backend", meant)
        if self.resident_decode and self.per_layer_kv:
            raise ConfigError(
                "resident_decode needs one block list for all layers: leave per_layer_kv off"
            )
        if self.tensor_parallel_size > 1:
            for name in ("per_layer_kv", "compile_layers"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} is for one GPU: leave it off, or tensor_parallel_size at 1"
                    )

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens of one step, at most."""
        most = self.prefill_max_tokens
        return _MIN_PROMPT_TOKENS if most is None else most

    def for_model(self, device: str, num_weights: int) -> EngineConfig:
        """Return the settings with the sizes that are best for a model, where they are unset.

        ``num_weights`` are those of one rank.
        """
        if self.prefill_max_tokens is not None or device != "cuda":
            return self
        tokens = 1 << round(math.log2(_WEIGHTS_TIMES_PROMPT_TOKENS / num_weights))
        tokens = max(tokens, _MIN_PROMPT_TOKENS * self.tensor_parallel_size)
        return replace(self, prefill_max_tokens=min(tokens, _MAX_PROMPT_TOKENS))

    def is_enabled(self, switch: str, device: str) -> bool:
        """Return True if a switch is on for a type of device; unset means on for GPUs only."""
        value: bool | None = getattr(self, switch)
        return device == "cuda" if value is None else value

    def uses_resident_decode(self, device: str) -> bool:
        return self.is_enabled("resident_decode", device) and not self.per_layer_kv

    def max_steps_in_flight(self, device: str) -> int:
        """Return how many steps may be in flight on a type of device when another is launched."""
        if self.run_ahead is not None:
            return self.run_ahead
        return 2 if device == "cuda" else 0

    def num_prompt_rows(self, *, captured: bool) -> int:
        """Return the rows for prompt tokens in a step; ``captured`` if its graphs are captured."""
        if self.prompt_rows is not None:
            return self.prompt_rows
        return 128 if captured else 0

    def policy_for(self, device: str) -> AppendPolicy:
        return self.append_policy or AppendPolicy.from_env(triton=device == "cuda")


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "bool | None": ((bool, NoneType), "True, False or None"),
    "str": ((str,), "a name"),
    "str | None": ((str, NoneType), "a name or None"),
    "AppendPolicy | None": ((AppendPolicy, NoneType), "an AppendPolicy or None"),
}
"""Accepted types and the words of an error, by the annotation of a setting."""


def _check_kinds(
    settings: AppendPolicy | EngineConfig | ServerConfig, owner: str, default_minimum: int
) -> None:
    """Raise unless every field matches its annotation and bounds, ``default_minimum`` included."""
    for each in fields(settings):
        value, kind = getattr(settings, each.name), str(each.type)
        if choices := each.metadata.get("choices"):
            optional = kind != "str"
            requirement = " or ".join(map(repr, choices)) + ", or None" * optional
            holds = (isinstance(value, str) and value in choices) or (optional and value is None)
        elif kind in _KINDS:
            types, requirement = _KINDS[kind]
            holds = isinstance(value, types)
        elif kind in ("int", "int | None"):
            lowest = each.metadata.get("minimum", default_minimum)
            highest = each.metadata.get("maximum", _MAX_INTEGER)
            requirement = f"a whole number of at least {lowest} and at most {highest}"
            holds = type(value) is int and lowest <= value <= highest
            holds = holds or (value is None and kind != "int")
        elif kind == "float":
            lowest, highest = (
                each.metadata.get("minimum", 0),
                each.metadata.get("maximum", _MAX_INTEGER),
            )
            requirement = f"a number of at least {lowest} and at most {highest}"
            holds = type(value) in (int, float) and lowest <= value <= highest
        elif kind == "tuple[str, ...]":
            requirement = "names in a tuple"
            holds = isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value)
        else:
            continue
        if not holds:
            raise ConfigError(f"{owner}{each.name} must be {requirement}, not {short_repr(value)}")


API_KEY = "ROSEINFER_API_KEY"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Address, limits and shutdown of a server."""

    host: str = setting(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 is all addresses of this machine",
        group="address",
        unit="HOST",
    )
    port: int = setting(
        8000,
        "port to listen on; 0 for a free one",
        minimum=0,
        maximum=(1 << 16) - 1,
        group="address",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host names that requests may be sent to, separated by commas; * is any",
        unset="loopback's names if only this machine reaches the address, else any",
        group="address",
        unit="NAME,...",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto count, "
        "separated by commas",
        unset="none",
        group="address",
        unit="ADDRESS,...",
    )
    replicas: int | None = setting(
        None,
        "processes that serve the model, under Ray, each on a GPU of its own if there are any",
        unset="this process alone, without Ray",
        group="address",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "model names that clients may send; metrics have the first",
        unset="the model's name",
        group="address",
        unit="NAME",
        listed="words",
    )
    chat_template: str | None = setting(
        None,
        "file with a Jinja template for chats, which may take 5 s a request",
        unset="the tokenizer's template",
        group="chat",
        unit="FILE",
    )
    api_key: str | None = setting(
        None,
        "key that clients must send",
        unset="ROSEINFER_API_KEY if that is set, else clients need none",
        group="limits",
        unit="KEY",
        secret=True,
    )
    max_queue: int = setting(
        1024, "waiting requests, at most; further ones get 429", group="limits"
    )
    max_body_bytes: int = setting(4 << 20, "bytes of a request's body, at most", group="limits")
    max_prompt_tokens: int | None = setting(
        None,
        "tokens of a prompt, at most",
        unset="what the model and its cache have room for",
        group="limits",
    )
    drain_seconds: float = setting(
        30.0,
        "seconds that running requests may take to end after SIGTERM",
        group="limits",
        unit="S",
    )
    stall_seconds: float = setting(
        120.0,
        "seconds that the engine may have work and complete no step before /health and /ready "
        "answer 503; more than any step takes",
        minimum=2,
        group="limits",
        unit="S",
    )
    access_log: bool = setting(True, "write a line for each HTTP request", group="limits")

    def __post_init__(self) -> None:
        _check_kinds(self, "", default_minimum=1)
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get(API_KEY))
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError(f"the API key is empty: give --api-key KEY, or set {API_KEY} to it")
        for host in self.allowed_hosts:
            if not host or "/" in host or host != host.strip():
                raise ConfigError(
                    f"allowed_hosts: {host!r} is not a host name: give names such as example.com "
                    "or *.example.com, without a scheme or a path"
                )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise ConfigError(
                    f"trusted_proxies: {proxy!r} is not an IP address or network, such as 10.0.0.7 "
                    "or 10.0.0.0/8"
                ) from None


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """The rank of a process that ``torchrun`` has started, and the number of ranks."""

    rank: int
    size: int

    @classmethod
    def from_env(cls) -> TorchrunRank | None:
        """Return the rank of this process, or None if ``torchrun`` did not start it."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        rank, size, local_size = (
            _whole_number(name, os.environ[name])
            for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        if local_size != size:
            raise ConfigError(
                f"torchrun started {size} processes on several hosts: the ranks of a model are all "
                "on one; use a single host"
            )
        return cls(rank, size)


def set_default_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables, except those that are set already."""
    for name, text in variables.items():
        os.environ.setdefault(name, text)


def _whole_number(variable: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise ConfigError(f"{variable}={text!r}: expected a whole number, 0 or larger")
    return value
