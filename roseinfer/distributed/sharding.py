"""Cuts a model's weights so that every rank has its share of the heads.

What is cut by outputs is followed by what is cut by inputs, whose results all ranks add up. The
plan says which module is which: transformers' own, or one here where it has none or keeps whole
what could be shared.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from roseinfer.errors import RanksFailed, UnsupportedModel
from roseinfer.models.checks import alike, trial_tokens
from roseinfer.models.shape import shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roseinfer.distributed.ranks import Ranks

_OUTPUTS, _INPUTS, _HEAD, _JOINED = "colwise", "rowwise", "colwise_gather_output", "joined"
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of what stays whole. The last is for embeddings: every rank looks tokens up itself."""
_EVEN = 8
"""A shard of the head has a multiple of so many outputs, whose rows begin where products like."""
_PHI3 = {
    "model.layers.*.self_attn.qkv_proj": _JOINED,
    "model.layers.*.self_attn.o_proj": _INPUTS,
    "model.layers.*.mlp.gate_up_proj": _JOINED,
    "model.layers.*.mlp.down_proj": _INPUTS,
    "lm_head": _HEAD,
}
_GPT2 = {
    "transformer.h.*.attn.c_attn": _JOINED,
    "transformer.h.*.attn.c_proj": _INPUTS,
    "transformer.h.*.mlp.c_fc": _OUTPUTS,
    "transformer.h.*.mlp.c_proj": _INPUTS,
    "lm_head": _HEAD,
}
_OWN_PLANS = {"GPT2LMHeadModel": _GPT2, "Phi3ForCausalLM": _PHI3}

_COUNTED = {"num_heads", "num_key_value_heads", "split_size"}
"""What some attentions count once, when they are made, to cut their inputs by."""


class InputShard(nn.Module):
    """The share of a linear layer that has some of its inputs; all ranks add up their results."""

    def __init__(self, layer: Any, ranks: Ranks) -> None:
        super().__init__()
        self._turned = isinstance(layer, Conv1D)
        self._ranks = ranks
        self.weight = _own_part(layer.weight, 0 if self._turned else 1, ranks)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        out = self._ranks.add_up(x @ (self.weight if self._turned else self.weight.T))
        return out if self.bias is None else out + self.bias


class HeadShard(nn.Module):
    """The share of a head that computes the logits of some tokens; all ranks get all of them."""

    def __init__(self, head: Any, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._tokens = head.weight.shape[0]
        width = -(-self._tokens // (ranks.size * _EVEN)) * _EVEN
        begin = width * ranks.rank
        self.weight = _padded(head.weight, begin, width)
        self.bias = None if head.bias is None else _padded(head.bias, begin, width)

    def forward(self, x: Tensor) -> Tensor:
        own = nn.functional.linear(x, self.weight, self.bias)
        return self.whole(own.flatten(0, -2)).view(*x.shape[:-1], -1)

    def whole(self, own: Tensor) -> Tensor:
        """Return all logits, ``[rows, tokens]``, of which this rank has computed its own."""
        return self._ranks.gather(own)[:, : self._tokens]


def shard(model: Any, ranks: Ranks) -> None:
    """Bring this rank's share of a model to its device, and see that all together compute the same.

    Where the device has room for the whole model, it is cut there and not in main memory.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    shape = shape_of(config, name, None)
    for kind, heads in (
        ("attention heads", config.num_attention_heads),
        ("heads of keys and values", shape.num_kv_heads),
    ):
        if heads % ranks.size:
            raise UnsupportedModel(
                f"tensor_parallel_size={ranks.size}: {name} has {heads} {kind}, which do not divide"
            )
    plan = _plan(model, ranks.size)
    if _has_room(ranks.device, model):
        model.to(ranks.device)
    tokens = torch.tensor([trial_tokens(config, shape)], device=model.device)
    before = _logits(model, tokens)
    with torch.no_grad():
        _cut(model, plan, ranks, shape.num_kv_heads * shape.head_dim)
    config.head_dim = shape.head_dim
    config.num_attention_heads //= ranks.size
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads //= ranks.size
    model.to(ranks.device)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # what the whole model took, the KV cache may have
    try:
        after = _logits(model, tokens.to(ranks.device))
    except RanksFailed:
        raise
    except RuntimeError as error:
        raise UnsupportedModel(
            f"tensor_parallel_size={ranks.size}: {name} cannot be run in shares: {error}"
        ) from error
    if not alike(before, after.to(before.device)):
        raise UnsupportedModel(
            f"tensor_parallel_size={ranks.size}: in shares, {name} computes something else than "
            "in one piece"
        )


def _has_room(device: torch.device, model: Any) -> bool:
    """Tell if a GPU has room for a model and for a share of it beside that."""
    if device.type != "cuda":
        return False
    size = sum(weight.nbytes for weight in model.parameters())
    return bool(torch.cuda.mem_get_info(device)[0] > 2 * size)


@torch.inference_mode()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _plan(model: Any, size: int) -> Mapping[str, str]:
    """Return how each module is cut, by its name with stars for numbers.

    Embeddings are left out, since they stay whole whatever transformers plans: its 5.17 cuts those
    that are tied to a head, and its 5.23 has plans of a few models that name them. A head that was
    tied to one has rows of its own once it is cut.
    """
    name = type(model).__name__
    if name in _OWN_PLANS:
        return _OWN_PLANS[name]
    of_base = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    plan = {f"{model.base_model_prefix}.{key}": style for key, style in of_base.items()}
    plan |= getattr(type(model), "_tp_plan", None) or {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            plan.pop(_starred(path), None)
    unknown = sorted(set(plan.values()) - {_OUTPUTS, _INPUTS, _HEAD, *_WHOLE})
    if not of_base or unknown:
        how = f"one that is not supported ({', '.join(unknown)})" if unknown else "none"
        raise UnsupportedModel(
            f"tensor_parallel_size={size}: of plans to share {name}, transformers has {how}"
        )
    return plan


def _cut(model: Any, plan: Mapping[str, str], ranks: Ranks, kv_width: int) -> None:
    for path, module in [*model.named_modules()]:
        style = plan.get(_starred(path))
        if style == _OUTPUTS:
            _keep_outputs(module, [_outputs(module)], ranks)
        elif style == _JOINED:
            _keep_outputs(module, _joined_widths(path, module, kv_width), ranks)
        elif style in (_INPUTS, _HEAD):
            parent = model.get_submodule(path.rpartition(".")[0])
            kind = InputShard if style == _INPUTS else HeadShard
            setattr(parent, path.rpartition(".")[2], kind(module, ranks))
        if hasattr(module, "layer_idx"):
            for counted in _COUNTED & vars(module).keys():
                setattr(module, counted, getattr(module, counted) // ranks.size)


def _starred(path: str) -> str:
    """Return a module's name as plans have it."""
    return re.sub(r"\d+", "*", path)


def _joined_widths(path: str, module: Any, kv_width: int) -> list[int]:
    """Return how many outputs each of the layers has that are joined in one."""
    outputs = _outputs(module)
    if path.endswith("gate_up_proj"):
        return [outputs // 2] * 2
    return [outputs - 2 * kv_width, kv_width, kv_width]


def _outputs(layer: Any) -> int:
    return int(layer.weight.shape[1 if isinstance(layer, Conv1D) else 0])


def _keep_outputs(layer: Any, widths: Sequence[int], ranks: Ranks) -> None:
    """Leave a linear layer its share of the outputs, of each of those that are joined in it."""
    axis = 1 if isinstance(layer, Conv1D) else 0
    parts = [_own(part, axis, ranks) for part in layer.weight.detach().split(widths, axis)]
    layer.weight = _fixed(torch.cat(parts, axis))
    if layer.bias is not None:
        biases = layer.bias.detach().split(widths)
        layer.bias = _fixed(torch.cat([_own(each, 0, ranks) for each in biases]))
    if axis:
        layer.nf = layer.weight.shape[1]
    else:
        layer.out_features = layer.weight.shape[0]


def _own(weight: Tensor, axis: int, ranks: Ranks) -> Tensor:
    """Return this rank's share of a tensor."""
    width = weight.shape[axis]
    if width % ranks.size:
        raise UnsupportedModel(
            f"tensor_parallel_size={ranks.size}: a layer has {width} outputs or inputs to share, "
            "which do not divide"
        )
    return weight.narrow(axis, ranks.rank * (width // ranks.size), width // ranks.size)


def _own_part(weight: Tensor, axis: int, ranks: Ranks) -> nn.Parameter:
    return _fixed(_own(weight.detach(), axis, ranks).clone())


def _padded(weight: Tensor, begin: int, width: int) -> nn.Parameter:
    """Return rows of a tensor from one on, with zeros where it has no more."""
    own = weight.new_zeros(width, *weight.shape[1:])
    kept = weight.detach()[begin : begin + width]
    own[: len(kept)] = kept
    return _fixed(own)


def _fixed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.contiguous(), requires_grad=False)
