"""Any transformers causal LM, run on the paged cache through its attention interface."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from roseinfer.errors import ConfigError, UnsupportedModel
from roseinfer.models.attention_patches import RUNNING, use_attention
from roseinfer.models.checks import Trial
from roseinfer.models.shape import shape_of
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from roseinfer.attention.backend import Attention, AttentionBackend
    from roseinfer.distributed.ranks import Ranks
    from roseinfer.kernels.exchange import Exchange

ATTENTION = "roseinfer_paged"
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",  # matters to gradients alone
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",  # queries and keys are rotated already
        "position_ids",
        "roseinfer_slopes",  # the trial notes what doors ask for
        "roseinfer_window",
        "return_dict",
        "s_aux",  # the trial notes the sinks
        "sliding_window",  # the trial looks at the masks, which say the same
        "softcap",  # the trial notes it
        "use_cache",
    }
)
"""Arguments that do not change what attention computes for the engine."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,  # noqa: ARG001  (the trial notes it)
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer; transformers calls this with ``[1, heads, tokens, head_dim]`` each."""
    asked = {name for name, asks in kwargs.items() if asks is not None} - _HARMLESS
    if attention_mask is not None:
        asked.add("a mask")
    if is_causal is False:
        asked.add("is_causal=False")
    if dropout:
        asked.add(f"dropout={dropout}")
    attention = RUNNING.get()
    if attention is None:
        raise UnsupportedModel(
            f"the model of this {type(module).__name__} belongs to an engine, which was made of it "
            "and computes it now: load it once more to compute it without"
        )
    if asked:
        raise UnsupportedModel(
            f"{type(module).__name__} asks its attention for {', '.join(sorted(asked))}, which is "
            "not supported"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention.attend_new(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return out[None], None


AttentionInterface.register(ATTENTION, attend)


class CausalModel:
    """A transformers model that keeps its keys and values in our cache."""

    paths: tuple[EnginePath, ...] = ()
    batch_invariant: bool = False
    """What a token gets has the same bits whatever else is in the batch."""
    why_batch_variant: str | None = None
    """The reason, in words, why that does not hold; None where it does."""
    exchange: Exchange | None = None
    """What kernels add up rows over ranks through, where there is memory for that."""
    whole_steps: int = 0
    """Steps of one sequence of up to so many tokens are one kernel, where there is one for them."""

    def __init__(
        self, model: Any, *, max_length: int | None = None, ranks: Ranks | None = None
    ) -> None:
        """Take over ``model``, and try it: its attention is ours from here on.

        With ``ranks`` it is this one's shard.
        """
        self.ranks = ranks
        name = type(model).__name__
        try:
            config = model.config.get_text_config()
            _refuse_other_attention(model, config, name)
            self.shape = shape_of(config, name, max_length)
        except UnsupportedModel:
            raise
        except Exception as error:  # of any kind, since configs can lack anything
            why = str(error).partition(". ")[0]
            raise UnsupportedModel(f"{name} does not say what shape it has: {why}") from error
        self.config = config
        """The part of the model's config that is about text."""
        self._model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        # The trial runs the model's own modules, even where fused kernels replace them.
        self.traits = Trial(model, self.shape, self._forward, attend).layer_traits()
        use_attention(model, ATTENTION)

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        last_rows: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Run all tokens in one row, and return ``[sequences, vocab]`` of their last tokens.

        ``last_rows`` are the indices of the last tokens; None where every sequence has one token.
        """
        return self._forward(
            attention,
            input_ids=token_ids[None],
            position_ids=positions[None],
            logits_to_keep=0 if last_rows is None else last_rows,
        )

    def logits_in_two_ways(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits behind each token, and the same by the model's own modules."""
        given = token_ids, positions, None, attention
        return self.logits(*given), CausalModel.logits(self, *given)

    def _ends(
        self, layer: int, last_rows: torch.Tensor | None, attention: AttentionBackend
    ) -> torch.Tensor | None:
        """Return the rows from which alone a layer attends, or None where it does from all.

        Of the last layer nobody asks for other rows, and all of its keys and values are stored.
        """
        last = layer + 1 == self.shape.num_layers
        return last_rows if last and attention.ends_alone(last_rows) else None

    def exchange_of(self, rows: int, attention: AttentionBackend) -> Exchange | None:
        """Return what a forward pass of so many rows adds up over ranks through, and count that."""
        if self.exchange is None or rows > self.exchange.most_rows:
            return None
        attention.path_counts[EnginePath.EXCHANGED] += 1
        return self.exchange

    def added_up(self, parts: torch.Tensor, exchange: Exchange | None) -> torch.Tensor:
        """Add up the parts of a product on all ranks, to a single part.

        With an exchange this is left to the kernel that takes them, which adds up in this order
        and rounds what a rank has too.
        """
        if self.ranks is None or exchange is not None:
            return parts
        return self.ranks.add_up(reduce(torch.add, parts)[None].to(self.dtype))

    @torch.inference_mode()
    def _forward(self, attention: Attention, **inputs: Any) -> torch.Tensor:
        """Run the model's own modules with an attention, and return the logits."""
        before = RUNNING.set(attention)
        try:
            logits: torch.Tensor = self._model(**inputs, use_cache=False).logits[0]
        finally:
            RUNNING.reset(before)
        return logits


def compile_layers(model: Any) -> None:
    """Fuse what lies between the matrix products of a layer and its attention.

    Layers are compiled one by one, for any number of tokens, and share the code: the work is that
    of one layer. Our attention is left out.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"compile_layers: transformers does not say which of {type(model).__name__}'s modules "
            "are its layers: leave it off"
        )
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True)


_CHANGES_ATTENTION = {
    "attn_temperature_tuning": "queries scaled by their place in a step",
    "indexer": "attention to what an index picks",
    "reorder_and_upcast_attn": "reordered attention",
}
"""Settings of a model, and attributes of its attention, that ours does not compute. The trial may
not show them, since some models ask for them only in a long text."""


def _refuse_other_attention(model: Any, config: Any, name: str) -> None:
    """Raise for attention that this engine would compute wrongly."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model")
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if any(getattr(module, "is_causal", None) is False for module in attentions):
        raise UnsupportedModel(f"{name} attends to what comes later too, which is not supported")
    for setting, meaning in _CHANGES_ATTENTION.items():
        for told in (config, *attentions):
            value = getattr(told, setting, None)
            if value is not None and value is not False:
                raise UnsupportedModel(f"{name} uses {meaning} ({setting}), which is not supported")
