"""Models with experts whose layers are Llama's in all else: Mixtral, Qwen3's and OLMoE."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.models.causal import CausalModel
from roseinfer.models.families import register
from roseinfer.models.families.llama import FusedLlama, fits_but_for_mlps
from roseinfer.models.families.mlps import Experts, noting_experts

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend


@register("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")
class FusedMixtral(FusedLlama):
    """Runs a forward pass in 10 kernels a layer, attention among them."""

    whole_steps = 0

    @staticmethod
    def fits(model: Any) -> bool:
        """Return True for a model without unusual settings, in 16 bits if on a GPU."""
        return fits_but_for_mlps(model) and not getattr(model.config, "clip_qkv", None)

    def logits_in_two_ways(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Have the modules send each token where the kernels send it, weighed as it is there.

        Rounding decides near ties between experts, and from there on all is another. What the
        modules hold for much less likely is no near tie.
        """
        with noting_experts() as noted:
            ours = self.logits(token_ids, positions, None, attention)
        wrong: list[Tensor] = []
        with ExitStack() as stack:
            chosen = iter(noted)
            for own, layer in zip(self._layers, self._model.model.layers, strict=True):
                if isinstance(own.mlp, Experts):
                    send = partial(_send, *next(chosen), wrong)
                    stack.callback(layer.mlp.gate.register_forward_hook(send).remove)
            logits = CausalModel.logits(self, token_ids, positions, None, attention)
        if wrong and torch.stack(wrong).any():
            logits = torch.full_like(logits, torch.inf)
        return ours, logits


def _send(
    experts: Tensor,
    weights: Tensor,
    wrong: list[Tensor],
    router: Any,  # noqa: ARG001
    given: Any,  # noqa: ARG001
    found: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these experts in place of those that a router has found.

    It is noted whether the router holds others for likelier, or weighs these otherwise.
    """
    logits, own_weights, own = found
    at = experts.long()
    rounded = torch.finfo(logits.dtype).eps ** 0.5
    near = rounded * logits.abs().max()
    least = logits.gather(1, own).min(-1, keepdim=True).values
    wrong.append((least - logits.gather(1, at) > near).any())
    likely = logits.float().softmax(-1)
    times = own_weights.float().sum(-1, keepdim=True) / likely.gather(1, own).sum(-1, keepdim=True)
    want = likely.gather(1, at) * times
    wrong.append(((weights.float() - want).abs() > near.float().expm1() * want + rounded).any())
    return logits, weights.to(own_weights.dtype), at
