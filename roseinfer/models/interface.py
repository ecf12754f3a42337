"""Our attention, as transformers' models call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface

from roseinfer.errors import UnsupportedModel

if TYPE_CHECKING:
    from typing import Protocol

    import torch

    class Attention(Protocol):
        """Where a forward pass keeps keys and values, and what it attends to."""

        def attend_new(
            self,
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scale: float,
        ) -> torch.Tensor:
            """``[tokens, heads, head_dim]`` each: store the new, attend to all."""


ATTENTION = "roseinfer_paged"
"""Our attention's name in transformers' interface."""
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",  # how flash attention computes its gradients
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",  # by which queries and keys were rotated already
        "position_ids",
        "return_dict",
        "sliding_window",  # masks say the same, and are looked at when the model is tried
        "use_cache",
    }
)
"""Arguments that change nothing of what attention computes for the engine."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    roseinfer_batch: Attention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: ``[1, heads, tokens, head_dim]`` each."""
    asked = {name for name, asks in kwargs.items() if asks is not None} - _HARMLESS
    if attention_mask is not None:
        asked.add("a mask")
    if is_causal is False:
        asked.add("is_causal=False")
    if dropout:
        asked.add(f"dropout={dropout}")
    if asked or roseinfer_batch is None:
        raise UnsupportedModel(
            f"{type(module).__name__} asks its attention for "
            f"{', '.join(sorted(asked)) or 'what runs outside the engine'}, which is not supported"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = roseinfer_batch.attend_new(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
    )
    return out[None], None


AttentionInterface.register(ATTENTION, attend)
