"""Models with experts whose layers are Llama's in all else: Mixtral, Qwen3's and OLMoE."""

from __future__ import annotations

from typing import Any

from roseinfer.models.families import register
from roseinfer.models.families.llama import FusedLlama, fits_but_for_mlps


@register("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")
class FusedMixtral(FusedLlama):
    """Runs a forward pass in 10 kernels a layer, attention among them."""

    whole_steps = 0

    @staticmethod
    def fits(model: Any) -> bool:
        """Return True for a model without unusual settings, in 16 bits if on a GPU."""
        return fits_but_for_mlps(model) and not getattr(model.config, "clip_qkv", None)
