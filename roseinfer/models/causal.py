"""Any transformers causal LM, run on the paged cache through its attention interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.errors import UnsupportedModel
from roseinfer.models.trial import Trial

if TYPE_CHECKING:
    from roseinfer.engine_paths import EnginePath
    from roseinfer.models.interface import Attention


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cache and the engine need to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    """Positions the model was made for."""


class CausalModel:
    """A transformers model that keeps its keys and values in our cache."""

    paths: tuple[EnginePath, ...] = ()
    """What a forward pass counts as, where it does not run on the model's modules as they are."""

    def __init__(self, model: Any, *, max_length: int | None = None) -> None:
        """Take over ``model``: its attention is ours from here on."""
        name = type(model).__name__
        try:
            config = model.config.get_text_config()
            _refuse_other_attention(model, config, name)
            self.shape = _shape(config, max_length)
        except UnsupportedModel:
            raise
        except Exception as error:  # of any kind, since configs refuse to answer in many ways
            raise UnsupportedModel(f"{name} does not say what shape it has: {error}") from error
        self._model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        Trial(model, self.shape, self._logits_of_each).check()

    def _logits_of_each(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: Attention
    ) -> torch.Tensor:
        """By the model's own modules, of whose kernels a trial is none."""
        return CausalModel.logits(self, token_ids, positions, None, batch)

    @torch.inference_mode()
    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        last_rows: torch.Tensor | None,
        batch: Attention,
    ) -> torch.Tensor:
        """Run all tokens in one row; return ``[sequences, vocab]`` for each one's last token.

        ``last_rows`` says which those are; None where every sequence has one token.
        """
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if last_rows is None else last_rows,
            roseinfer_batch=batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _shape(text: Any, max_length: int | None) -> ModelShape:
    heads = text.num_attention_heads
    made_for = int(text.max_position_embeddings)
    if max_length is not None and max_length > made_for:
        raise UnsupportedModel(f"max_length={max_length}: the model has {made_for} positions")
    if min(text.num_hidden_layers, heads, text.vocab_size, made_for) < 1:
        raise UnsupportedModel(
            f"a model of {text.num_hidden_layers} layers, {heads} heads, {text.vocab_size} tokens "
            f"and {made_for} positions: each must be at least 1"
        )
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_length=max_length or made_for,
    )


_CHANGES_ATTENTION = {
    "alibi": "ALiBi positions",
    "attn_logit_softcapping": "soft-capped attention",
    "attn_temperature_tuning": "queries scaled by their place in a step",
    "indexer": "attention to what an index picks",
    "reorder_and_upcast_attn": "reordered attention",
    "sinks": "attention sinks",
}
"""Settings of a model, and attributes of its attention, that ours does not compute. A trial shows
what a model asks of its attention by masks and arguments; these it may ask only of a long text."""


def _refuse_other_attention(model: Any, config: Any, name: str) -> None:
    """Raise for attention this engine would compute wrongly, naming it."""
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not use transformers' attention interface")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model")
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if any(getattr(module, "is_causal", None) is False for module in attentions):
        raise UnsupportedModel(f"{name} attends to what comes later too, which is not supported")
    for setting, meaning in _CHANGES_ATTENTION.items():
        for told in (config, *attentions):
            if _asks(getattr(told, setting, None)):
                raise UnsupportedModel(f"{name} uses {meaning} ({setting}), which is not supported")


def _asks(value: object) -> bool:
    return value is not None and value is not False
