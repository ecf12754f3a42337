"""Sharding: cuts a model's weights so that every rank has its share of the heads.

A column-parallel layer, cut by outputs, is followed by a row-parallel one, cut by inputs, whose
results all ranks add up. The plan gives each module's style: transformers' own plan, or one here if
it has none or keeps modules whole that can be sharded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from roseinfer.errors import RanksFailed, UnsupportedModel
from roseinfer.models.load_checks import differ_by_rounding, is_close, trial_tokens
from roseinfer.models.shape import read_model_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roseinfer.distributed.ranks import Ranks

_COLUMN_PARALLEL, _ROW_PARALLEL, _HEAD, _FUSED_COLUMN_PARALLEL = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "joined",
)
_REPLICATED_STYLES = {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of modules that stay whole. The last is for embeddings: every rank has all of them."""
_HEAD_ALIGNMENT = 8
"""Divisor of the outputs of a shard of the head, so that its rows are aligned for GEMMs."""
_PHI3 = {
    "model.layers.*.self_attn.qkv_proj": _FUSED_COLUMN_PARALLEL,
    "model.layers.*.self_attn.o_proj": _ROW_PARALLEL,
    "model.layers.*.mlp.gate_up_proj": _FUSED_COLUMN_PARALLEL,
    "model.layers.*.mlp.down_proj": _ROW_PARALLEL,
    "lm_head": _HEAD,
}
_GPT2 = {
    "transformer.h.*.attn.c_attn": _FUSED_COLUMN_PARALLEL,
    "transformer.h.*.attn.c_proj": _ROW_PARALLEL,
    "transformer.h.*.mlp.c_fc": _COLUMN_PARALLEL,
    "transformer.h.*.mlp.c_proj": _ROW_PARALLEL,
    "lm_head": _HEAD,
}
_OWN_PLANS = {"GPT2LMHeadModel": _GPT2, "Phi3ForCausalLM": _PHI3}

_COUNTED = {"num_heads", "num_key_value_heads", "split_size"}
"""Attributes for head counts or widths that some attention modules store when built."""


class RowParallelLinear(nn.Module):
    """A share of a linear layer with some of its inputs; an all-reduce adds up the results."""

    def __init__(self, layer: Any, ranks: Ranks) -> None:
        super().__init__()
        self._is_transposed = isinstance(layer, Conv1D)
        self._ranks = ranks
        self.weight = _local_shard_parameter(layer.weight, 0 if self._is_transposed else 1, ranks)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        out = self._ranks.all_reduce(x @ (self.weight if self._is_transposed else self.weight.T))
        return out if self.bias is None else out + self.bias


class VocabParallelHead(nn.Module):
    """A share of the head with the logits of some tokens; an all-gather gives all ranks all."""

    def __init__(self, head: Any, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._tokens = head.weight.shape[0]
        width = -(-self._tokens // (ranks.size * _HEAD_ALIGNMENT)) * _HEAD_ALIGNMENT
        begin = width * ranks.rank
        self.weight = _pad_rows(head.weight, begin, width)
        self.bias = None if head.bias is None else _pad_rows(head.bias, begin, width)

    def forward(self, x: Tensor) -> Tensor:
        local = nn.functional.linear(x, self.weight, self.bias)
        return self.gather_logits(local.flatten(0, -2)).view(*x.shape[:-1], -1)

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        """Gather the logits that each rank has computed, into ``[rows, tokens]``."""
        return self._ranks.all_gather(local_logits)[:, : self._tokens]


def shard(model: Any, ranks: Ranks) -> None:
    """Cut a model to this rank's share, on its device, and check that its logits stay the same.

    If the device has enough memory for the whole model, it is cut there, not in main memory.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    shape = read_model_shape(config, name, None)
    for kind, heads in (
        ("attention heads", config.num_attention_heads),
        ("key-value heads", shape.num_kv_heads),
    ):
        if heads % ranks.size:
            raise UnsupportedModel(
                f"tensor_parallel_size={ranks.size}: it must divide the {heads} {kind} of {name}"
            )
    plan = _plan(model, ranks.size)
    if _has_room(ranks.device, model):
        model.to(ranks.device)
    tokens = torch.tensor([trial_tokens(config, shape)], device=model.device)
    before = _logits(model, tokens)
    with torch.no_grad():
        _shard_modules(model, plan, ranks, shape.num_kv_heads * shape.head_dim)
    config.head_dim = shape.head_dim
    config.num_attention_heads //= ranks.size
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads //= ranks.size
    model.to(ranks.device)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the memory of the whole model for the KV cache
    tokens = tokens.to(ranks.device)
    try:
        after = _logits(model, tokens)
        before = before.to(after.device)
        same = is_close(before, after) or differ_by_rounding(
            before, after, model, lambda: _logits(model, tokens)
        )
    except RanksFailed:
        raise
    except RuntimeError as error:
        raise UnsupportedModel(
            f"tensor_parallel_size={ranks.size}: {name} cannot be run sharded: {error}"
        ) from error
    if not same:
        raise UnsupportedModel(
            f"tensor_parallel_size={ranks.size}: the sharded {name} computes other logits than "
            "the whole one"
        )


def _has_room(device: torch.device, model: Any) -> bool:
    """Return True if a GPU has enough memory for a model and a share of it together."""
    if device.type != "cuda":
        return False
    size = sum(weight.nbytes for weight in model.parameters())
    return bool(torch.cuda.mem_get_info(device)[0] > 2 * size)


@torch.inference_mode()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _plan(model: Any, size: int) -> Mapping[str, str]:
    """Return the style of each module that is cut, by its name with stars for numbers.

    Embeddings are left out, since they stay whole whatever transformers plans: version 5.17 cuts
    those that are tied to a head, and in 5.23 the plans of a few models name them. A head that was
    tied to an embedding has its own rows once it is cut.
    """
    name = type(model).__name__
    if name in _OWN_PLANS:
        return _OWN_PLANS[name]
    of_base = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    plan = {f"{model.base_model_prefix}.{key}": style for key, style in of_base.items()}
    plan |= getattr(type(model), "_tp_plan", None) or {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            plan.pop(_plan_name(path), None)
    unknown = sorted(
        set(plan.values()) - {_COLUMN_PARALLEL, _ROW_PARALLEL, _HEAD, *_REPLICATED_STYLES}
    )
    if not of_base or unknown:
        how = f"an unsupported plan ({', '.join(unknown)})" if unknown else "no plan"
        raise UnsupportedModel(f"tensor_parallel_size={size}: transformers has {how} for {name}")
    return plan


def _shard_modules(model: Any, plan: Mapping[str, str], ranks: Ranks, kv_width: int) -> None:
    for path, module in [*model.named_modules()]:
        style = plan.get(_plan_name(path))
        if style == _COLUMN_PARALLEL:
            _keep_outputs(module, [_outputs(module)], ranks)
        elif style == _FUSED_COLUMN_PARALLEL:
            _keep_outputs(module, _joined_widths(path, module, kv_width), ranks)
        elif style in (_ROW_PARALLEL, _HEAD):
            parent = model.get_submodule(path.rpartition(".")[0])
            kind = RowParallelLinear if style == _ROW_PARALLEL else VocabParallelHead
            setattr(parent, path.rpartition(".")[2], kind(module, ranks))
        if hasattr(module, "layer_idx"):
            for counted in _COUNTED & vars(module).keys():
                setattr(module, counted, getattr(module, counted) // ranks.size)


def _plan_name(path: str) -> str:
    """Return a module's name in the form of plans, with stars for numbers."""
    return re.sub(r"\d+", "*", path)


def _joined_widths(path: str, module: Any, kv_width: int) -> list[int]:
    """Return the number of outputs of each layer in a fused one."""
    outputs = _outputs(module)
    if path.endswith("gate_up_proj"):
        return [outputs // 2] * 2
    return [outputs - 2 * kv_width, kv_width, kv_width]


def _outputs(layer: Any) -> int:
    return int(layer.weight.shape[1 if isinstance(layer, Conv1D) else 0])


def _keep_outputs(layer: Any, widths: Sequence[int], ranks: Ranks) -> None:
    """Cut a linear layer to its share of the outputs, of each layer that is fused in it."""
    axis = 1 if isinstance(layer, Conv1D) else 0
    parts = [_local_shard(part, axis, ranks) for part in layer.weight.detach().split(widths, axis)]
    layer.weight = _frozen_parameter(torch.cat(parts, axis))
    if layer.bias is not None:
        biases = layer.bias.detach().split(widths)
        layer.bias = _frozen_parameter(torch.cat([_local_shard(each, 0, ranks) for each in biases]))
    if axis:
        layer.nf = layer.weight.shape[1]
    else:
        layer.out_features = layer.weight.shape[0]


def _local_shard(weight: Tensor, axis: int, ranks: Ranks) -> Tensor:
    """Return this rank's share of a tensor."""
    width = weight.shape[axis]
    if width % ranks.size:
        raise UnsupportedModel(
            f"tensor_parallel_size={ranks.size}: it must divide the {width} outputs or inputs of "
            "a layer"
        )
    return weight.narrow(axis, ranks.rank * (width // ranks.size), width // ranks.size)


def _local_shard_parameter(weight: Tensor, axis: int, ranks: Ranks) -> nn.Parameter:
    return _frozen_parameter(_local_shard(weight.detach(), axis, ranks).clone())


def _pad_rows(weight: Tensor, begin: int, width: int) -> nn.Parameter:
    """Return ``width`` rows of a tensor from ``begin`` on, padded with zeros."""
    padded = weight.new_zeros(width, *weight.shape[1:])
    shard = weight.detach()[begin : begin + width]
    padded[: len(shard)] = shard
    return _frozen_parameter(padded)


def _frozen_parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.contiguous(), requires_grad=False)
