"""Trial of a model on a few tokens when it is loaded, for properties that the engine needs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from roseinfer.attention.reference import attend
from roseinfer.attention.reference import attend as attend_by_reference
from roseinfer.errors import RanksFailed, UnsupportedModel
from roseinfer.layer_traits import LayerTraits
from roseinfer.models.attention_patches import (
    CURRENT_ATTENTION,
    apply_patches,
    remove_patches,
    set_attention,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.models.shape import ModelShape

# Unpatched attention, which is compared with the engine's.


_NAME_PREFIX = "roseinfer_"
"""Prefix of the names of the engine's attention functions, those of trials included."""


@dataclass(frozen=True, slots=True)
class UnpatchedCall:
    """A call of a module without its attention patch."""

    module: Any
    inputs: tuple[Any, ...]
    named_inputs: dict[str, Any]
    output: Tensor

    @torch.inference_mode()
    def recompute(self, traits: Sequence[LayerTraits]) -> Tensor:
        """Return the output of the module with the reference for its attention."""
        before = CURRENT_ATTENTION.set(_ReferenceAttention(traits))
        try:
            output: Tensor = self.module(*self.inputs, **self.named_inputs)[0]
        finally:
            CURRENT_ATTENTION.reset(before)
        return output


@dataclass(frozen=True, slots=True)
class _ReferenceAttention:
    """Attention in a sequence without stored tokens."""

    traits: Sequence[LayerTraits]

    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key.transpose(0, 1), value.transpose(0, 1), self.traits[layer])


@torch.inference_mode()
def record_unpatched_calls(network: Any, tokens: Tensor) -> list[UnpatchedCall]:
    """Run the network without patches; return all calls of modules that have one.

    The patches are applied afterwards. A network whose attention is the engine's already is run as
    transformers would have loaded it.
    """
    opened = apply_patches(network)
    if not opened:
        return []
    remove_patches(opened)
    calls: list[UnpatchedCall] = []

    def note(module: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        calls.append(UnpatchedCall(module, inputs, named, output[0]))

    inner = [module for module in opened if not isinstance(module, PreTrainedModel)]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in inner]
    if network.config._attn_implementation.startswith(_NAME_PREFIX):
        network.config._attn_implementation = network.get_correct_attn_implementation(None)
    try:
        network(input_ids=tokens[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        apply_patches(network)
    return calls


if TYPE_CHECKING:
    RunNetwork = Callable[..., torch.Tensor]
    """A run of the network with an attention and named inputs; returns the logits."""
    MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """A mask of batch, head, and the positions of a query and a key: True where they attend."""


_TRIAL = "roseinfer_trial"
"""Name of an attention that records its inputs. Transformers makes no masks for it."""
_MASKED_TRIAL = "roseinfer_masked_trial"
"""Name of the same attention with masks of transformers, so that these can be checked."""
_DEFAULT_SHORT_LENGTH = 16
"""Short length in tokens, where a config does not give the lengths its rotation calls short."""
_MIDDLE = slice(1, 2)
_ALIBI_TOLERANCE = 2**-7
"""Tolerance of ALiBi: Falcon rounds it to bfloat16, whatever its own dtype; ours is not rounded."""


@dataclass(slots=True)
class _RecordedAttention:
    """An attention that returns zeros and records its inputs."""

    layers: list[int] = field(default_factory=list)
    key_shapes: list[tuple[int, ...]] = field(default_factory=list)
    traits: list[LayerTraits] = field(default_factory=list)
    """Traits by layer. Windows among them come from patches; elsewhere the masks have them."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Queries, keys and values of every layer, and the logits: ``[tokens, ...]`` each."""
    masks: dict[int, tuple[MaskFunction, str]] = field(default_factory=dict)
    """Masks by layer, of the layers that got one, with the class name of the layer's module."""

    def store_and_attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.key_shapes.append(tuple(key.shape))
        self.tensors += query, key, value
        return torch.zeros_like(query)

    def agrees(self, other: _RecordedAttention, row: slice = slice(None)) -> bool:
        """Return True if both recorded the same, but for rounding."""
        scales, others = ([layer.scale for layer in each.traits] for each in (self, other))
        return (self.layers, scales) == (other.layers, others) and all(
            is_close(one[row], another[row])
            for one, another in zip(self.tensors, other.tensors, strict=True)
        )


def is_close(one: torch.Tensor, other: torch.Tensor, min_tolerance: float = 0.0) -> bool:
    """Return True if the tensors are equal but for rounding; NaN equals anything."""
    tolerance: float = max(torch.finfo(one.dtype).eps ** 0.5, min_tolerance)
    largest, difference = one.nan_to_num().abs().max(), (one - other).nan_to_num().abs().max()
    return bool(difference <= tolerance * largest)


_ROUNDING_TRIALS = 4
_MAX_TIMES_ROUNDING = 2.0
"""Largest difference that counts as rounding, as a multiple of what the trials change."""
_MAX_SHARE_OF_ROUNDING = 0.25
"""Largest part of the logits that rounding may change where a difference can still be judged."""


@torch.inference_mode()
def differ_by_rounding(
    logits: torch.Tensor, expected: torch.Tensor, network: Any, run: Callable[[], torch.Tensor]
) -> bool:
    """Return True if the logits are those expected of a network, but for rounding.

    Trained models in 16 bits amplify rounding, some of them several thousand times, and most where
    little comes before a token. So what counts is what rounding does to the network itself:
    ``run`` runs it, with its embeddings rounded up and down at random. Right computations of
    SmolLM2 differ by 0.8 to 1.1 times as much.
    """
    rounding = []
    for seed in range(_ROUNDING_TRIALS):
        embeddings = network.get_input_embeddings()
        hook = embeddings.register_forward_hook(partial(_round_up_or_down, seed))
        try:
            rounding.append(_root_mean_square(run() - expected))
        finally:
            hook.remove()
    by_rounding = torch.stack(rounding).square().mean().sqrt()
    most = torch.minimum(
        _MAX_TIMES_ROUNDING * by_rounding, _MAX_SHARE_OF_ROUNDING * _root_mean_square(expected)
    )
    return bool(_root_mean_square(logits - expected) <= most)


def _round_up_or_down(seed: int, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Change each number by about its last bit, in a direction that is drawn."""
    directions = torch.randint(2, output.shape, generator=torch.Generator().manual_seed(seed))
    steps = torch.finfo(output.dtype).eps * (2 * directions.to(output.device) - 1)
    return (output * (1 + steps)).to(output.dtype)


def _root_mean_square(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.nan_to_num().float().square().mean().sqrt()


def _record_and_attend(
    attend: Callable[..., tuple[torch.Tensor, None]],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Record the mask and the traits, and attend as the engine does."""
    recorded = CURRENT_ATTENTION.get()
    if not isinstance(recorded, _RecordedAttention):
        return attend(module, query, key, value, attention_mask, scaling, **kwargs)
    if value.shape != key.shape:
        raise UnsupportedModel(
            f"{type(module).__name__} has values of {value.shape[1]} heads of {value.shape[3]} "
            f"and keys of {key.shape[1]} of {key.shape[3]}, which is not supported"
        )
    sinks = kwargs.get("s_aux")
    slopes = kwargs.get("roseinfer_slopes")
    traits = LayerTraits(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("roseinfer_window"),
        softcap=kwargs.get("softcap"),
        sinks=None if sinks is None else sinks.detach(),
        slopes=None if slopes is None else torch.tensor(slopes, device=query.device),
    )
    mask: MaskFunction | None = getattr(attention_mask, "roseinfer_mask", None)
    if mask is not None:
        recorded.masks[len(recorded.traits)] = mask, type(module).__name__
        attention_mask = None
        _check_eager_attention(module, query, key, value, traits, kwargs)
    recorded.traits.append(traits)
    return attend(module, query, key, value, attention_mask, scaling, **kwargs)


def _check_eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    traits: LayerTraits,
    options: dict[str, Any],
) -> None:
    """Raise unless the model's eager eager attention, if it has one, equals the engine's."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        return
    # In float32: half precision resolves large scores so badly that both may be right.
    query, key, value = query.float(), key.float(), value.float()
    tokens = query.shape[2]
    hidden = torch.full((tokens, tokens), torch.finfo(query.dtype).min, device=query.device)
    mask = hidden.triu(1)[None, None]
    expected = eager(module, query, key, value, mask, scaling=traits.scale, **options)[0][0]
    actual = attend_by_reference(query[0].transpose(0, 1), key[0], value[0], traits)
    if not is_close(actual, expected.view(actual.shape)):
        raise _mismatch_error(module, traits)


def _check_unpatched_calls(calls: Sequence[UnpatchedCall], traits: Sequence[LayerTraits]) -> None:
    """Raise unless each unpatched call agrees with the engine's attention."""
    for call in calls:
        if not is_close(call.output, call.recompute(traits), _ALIBI_TOLERANCE):
            raise _mismatch_error(call.module, traits[call.module.layer_idx])


def _mismatch_error(module: torch.nn.Module, traits: LayerTraits) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(module).__name__} does not compute attention with "
        f"{', '.join(sorted(traits.trait_names))}, which is not supported"
    )


def _placeholder_mask(*, mask_function: MaskFunction, device: Any = None, **_: Any) -> torch.Tensor:
    """Return a placeholder that carries the function which would fill the real mask."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.roseinfer_mask = mask_function  # type: ignore[attr-defined]
    return mask


AttentionMaskInterface.register(_MASKED_TRIAL, _placeholder_mask)


def _window_from_mask(
    name: str, mask: MaskFunction, length: int, device: torch.device
) -> int | None:
    """Return the number of tokens that a token sees; None where it sees all before it.

    Raise unless these are the token itself and the last ones before it, for every token.
    """
    at = torch.arange(length, device=device)
    none = at[0]

    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask(none, none, query, key).expand(length)

    window = int(sees(at, none).int().argmin()) or length
    if not sees(at, at).all():
        raise UnsupportedModel(
            f"{name} does not attend to the token itself, which is not supported"
        )
    if mask(none, none, none, at[1:]).any():
        raise UnsupportedModel(f"{name} attends to later tokens too, which is not supported")
    furthest, next_one = (at - window + 1).clamp(min=0), (at - window).clamp(min=0)
    attends_further = sees(at, next_one) & (at >= window)
    if not sees(at, furthest).all() or attends_further.any():
        raise UnsupportedModel(
            f"{name} attends in chunks of {window} tokens, or skips some of those before, which is "
            f"not supported: with max_length={window} or less it attends to them all"
        )
    if not torch.equal(sees(at[-1], at), at > at[-1] - window):
        raise UnsupportedModel(f"{name} skips some of the tokens before, which is not supported")
    return window if window < length else None


class AttentionTrial:
    """Runs of a model on a few tokens in several ways, which must all compute the same."""

    def __init__(
        self,
        network: Any,
        shape: ModelShape,
        run: RunNetwork,
        attend: Callable[..., tuple[torch.Tensor, None]],
    ) -> None:
        """``attend`` is the engine's attention as transformers calls it."""
        for name in (_TRIAL, _MASKED_TRIAL):
            AttentionInterface.register(name, partial(_record_and_attend, attend))
        self._network = network
        self._shape = shape
        self._forward = run
        self._name = type(network).__name__
        self._no_interface_reason = f"{self._name} does not use transformers' attention interface"
        self._config = network.config.get_text_config()
        self._tokens = torch.tensor(trial_tokens(self._config, shape), device=network.device)

    def layer_traits(self) -> list[LayerTraits]:
        """Return the traits of every layer's attention.

        Raise unless each layer attends once, in the order and shape that the cache expects, and a
        token is computed as in the network's own forward pass, whatever else is in the step. The
        network keeps the attention of the trial.
        """
        try:
            unpatched_calls = record_unpatched_calls(self._network, self._tokens)
            if not set_attention(self._network, _MASKED_TRIAL):
                raise UnsupportedModel(self._no_interface_reason)
            plain = self._run(self._tokens)
            set_attention(self._network, _TRIAL)
            self._check_layers(plain)
            _check_unpatched_calls(unpatched_calls, plain.traits)
            self._check_batch_independence()
            # This comes last, to see what the others changed in the network, and is backwards,
            # since the row of a token in a step does not depend on its position.
            reversed_run = self._run(self._tokens.flip(0), [*reversed(range(len(self._tokens)))])
        except (UnsupportedModel, RanksFailed):
            raise
        except Exception as error:  # of any kind, since models may need other inputs
            raise UnsupportedModel(
                f"{self._name} cannot be run on a few tokens: {error}"
            ) from error
        plain.tensors = [tensor.flip(0) for tensor in plain.tensors]
        if not reversed_run.agrees(plain):
            raise UnsupportedModel(
                f"{self._name} does not count positions from 0 where it counts them itself, "
                "which is not supported"
            )
        windows: dict[MaskFunction, int | None] = {}
        for mask, name in plain.masks.values():
            if mask not in windows:
                max_length, device = self._shape.max_length, self._network.device
                windows[mask] = _window_from_mask(name, mask, max_length, device)
        of_layer = {layer: windows[mask] for layer, (mask, _) in plain.masks.items()}
        return [
            replace(traits, window=of_layer.get(layer, self._effective_window(traits.window)))
            for layer, traits in enumerate(plain.traits)
        ]

    def _effective_window(self, window: int | None) -> int | None:
        """Return the window, or None where the longest sequence fits into it."""
        return window if window and window < self._shape.max_length else None

    def _check_layers(self, recorded: _RecordedAttention) -> None:
        """Refuse models that store tokens elsewhere too, and would mix up the sequences."""
        shape = self._shape
        keys = (len(self._tokens), shape.num_kv_heads, shape.head_dim)
        if not recorded.layers:
            raise UnsupportedModel(self._no_interface_reason)
        if recorded.layers != [*range(shape.num_layers)] or {*recorded.key_shapes} != {keys}:
            raise UnsupportedModel(
                f"{self._name} is not supported: {shape.num_layers} layers should attend once "
                f"each, with {shape.num_kv_heads} KV heads of {shape.head_dim}, and the layers "
                f"that did are {recorded.layers}, with keys of "
                f"{sorted({key[1:] for key in recorded.key_shapes})}"
            )

    def _check_batch_independence(self) -> None:
        """Refuse models that mix neighbours, or rotate all tokens for the longest request."""
        kind, short = _rope_scaling(self._config)
        max_length = self._shape.max_length
        at = min(short or _DEFAULT_SHORT_LENGTH, max_length) // 2
        single = self._run_between(at, at)
        if single.agrees(self._run_between(at, max_length - 1), _MIDDLE):
            return
        if (
            short
            and short < max_length
            and single.agrees(self._run_between(at, short - 1), _MIDDLE)
        ):
            raise UnsupportedModel(
                f"{self._name} rotates all requests of a step as the longest of them needs it "
                f"({kind}), which is not supported: with max_length={short} or less all need the "
                "same"
            )
        raise UnsupportedModel(
            f"{self._name} computes a token differently for other tokens in its step, which is "
            "not supported"
        )

    def _run_between(self, position: int, neighbour_position: int) -> _RecordedAttention:
        """Run a token at a position, between two others.

        Where the others have higher positions, they change places, so that the token has other
        neighbours too. The tokens are always the same, so that rounding is.
        """
        first, token, last = self._tokens[[0, -1, len(self._tokens) // 2]]
        if position != neighbour_position:
            first, last = last, first
        return self._run(
            torch.stack((first, token, last)), [neighbour_position, position, neighbour_position]
        )

    def _run(self, tokens: torch.Tensor, positions: list[int] | None = None) -> _RecordedAttention:
        """Run tokens at positions, or with positions that the network counts itself."""
        recorded = _RecordedAttention()
        inputs: dict[str, Any] = {"input_ids": tokens[None]}
        if positions is not None:
            at = torch.tensor(positions, device=tokens.device)
            inputs |= {"position_ids": at[None], "logits_to_keep": 0}
        recorded.tensors.append(self._forward(recorded, **inputs))
        return recorded


def trial_tokens(config: Any, shape: ModelShape) -> list[int]:
    """Return up to four tokens, with the padding token, which a model may not count, amid them."""
    pad = getattr(config, "pad_token_id", None)
    other_tokens = [token for token in range(min(5, shape.vocab_size)) if token != pad] or [0]
    tokens = [other_tokens[at % len(other_tokens)] for at in range(min(4, shape.max_length))]
    if len(tokens) > 2 and pad is not None and 0 <= pad < shape.vocab_size:
        tokens[2] = pad
    return tokens


def _rope_scaling(config: Any) -> tuple[str, int | None]:
    """Return the rotary scaling's name, and the length of the longest short sequence."""
    parameters = getattr(config, "rope_parameters", None) or {}
    scalings = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    lengths = [scaling.get("original_max_position_embeddings") for scaling in scalings]
    kinds = {scaling.get("rope_type") for scaling in scalings}
    return ", ".join(sorted(map(str, kinds))), min(filter(None, lengths), default=None)
