"""Loading of a model onto a device, with its tokenizer and a KV cache."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from roseinfer.attention.backend import find_backend
from roseinfer.config import require_device, require_dtype
from roseinfer.distributed.peer_memory import open_exchange
from roseinfer.distributed.sharding import shard
from roseinfer.errors import (
    BadArgument,
    ConfigError,
    UnsupportedModel,
    did_you_mean,
    short_repr,
)
from roseinfer.kernels.runtime import unusable_reason
from roseinfer.kv.groups import group_layers_by_window
from roseinfer.kv.manager import KVBlockManager
from roseinfer.models.causal import CausalModel, compile_layers
from roseinfer.models.checkpoint import load_checkpoint, load_tokenizer, read_header_once
from roseinfer.models.families import fused_family
from roseinfer.models.fused_checks import is_batch_invariant, matches_modules
from roseinfer.models.joined_llama import JoinedLlama
from roseinfer.models.locate_model import locate
from roseinfer.models.tiny import tiny_gpt2
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roseinfer.config import EngineConfig
    from roseinfer.distributed.ranks import Ranks

# A language-model head that is wider than its vocabulary, where that is faster.


_PADDED_MULTIPLE = 64
"""Alignment of the number of outputs of a padded head."""
_ALIGNED_OUTPUTS = 8
"""Outputs of two bytes that fill 16 bytes.

Where rows of logits are not aligned to that, GEMMs fall back to kernels several times slower.
"""


class PaddedHead(torch.nn.Module):
    """A head that computes more outputs than the model has tokens, and returns the model's."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self._outputs = head.out_features
        more = -self._outputs % _PADDED_MULTIPLE
        self._weight = pad(head.weight.detach(), (0, 0, 0, more))
        self._bias = None if head.bias is None else pad(head.bias.detach(), (0, more))
        # The head's parameters, and an embedding that is tied to it, stay in the same memory.
        head.weight.data = self._weight[: self._outputs]
        if self._bias is not None:
            head.bias.data = self._bias[: self._outputs]

    @property
    def weight(self) -> torch.Tensor:
        """Weight without the padding, as fused kernels take it."""
        return self._weight[: self._outputs]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)[..., : self._outputs]


def pad_head(model: Any) -> None:
    """Give a transformers model a padded head if its vocabulary size is not aligned."""
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and head.out_features % _ALIGNED_OUTPUTS:
        model.set_output_embeddings(PaddedHead(head))


_LOG = logging.getLogger(__name__)
_CACHE_MEMORY_FRACTION = 0.85
"""Share of a GPU's free memory for the cache; activations need the rest."""
_MAX_CPU_CACHE_BYTES = 2 << 30
"""Bytes of a cache in main memory, without a configured size."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The parts that an engine is built from."""

    model: CausalModel
    kv: KVBlockManager
    tokenizer: Any
    """Tokenizer; None for a checkpoint without one, whose prompts are token ids."""
    eos_token_ids: frozenset[int]
    weights: Mapping[str, torch.nn.Parameter]
    """Parameters of the transformers model by name; the memory that kernels read is theirs."""


def load(
    model: Any,
    config: EngineConfig,
    *,
    device: str | None = None,
    dtype: str | None = None,
    tokenizer: Any = None,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load ``model``: ``"tiny"``, a directory, a GGUF file, a hub id, or a loaded model.

    It may also be a function that makes a model on the device it gets. With ``ranks``, only the
    shard of this rank stays on its device.
    """
    target = ranks.device if ranks else resolve_device(device)
    load_dtype = resolve_dtype(dtype, target)
    _check_device_support(config, target)
    if not isinstance(tokenizer, (PreTrainedTokenizerBase, NoneType)):
        raise ConfigError(
            f"tokenizer must be a tokenizer of transformers or None, not {tokenizer!r}: load one "
            "by AutoTokenizer.from_pretrained"
        )
    if isinstance(model, (FunctionType, partial)):
        model = model(target)
    network: Any = model
    if isinstance(model, (str, os.PathLike)):
        network, tokenizer = _load_network(os.fspath(model), target, load_dtype, tokenizer, ranks)
    elif isinstance(model, PreTrainedModel):
        if ranks:
            build_device = network.device if network.device == target else "cpu"
            shard(network.to(build_device, load_dtype if dtype else None), ranks)
        network = network.to(target, load_dtype if dtype else None)
    else:
        raise ConfigError(
            f"{model!r} is not a model: it must be 'tiny', a directory, a GGUF file, a hub id, "
            "or a transformers model that is loaded already, or a function that makes one on a "
            "device"
        )
    weights = dict(network.named_parameters(remove_duplicate=False))
    try:
        causal = _build_model(network, config, ranks)
    except UnsupportedModel as error:
        if network.get_output_embeddings() is not None:
            raise
        raise UnsupportedModel(
            f"{type(network).__name__} has no language-model head: load the model by "
            "AutoModelForCausalLM"
        ) from error
    if ranks:
        warn_of_small_model(causal, ranks)
    # Kernels may have replaced some, and a padded head has no parameters.
    weights.update(network.named_parameters(remove_duplicate=False))
    end_tokens = _eos_token_ids(network, tokenizer)
    return LoadedModel(causal, _build_cache(causal, config), tokenizer, end_tokens, weights)


_MIN_SHARED_WEIGHTS = 3_000_000_000
"""Between 1 billion weights, which two GPUs compute more slowly than one, and 8 billion."""


def warn_of_small_model(causal: CausalModel, ranks: Ranks) -> None:
    """Warn, once for all ranks, of a model that one GPU would compute faster than several."""
    weights = causal.num_weights * ranks.size
    if ranks.rank == 0 and ranks.device.type == "cuda" and weights < _MIN_SHARED_WEIGHTS:
        _LOG.warning(
            "tensor_parallel_size=%d: %d GPUs are hardly faster than one with a model of %.1f "
            "billion weights, and slower with its prompts: leave it at 1",
            ranks.size,
            ranks.size,
            weights / 1e9,
        )


def replace_weights(
    weights: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]
) -> None:
    """Copy values into weights of these names: all of them, or none."""
    for name, value in values.items():
        if name not in weights:
            raise BadArgument(f"the model has no weight {name!r}{did_you_mean(name, weights)}")
        shape = list(weights[name].shape)
        if not isinstance(value, torch.Tensor) or list(value.shape) != shape:
            given = list(value.shape) if isinstance(value, torch.Tensor) else short_repr(value)
            raise BadArgument(f"the weight {name!r} must be a tensor of shape {shape}, not {given}")
    with torch.no_grad():
        for name, value in values.items():
            weights[name].copy_(value)


def _check_device_support(config: EngineConfig, device: torch.device) -> None:
    """Raise if an option needs something that cannot run on the device."""
    backend = config.attention_backend
    option = "paged_attention=True" if config.paged_attention else f"attention_backend={backend!r}"
    if backend is not None and (reason := find_backend(backend).unusable_reason(device)):
        raise ConfigError(f"{option}: {reason}")
    if config.fused_model and (reason := unusable_reason(device)):
        raise ConfigError(f"fused_model=True: {reason}")
    if config.cuda_graph and device.type != "cuda":
        raise ConfigError(f"cuda_graph=True: {device.type} has no CUDA graphs")


def _build_model(network: Any, config: EngineConfig, ranks: Ranks | None) -> CausalModel:
    """Run the model on fused kernels if there are some for it, else on its own modules."""
    if config.is_enabled("fused_model", network.device.type) and (family := fused_family(network)):
        if config.compile_layers:
            raise ConfigError(
                f"compile_layers: {type(network).__name__} runs on fused kernels, which "
                "leave nothing to compile: leave it off, or set fused_model=False too"
            )
        fused = family(network, max_length=config.max_length, ranks=ranks)
        if ranks and config.is_enabled("exchange", ranks.device.type):
            _open_all_reduce(fused, config, ranks)
        if matches_modules(fused):
            _decide_batch_invariance(fused, config)
            return fused
        _report_kernel_mismatch(network, config)
    joined = _joined_model(network, config, ranks)
    reason = (
        f"{type(network).__name__} runs on {'joined weights' if joined else 'its own modules'} "
        "here, whose GEMMs are rounded by the batch size: use a model with fused kernels, on a GPU"
    )
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant=True: {reason}")
    if config.is_enabled("pad_head", network.device.type) and ranks is None:
        pad_head(network)
    causal = joined or CausalModel(network, max_length=config.max_length, ranks=ranks)
    if isinstance(network.get_output_embeddings(), PaddedHead):
        causal.paths += (EnginePath.PADDED_LM_HEAD,)
    _record_batch_variance(causal, config, reason)
    if config.compile_layers:
        compile_layers(network)
        causal.paths += (EnginePath.COMPILED,)
    return causal


def _joined_model(network: Any, config: EngineConfig, ranks: Ranks | None) -> CausalModel | None:
    """Run the model on few torch operations on a CPU, if its family is known and nothing is chosen.

    Return None if it is not, or if the model's own modules compute something else.
    """
    chosen = config.fused_model is not None or config.compile_layers or ranks is not None
    if chosen or network.device.type != "cpu" or not JoinedLlama.is_supported(network):
        return None
    joined = JoinedLlama(network, max_length=config.max_length)
    return joined if matches_modules(joined) else None


def _open_all_reduce(fused: CausalModel, config: EngineConfig, ranks: Ranks) -> None:
    """Let a model's kernels all-reduce themselves, where the ranks share memory."""
    fused.exchange = open_exchange(ranks, fused.config.hidden_size, fused.dtype)
    if fused.exchange is None:
        reason = "ranks cannot write to each other's memory here"
        if config.exchange:
            raise ConfigError(f"exchange=True: {reason}")
        _LOG.warning("%s: they all-reduce by messages, which takes longer", reason)


def _decide_batch_invariance(fused: CausalModel, config: EngineConfig) -> None:
    """Make a model on fused kernels batch invariant, if that is wanted and possible."""
    if config.batch_invariant is False:
        _record_batch_variance(fused, config, "batch_invariant=False was chosen")
        return
    reason = ""
    if fused.device.type != "cuda" or fused.dtype is torch.float32:
        reason = "the kernels have one order of additions only on a GPU, in float16 or bfloat16"
    elif config.attention_backend not in (None, "triton"):
        reason = f"attention_backend={config.attention_backend!r} has no fixed order of additions"
    else:
        fused.batch_invariant = True
        config = config.for_model(fused.device.type, fused.num_weights)
        max_rows = config.max_prompt_tokens + config.max_batch_size
        if is_batch_invariant(fused, max_rows):
            return
        fused.batch_invariant = False
        reason = "torch's GEMMs are rounded by the batch size on this GPU"
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant=True: {reason}")
    _record_batch_variance(fused, config, reason)


def _record_batch_variance(model: CausalModel, config: EngineConfig, reason: str) -> None:
    """Record why a model is not batch invariant; log it on a GPU, where it could be."""
    model.batch_variance_reason = reason
    if model.device.type == "cuda" and config.batch_invariant is None:
        _LOG.warning("%s: it is not batch invariant: %s", type(model).__name__, reason)


def _report_kernel_mismatch(network: Any, config: EngineConfig) -> None:
    """Report why a model runs on its own modules, though its class has fused kernels."""
    reason = (
        f"the fused kernels for {type(network).__name__} differ from its modules, as they do "
        "where modules were replaced or wrapped"
    )
    if config.fused_model:
        raise ConfigError(f"fused_model=True: {reason}")
    _LOG.warning("%s: it runs on its modules", reason)


def resolve_device(name: str | None) -> torch.device:
    if name is not None:
        require_device(str(name))
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch sees no GPU here; device='cpu' works")
    if (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise ConfigError(f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def rank_device(name: str | None, rank: int, size: int) -> torch.device:
    """Return the device of a rank: on GPUs, each has one of its own."""
    device = resolve_device(name)
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ConfigError(f"device {name!r}: with tensor_parallel_size={size} it must be 'cuda'")
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size={size}: this machine has {torch.cuda.device_count()} GPUs"
        )
    return torch.device("cuda", rank)


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype | str:
    """Return the configured dtype, or else the checkpoint's on a GPU and fp32 on a CPU."""
    if name is None:
        return "auto" if device.type == "cuda" else torch.float32
    require_dtype(name)
    dtype: torch.dtype = getattr(torch, name)
    if dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(f"{torch.cuda.get_device_name(device)} lacks bfloat16: use float16")
    return dtype


def _load_network(
    name: str,
    device: torch.device,
    dtype: torch.dtype | str,
    tokenizer: Any,
    ranks: Ranks | None,
) -> tuple[Any, Any]:
    if name == "tiny":
        tiny = tiny_gpt2()
        network = tiny.model
        tokenizer = tiny.tokenizer if tokenizer is None else tokenizer
        dtype = torch.float32 if isinstance(dtype, str) else dtype
        network = network.to(dtype)
    else:
        name = locate(name)
        with read_header_once(name):
            network = load_checkpoint(name, dtype)
            tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
    if ranks:
        shard(network, ranks)
    try:
        network = network.to(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the model's weights do not fit on {device}: {error}") from error
    return network, tokenizer


def _eos_token_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """Return the eos tokens by the model's configs and its tokenizer."""
    ends: set[int] = set()
    for source in (getattr(network, "generation_config", None), network.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        token_ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if any(isinstance(token, bool) or not isinstance(token, int) for token in token_ids):
            raise UnsupportedModel(
                f"eos_token_id of the {type(source).__name__} is {value!r}: it must be a token id "
                "or a list of them"
            )
        ends.update(token_ids)
    return frozenset(ends)


def _layer_windows(model: CausalModel, config: EngineConfig) -> list[int | None] | None:
    """Return each layer's window, or None where windows do not matter to the cache.

    With block lists for every layer, which are for inspection, no blocks are freed early.
    """
    windows = [layer.window for layer in model.traits]
    return windows if any(windows) and not config.per_layer_kv else None


def _build_cache(model: CausalModel, config: EngineConfig) -> KVBlockManager:
    shape, device = model.shape, model.device
    windows = _layer_windows(model, config)
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
    room = _MAX_CPU_CACHE_BYTES
    if device.type == "cuda":
        room = int(torch.cuda.mem_get_info(device)[0] * _CACHE_MEMORY_FRACTION)
    max_tokens = min(config.max_batch_size * shape.max_length, room // token_bytes)
    tokens = config.kv_cache_tokens or max_tokens
    blocks = -(-tokens // config.block_size)
    if model.ranks:
        blocks = model.ranks.all_reduce_min(blocks)
    if blocks < 1:
        raise ConfigError(
            f"{device} has no memory left for a KV cache: use a smaller model or dtype"
        )
    lists = len(group_layers_by_window(windows)) if windows else 1
    try:
        return KVBlockManager(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            config.block_size,
            blocks * lists + 1,  # one is scratch
            device,
            model.dtype,
            config.policy_for(device.type),
            layers_per_group=None if config.per_layer_kv or windows else shape.num_layers,
            windows=windows,
        )
    except BadArgument as error:
        cache_bytes = (blocks + 1) * config.block_size * token_bytes
        small = config.block_size <= tokens
        fewer = f"set {'fewer kv_cache_tokens' if small else 'a smaller block_size'}"
        raise ConfigError(
            f"a KV cache of {blocks + 1} blocks of block_size={config.block_size} tokens takes "
            f"{cache_bytes / 2**30:.1f} GiB, which {device} does not have: {fewer}"
        ) from error
