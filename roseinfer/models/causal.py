"""Any transformers causal LM, run on the paged cache through its attention interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from roseinfer.errors import UnsupportedModel

if TYPE_CHECKING:
    from typing import Protocol

    from roseinfer.engine_paths import EnginePath

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
_CHANGES_ATTENTION = ("softcap", "s_aux", "head_mask")
"""Arguments a model hands to its attention that ours would ignore."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    roseinfer_batch: Attention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: ``[1, heads, tokens, head_dim]`` each."""
    asked = [name for name in _CHANGES_ATTENTION if kwargs.get(name) is not None]
    if asked or roseinfer_batch is None or attention_mask is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} asks its attention for "
            f"{', '.join(asked) or 'a mask, or runs outside the engine'}, which is not supported"
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


class _Tried:
    """Attention that notes what it is asked for, and attends to nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def attend_new(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,  # noqa: ARG002
    ) -> torch.Tensor:
        if value.shape != key.shape:
            raise UnsupportedModel(f"values of {list(value.shape)} beside keys {list(key.shape)}")
        self.seen.append((layer, *key.shape))
        return torch.zeros_like(query)


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
        _refuse_other_attention(model)
        self.shape = _shape(model.config, max_length)
        _refuse_sliding_window(model, self.shape)
        model.set_attn_implementation(ATTENTION)
        self._model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._try_it()

    def _try_it(self) -> None:
        """Raise for a model whose layers do not each attend once, to keys of one shape: some
        keep what they remember elsewhere, and would mix up the sequences of a batch."""
        tried = _Tried()
        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        name = type(self._model).__name__
        try:
            CausalModel.logits(self, tokens, torch.arange(2, device=self.device), None, tried)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedModel(f"{name} cannot be run two tokens at a time: {error}") from error
        shape = self.shape
        want = [(layer, 2, shape.num_kv_heads, shape.head_dim) for layer in range(shape.num_layers)]
        if tried.seen != want:
            raise UnsupportedModel(
                f"{name} is not supported: {shape.num_layers} layers should attend once each, with "
                f"{shape.num_kv_heads} KV heads of {shape.head_dim}, and the layers that did are "
                f"{[layer for layer, *_ in tried.seen]}, with keys of "
                f"{sorted({tuple(key) for _, *key in tried.seen})}"
            )

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


def fetch(path: str, dtype: torch.dtype | str) -> Any:
    """A transformers model from a local directory or a hub id, with all of its weights.

    Safetensors only, never remote code.
    """
    if _looks_like_a_path(path) and not Path(path).is_dir():
        raise UnsupportedModel(f"{path!r} cannot be loaded: there is no such directory")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # of any kind, since transformers believes what a config says
        raise UnsupportedModel(f"{path!r} cannot be loaded: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(
            f"the checkpoint {path!r} lacks {len(missing)} weights, {missing[0]} among them: "
            "transformers would make them up"
        )
    return model


def _looks_like_a_path(name: str) -> bool:
    """No hub id begins so, or has more than two parts."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _shape(config: Any, max_length: int | None) -> ModelShape:
    text = config.get_text_config()
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


def _refuse_other_attention(model: Any) -> None:
    """Raise for attention this engine would compute wrongly, naming it."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not use transformers' attention interface")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model")
    attentions = (module for module in model.modules() if hasattr(module, "layer_idx"))
    if any(getattr(module, "is_causal", None) is False for module in attentions):
        raise UnsupportedModel(f"{name} attends to what comes later too, which is not supported")
    for setting, meaning in (
        ("attn_logit_softcapping", "soft-capped attention"),
        ("attention_chunk_size", "chunked attention"),
        ("alibi", "ALiBi positions"),
        ("reorder_and_upcast_attn", "reordered attention"),
    ):
        if getattr(config, setting, None):
            raise UnsupportedModel(f"{name} uses {meaning} ({setting}), which is not supported")


def _refuse_sliding_window(model: Any, shape: ModelShape) -> None:
    """Raise if some layer forgets tokens within the positions that may be used."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or []
    slides = not layers or any(kind != "full_attention" for kind in layers)
    if window and slides and window < shape.max_length:
        raise UnsupportedModel(
            f"{type(model).__name__} attends to a sliding window of {window} tokens, which is not "
            f"supported: with max_length={window} or less it never slides"
        )
