"""Any transformers causal LM, run on the paged cache through its attention interface."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from roseinfer.errors import ConfigError, UnsupportedModel
from roseinfer.models.attention_patches import CURRENT_ATTENTION, set_attention
from roseinfer.models.load_checks import AttentionTrial
from roseinfer.models.shape import read_model_shape
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from roseinfer.attention.backend import Attention, AttentionBackend
    from roseinfer.distributed.ranks import Ranks
    from roseinfer.kernels.triton.all_reduce import AllReduceBuffers

ATTENTION_NAME = "roseinfer_paged"
_IGNORED_ARGUMENTS = frozenset(
    {
        "cache_position",
        "deterministic",  # only matters to gradients
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",  # queries and keys are rotated already
        "position_ids",
        "roseinfer_slopes",  # the trial records what patches pass
        "roseinfer_window",
        "return_dict",
        "s_aux",  # the trial records the sinks
        "sliding_window",  # the trial checks the masks, which have the same windows
        "softcap",  # the trial records it
        "use_cache",
    }
)
"""Arguments that do not change the engine's attention."""


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
    passed = {name for name, setting in kwargs.items() if setting is not None}
    unsupported = passed - _IGNORED_ARGUMENTS
    if attention_mask is not None:
        unsupported.add("a mask")
    if is_causal is False:
        unsupported.add("is_causal=False")
    if dropout:
        unsupported.add(f"dropout={dropout}")
    attention = CURRENT_ATTENTION.get()
    if attention is None:
        raise UnsupportedModel(
            f"the model of this {type(module).__name__} belongs to an engine, which runs it now: "
            "load it once more to run it without the engine"
        )
    if unsupported:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {', '.join(sorted(unsupported))} to its attention, "
            "which is not supported"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention.store_and_attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, attend)


class CausalModel:
    """A transformers model that stores its keys and values in the paged cache."""

    paths: tuple[EnginePath, ...] = ()
    batch_invariant: bool = False
    """True if a token gets the same bits whatever else is in the batch."""
    batch_variance_reason: str | None = None
    """Reason, in words, why the model is not batch invariant; None where it is."""
    exchange: AllReduceBuffers | None = None
    """Buffers for kernels that all-reduce rows over ranks; None without shared memory for them."""
    max_megakernel_tokens: int = 0
    """Longest sequence, in tokens, whose decode steps run in the megakernel; 0 without one."""

    def __init__(
        self, model: Any, *, max_length: int | None = None, ranks: Ranks | None = None
    ) -> None:
        """Take over ``model`` and try it: its attention is the engine's from here on.

        With ``ranks``, ``model`` is the shard of this rank.
        """
        self.ranks = ranks
        name = type(model).__name__
        try:
            config = model.config.get_text_config()
            _check_attention_settings(model, config, name)
            self.shape = read_model_shape(config, name, max_length)
        except UnsupportedModel:
            raise
        except Exception as error:  # of any kind, since configs can lack anything
            reason = str(error).partition(". ")[0]
            raise UnsupportedModel(
                f"{name} has no readable shape in its config: {reason}"
            ) from error
        self.config = config
        """Text part of the model's config."""
        self._model = model.eval()
        self.num_weights: int = sum(weight.numel() for weight in model.parameters())
        """Number of weights, each once; with ranks, of this rank's shard."""
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        # The trial runs the model's own modules, even where fused kernels replace them.
        self.traits = AttentionTrial(model, self.shape, self._forward, attend).layer_traits()
        set_attention(model, ATTENTION_NAME)

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        last_rows: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Run all tokens in one row; return ``[sequences, vocab]`` logits of the last tokens.

        ``last_rows`` are the indices of the last tokens; None where every sequence has one token.
        """
        return self._forward(
            attention,
            input_ids=token_ids[None],
            position_ids=positions[None],
            logits_to_keep=0 if last_rows is None else last_rows,
        )

    @property
    def network(self) -> Any:
        """The transformers model, whose modules run where no kernels replace them."""
        return self._model

    def fused_and_module_logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of each token, by this model and by its own modules."""
        inputs = token_ids, positions, None, attention
        return self.logits(*inputs), CausalModel.logits(self, *inputs)

    def _last_layer_rows(
        self, layer: int, last_rows: torch.Tensor | None, attention: AttentionBackend
    ) -> torch.Tensor | None:
        """Return the rows that a layer must attend from; None where it attends from all.

        The last layer only needs each sequence's final row; keys and values of all rows are stored.
        """
        last = layer + 1 == self.shape.num_layers
        return last_rows if last and attention.can_attend_last_tokens(last_rows) else None

    def all_reduce_for(self, rows: int, attention: AttentionBackend) -> AllReduceBuffers | None:
        """Return the all-reduce buffers for a forward pass of ``rows`` rows, and count the pass."""
        if self.exchange is None or rows > self.exchange.max_rows:
            return None
        attention.path_counts[EnginePath.FUSED_ALL_REDUCE] += 1
        return self.exchange

    def reduce_parts(self, parts: torch.Tensor, exchange: AllReduceBuffers | None) -> torch.Tensor:
        """Add up the partial results of a GEMM on all ranks.

        With all-reduce buffers this is left to the kernel that reads them. It adds up in the same
        order, and rounds each rank's sum too.
        """
        if self.ranks is None or exchange is not None:
            return parts
        return self.ranks.all_reduce(reduce(torch.add, parts)[None].to(self.dtype))

    @torch.inference_mode()
    def _forward(self, attention: Attention, **inputs: Any) -> torch.Tensor:
        """Run the model's own modules with an attention; return the logits."""
        before = CURRENT_ATTENTION.set(attention)
        try:
            logits: torch.Tensor = self._model(**inputs, use_cache=False).logits[0]
        finally:
            CURRENT_ATTENTION.reset(before)
        return logits


def compile_layers(model: Any) -> None:
    """Fuse the operations between the GEMMs of a layer and its attention.

    Layers are compiled one by one, for any number of tokens, and share the code: the work is that
    of one layer. The engine's attention is left out.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"compile_layers: transformers does not say which of {type(model).__name__}'s modules "
            "are its layers: leave it off"
        )
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True)


_UNSUPPORTED_SETTINGS = {
    "attn_temperature_tuning": "queries scaled by their position in a step",
    "indexer": "attention to the tokens that an index selects",
    "reorder_and_upcast_attn": "reordered attention",
}
"""Settings of a model, and attributes of its attention, that the engine does not compute.

The trial may miss them, since some models only use them in long sequences.
"""


def _check_attention_settings(model: Any, config: Any, name: str) -> None:
    """Raise for attention that this engine would compute wrongly."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model")
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if any(getattr(module, "is_causal", None) is False for module in attentions):
        raise UnsupportedModel(f"{name} attends to later tokens too, which is not supported")
    for setting, meaning in _UNSUPPORTED_SETTINGS.items():
        for holder in (config, *attentions):
            value = getattr(holder, setting, None)
            if value is not None and value is not False:
                raise UnsupportedModel(f"{name} uses {meaning} ({setting}), which is not supported")
