"""Every setting of caches, engines and servers. No other module reads the environment."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

from roseinfer.errors import ConfigError, did_you_mean, short_repr

TRITON_SWITCH = "ROSELLM_TRITON_KV_APPEND"
TRITON_MIN_BATCH = "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"
TRITON_FULL_BATCH_MIN_BATCH = "ROSELLM_TRITON_KV_APPEND_FULL_BATCH_MIN_BATCH"

MOST_AHEAD = 16
MOST_UNREAD = 128
"""A request whose stream holds so many updates that nobody has read is paused."""
RESUMED_AT = MOST_UNREAD // 2
"""It goes on when no more of them are left."""
ADMISSION_POLICIES = ("fifo", "pack")
SPECULATIONS = ("ngram",)

_SWITCH = dict.fromkeys(("1", "on", "true", "yes"), True) | dict.fromkeys(
    ("0", "off", "false", "no"), False
)
_MOST = 1 << 62
"""The largest whole number of a setting. Sums of a few fit into the 64 bits that torch has."""


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
        _check_kinds(self, "AppendPolicy.", least=0)

    @property
    def full_batch_threshold(self) -> int:
        own = self.triton_full_batch_min_batch
        return self.triton_min_batch if own is None else own

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, triton: bool = True
    ) -> AppendPolicy:
        """Return what the ``ROSELLM_TRITON_KV_APPEND*`` variables ask for.

        This is the policy wherever none was given. Where the switch is not set, ``triton`` holds.
        """
        env: Any = os.environ if environ is None else environ
        if not isinstance(env, Mapping):
            raise ConfigError(
                f"environ must be a mapping of variables to texts or None, not {environ!r}"
            )
        if TRITON_SWITCH in env:
            word = str(env[TRITON_SWITCH])
            if word.strip().lower() not in _SWITCH:
                raise ConfigError(
                    f"{TRITON_SWITCH}={word!r}: expected on or off (1/0, true/false, yes/no)"
                )
            triton = _SWITCH[word.strip().lower()]
        thresholds = {
            "triton_min_batch": TRITON_MIN_BATCH,
            "triton_full_batch_min_batch": TRITON_FULL_BATCH_MIN_BATCH,
        }
        given: dict[str, Any] = {
            threshold: _whole_number(variable, str(env[variable]))
            for threshold, variable in thresholds.items()
            if variable in env
        }
        return cls(triton=triton, **given)


DTYPES = ("float32", "float16", "bfloat16")


def require_dtype(name: str) -> None:
    """Refuse a dtype that no model is loaded in."""
    if not (isinstance(name, str) and name in DTYPES):
        alike = did_you_mean(str(name), DTYPES)
        raise ConfigError(f"dtype {name!r}: it must be one of {', '.join(DTYPES)}{alike}")


_DEVICES = ("cpu", "cuda")
_GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")
"""The devices of NVIDIA's drivers, of Windows's for Linux and of AMD's, as Linux names them."""


def require_device(name: str, devices: Path = Path("/dev")) -> None:
    """Refuse a device that no engine runs on, as far as can be known without torch."""
    kind, colon, number = name.partition(":")
    if kind not in _DEVICES or (colon and not number.isdecimal()):
        alike = "; did you mean cuda?" if kind == "gpu" else did_you_mean(kind, _DEVICES)
        raise ConfigError(f"device {name!r}: the engine runs on cpu, cuda or cuda:1{alike}")
    if kind == "cuda" and sys.platform == "linux":
        if not any(found for each in _GPU_FILES for found in devices.glob(each)):
            raise ConfigError(f"device {name!r}: there is no GPU here; device='cpu' works")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests are served: sizes, limits and which optimisations run."""

    max_batch_size: int = field(default=64, metadata={"most": 1 << 20})
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
    prompt_rows: int | None = field(default=None, metadata={"least": 0, "most": 1 << 10})
    """Prompts of a step with up to so many tokens are stored as rows that decode, one for each
    token, in a graph where decode steps are some; None for 128 there, and 0 elsewhere."""
    chunked_prefill: bool = True
    """Off: a prompt is stored in one step, however long."""
    attention_backend: str | None = None
    """``triton``, ``reference`` or another that was registered; None for the device's best."""
    paged_attention: bool | None = None
    """An older name for the same: True for ``triton`` and False for ``reference``."""
    resident_decode: bool | None = None
    """Keep the state of sequences that decode on the device; None for yes on a GPU."""
    fused_model: bool | None = None
    """Run a model on fused kernels if there are some for it; None for yes on a GPU."""
    batch_invariant: bool | None = None
    """A request gets the same bits whatever else is in the batch; None for yes where the model's
    kernels can, which takes a GPU. Prompts are a tenth slower for it."""
    pad_head: bool | None = None
    """Widen the heads of other models with odd vocabularies; None for yes on a GPU."""
    compile_layers: bool = False
    """Have torch.compile fuse the layers of other models, which takes some ten seconds."""
    cuda_graph: bool | None = None
    """Replay steps of resident sequences from CUDA graphs; None for yes on a GPU."""
    run_ahead: int | None = field(default=None, metadata={"least": 0})
    """Steps that may be in flight when a step is launched. A stream may lag by as many tokens.
    None for 2 on a GPU and 0 elsewhere."""
    speculation: str | None = None
    """``ngram`` looks up in a text how it may go on, and verifies several tokens in one step; None
    for one token a step."""
    tensor_parallel_size: int = 1
    """Processes that each compute a share of the model's heads, every one on a GPU of its own."""
    exchange: bool | None = None
    """Ranks add up their parts of a product in the kernel that takes the sum, through memory that
    all of them write to; None for yes on GPUs that can."""
    guide_cpu_seconds: float = field(default=2.0, metadata={"least": 0.05, "most": 3600.0})
    """Processor time in which a guide must be compiled in the process that tries it."""
    guide_memory_mb: int = field(default=512, metadata={"least": 64, "most": 1 << 20})
    """Megabytes of memory that it may take for that, and all grammars that are kept."""
    per_layer_kv: bool = False
    """A block list for every layer, which the append policy's per-token switches need."""
    append_policy: AppendPolicy | None = None
    """How the KV cache is written to; None for what the environment asks for."""

    def __post_init__(self) -> None:
        if self.append_policy is None:
            AppendPolicy.from_env()  # refuses a bad variable now, before a model is loaded
        _check_kinds(self, "", least=1)
        if self.run_ahead is not None and self.run_ahead > MOST_AHEAD:
            raise ConfigError(f"run_ahead must be 0 to {MOST_AHEAD}, not {self.run_ahead}")
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
        if self.speculation not in (None, *SPECULATIONS):
            raise ConfigError(
                f"speculation is {self.speculation!r}; it must be {' or '.join(SPECULATIONS)}, or "
                "None"
            )
        if self.prefill_admission_policy not in ADMISSION_POLICIES:
            raise ConfigError(
                f"prefill_admission_policy is {self.prefill_admission_policy!r}; it must be "
                f"{' or '.join(ADMISSION_POLICIES)}"
            )

    def wants(self, switch: str, device: str) -> bool:
        """Return True if a switch is on for such a device; None means on for a GPU alone."""
        value: bool | None = getattr(self, switch)
        return device == "cuda" if value is None else value

    def decodes_in_slots(self, device: str) -> bool:
        return self.wants("resident_decode", device) and not self.per_layer_kv

    def lag(self, device: str) -> int:
        """Return how many steps may be in flight on such a device when another is launched."""
        if self.run_ahead is not None:
            return self.run_ahead
        return 2 if device == "cuda" else 0

    def rows_of_prompts(self, *, captured: bool) -> int:
        """Return for how many tokens of prompts a step has rows, if its graphs are captured."""
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
"""For annotations of settings: the types that are accepted, and what an error asks for."""


def _check_kinds(
    settings: AppendPolicy | EngineConfig | ServerConfig, owner: str, least: int
) -> None:
    """Raise unless every field holds what its annotation says, and no number below ``least``."""
    for each in fields(settings):
        value, kind = getattr(settings, each.name), str(each.type)
        if kind in _KINDS:
            types, wanted = _KINDS[kind]
            holds = isinstance(value, types)
        elif kind in ("int", "int | None"):
            lowest = each.metadata.get("least", least)
            most = each.metadata.get("most", _MOST)
            wanted = f"a whole number of at least {lowest} and at most {most}"
            holds = type(value) is int and lowest <= value <= most
            holds = holds or (value is None and kind != "int")
        elif kind == "float":
            lowest, most = each.metadata.get("least", 0), each.metadata.get("most", _MOST)
            wanted = f"a number of at least {lowest} and at most {most}"
            holds = type(value) in (int, float) and lowest <= value <= most
        elif kind == "tuple[str, ...]":
            wanted = "names in a tuple"
            holds = isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value)
        else:
            continue
        if not holds:
            raise ConfigError(f"{owner}{each.name} must be {wanted}, not {short_repr(value)}")


API_KEY = "ROSEINFER_API_KEY"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server is reached, what it lets in, and how it ends."""

    host: str = "127.0.0.1"
    """Nobody but this machine reaches the default."""
    port: int = field(default=8000, metadata={"least": 0, "most": (1 << 16) - 1})
    """0 for one that is free."""
    served_model_name: tuple[str, ...] = ()
    """The names that clients ask for; none for that of the model."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must know; None for what the environment says, if it does."""
    max_queue: int = 1024
    """Texts that may wait for a place in the batch. Who comes then is told to come later."""
    max_body_bytes: int = 4 << 20
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may name; none for any, or for loopback's own names on loopback."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose forwarded headers count."""
    max_prompt_tokens: int | None = None
    """None for as many as the model and its cache have room for."""
    drain_seconds: float = 30.0
    """How long texts may go on when the server is told to end."""
    stall_seconds: float = field(default=120.0, metadata={"least": 2})
    """Seconds without a step, though there is work, after which probes are told so."""
    chat_template: str | None = None
    """A file; None for the template that the tokenizer came with."""
    access_log: bool = True
    replicas: int | None = None
    """Processes that serve the model, under Ray; None for this one alone, without Ray."""

    def __post_init__(self) -> None:
        _check_kinds(self, "", least=1)
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
class Launched:
    """A process that ``torchrun`` has started beside others."""

    rank: int
    size: int

    @classmethod
    def from_env(cls) -> Launched | None:
        """Return this process's place among them, or None if it was started alone."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        rank, size, here = (
            _whole_number(name, os.environ[name])
            for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        if here != size:
            raise ConfigError(
                f"torchrun started {size} processes on several hosts: the ranks of a model are all "
                "on one"
            )
        return cls(rank, size)


def prefer_variables(variables: Mapping[str, str]) -> None:
    """Set variables for programs that are told nothing otherwise. Those that are set stay."""
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
