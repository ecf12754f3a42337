"""Tries a model on a few tokens when it is loaded: what the engine relies on must hold."""

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
from roseinfer.models.attention_patches import RUNNING, close_doors, open_doors, use_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.models.shape import ModelShape

# What attention that has a door computes by itself, to be compared with what we make of it.


_OURS = "roseinfer_"
"""How the names of our attention begin, that of trials included."""


@dataclass(frozen=True, slots=True)
class OwnCall:
    """A call of a module whose doors were closed."""

    module: Any
    inputs: tuple[Any, ...]
    named_inputs: dict[str, Any]
    output: Tensor

    @torch.inference_mode()
    def again(self, traits: Sequence[LayerTraits]) -> Tensor:
        """Return what the module computes with the reference for its attention."""
        before = RUNNING.set(_Reference(traits))
        try:
            output: Tensor = self.module(*self.inputs, **self.named_inputs)[0]
        finally:
            RUNNING.reset(before)
        return output


@dataclass(frozen=True, slots=True)
class _Reference:
    """Attends in a sequence of which nothing is stored before."""

    traits: Sequence[LayerTraits]

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key.transpose(0, 1), value.transpose(0, 1), self.traits[layer])


@torch.inference_mode()
def own_calls(network: Any, tokens: Tensor) -> list[OwnCall]:
    """Run the network with closed doors, and return all calls of attention that has one.

    The doors are open afterwards. A network that attends by ours already is run as transformers
    would have loaded it.
    """
    opened = open_doors(network)
    if not opened:
        return []
    close_doors(opened)
    calls: list[OwnCall] = []

    def note(module: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        calls.append(OwnCall(module, inputs, named, output[0]))

    inner = [module for module in opened if not isinstance(module, PreTrainedModel)]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in inner]
    if network.config._attn_implementation.startswith(_OURS):
        network.config._attn_implementation = network.get_correct_attn_implementation(None)
    try:
        network(input_ids=tokens[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        open_doors(network)
    return calls


if TYPE_CHECKING:
    Run = Callable[..., torch.Tensor]


if TYPE_CHECKING:
    "Runs the network with an attention on named inputs, and returns the logits."


if TYPE_CHECKING:
    Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


if TYPE_CHECKING:
    "Given batch, head, and the positions of a query and a key: whether the one sees the other."


_TRIAL = "roseinfer_trial"
"""The name of an attention that notes what it gets. Transformers makes no masks for it."""
_MASKED_TRIAL = "roseinfer_masked_trial"
"""The same under a name for which transformers makes masks, so that these can be checked."""
_SHORT = 16
"""A short length, where a config does not say which lengths its rotation counts as short."""
_MIDDLE = slice(1, 2)
_ALIBI_ROUNDED_TO = 2**-7
"""Falcon rounds what ALiBi takes off to bfloat16, whatever its own dtype; ours is not rounded."""


@dataclass(slots=True)
class _Noted:
    """An attention that attends to nothing and notes what it gets."""

    layers: list[int] = field(default_factory=list)
    key_shapes: list[tuple[int, ...]] = field(default_factory=list)
    traits: list[LayerTraits] = field(default_factory=list)
    """The windows among them are those of doors: elsewhere the masks say them."""
    handed: list[torch.Tensor] = field(default_factory=list)
    """Queries, keys and values of every layer, and the logits: ``[tokens, ...]`` each."""
    masks: dict[int, tuple[Mask, str]] = field(default_factory=dict)
    """The mask that a layer was handed, where it was, with the class of its module."""

    def attend_new(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.key_shapes.append(tuple(key.shape))
        self.handed += query, key, value
        return torch.zeros_like(query)

    def agrees(self, other: _Noted, row: slice = slice(None)) -> bool:
        """Return True if both got the same, but for rounding."""
        scales, others = ([layer.scale for layer in each.traits] for each in (self, other))
        return (self.layers, scales) == (other.layers, others) and all(
            alike(one[row], another[row])
            for one, another in zip(self.handed, other.handed, strict=True)
        )


def alike(one: torch.Tensor, other: torch.Tensor, rounded_to: float = 0.0) -> bool:
    """Return True if they are equal but for rounding; NaN equals anything."""
    tolerance: float = max(torch.finfo(one.dtype).eps ** 0.5, rounded_to)
    largest, apart = one.nan_to_num().abs().max(), (one - other).nan_to_num().abs().max()
    return bool(apart <= tolerance * largest)


def _attend_noted(
    attend: Callable[..., tuple[torch.Tensor, None]],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Note the mask and the traits, and attend as the engine does."""
    noted = RUNNING.get()
    if not isinstance(noted, _Noted):
        return attend(module, query, key, value, attention_mask, scaling, **kwargs)
    if value.shape != key.shape:
        raise UnsupportedModel(
            f"{type(module).__name__} has values of {value.shape[1]} heads of {value.shape[3]} "
            f"beside keys of {key.shape[1]} of {key.shape[3]}, which is not supported"
        )
    sinks = kwargs.get("s_aux")
    slopes = kwargs.get("roseinfer_slopes")
    traits = LayerTraits(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("roseinfer_window"),
        cap=kwargs.get("softcap"),
        sinks=None if sinks is None else sinks.detach(),
        slopes=None if slopes is None else torch.tensor(slopes, device=query.device),
    )
    mask: Mask | None = getattr(attention_mask, "roseinfer_mask", None)
    if mask is not None:
        noted.masks[len(noted.traits)] = mask, type(module).__name__
        attention_mask = None
        _refuse_other_arithmetic(module, query, key, value, traits, kwargs)
    noted.traits.append(traits)
    return attend(module, query, key, value, attention_mask, scaling, **kwargs)


def _refuse_other_arithmetic(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    traits: LayerTraits,
    told: dict[str, Any],
) -> None:
    """Raise unless the model's own attention, where it has one, comes to what ours does."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        return
    # In float32, since half precision tells large scores apart so badly that both may be right.
    query, key, value = query.float(), key.float(), value.float()
    tokens = query.shape[2]
    hidden = torch.full((tokens, tokens), torch.finfo(query.dtype).min, device=query.device)
    mask = hidden.triu(1)[None, None]
    theirs = own(module, query, key, value, mask, scaling=traits.scale, **told)[0][0]
    ours = attend_by_reference(query[0].transpose(0, 1), key[0], value[0], traits)
    if not alike(ours, theirs.view(ours.shape)):
        raise _something_else(module, traits)


def _refuse_other_calls(own: Sequence[OwnCall], traits: Sequence[LayerTraits]) -> None:
    """Raise unless attention that has a door computed by itself what it does with ours."""
    for call in own:
        if not alike(call.output, call.again(traits), _ALIBI_ROUNDED_TO):
            raise _something_else(call.module, traits[call.module.layer_idx])


def _something_else(module: torch.nn.Module, traits: LayerTraits) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(module).__name__} computes something else than attention with "
        f"{', '.join(sorted(traits.asked_for))}, which is not supported"
    )


def _noted_mask(*, mask_function: Mask, device: Any = None, **_: Any) -> torch.Tensor:
    """Return no real mask, but a tensor with the function that would fill it."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.roseinfer_mask = mask_function  # type: ignore[attr-defined]
    return mask


AttentionMaskInterface.register(_MASKED_TRIAL, _noted_mask)


def _window_of(name: str, mask: Mask, length: int, device: torch.device) -> int | None:
    """Return how many tokens a token sees, or None where it sees all before it.

    This raises unless these are the last ones before it, for every token, and itself.
    """
    at = torch.arange(length, device=device)
    none = at[0]

    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask(none, none, query, key).expand(length)

    seen = int(sees(at, none).int().argmin()) or length
    if not sees(at, at).all():
        raise UnsupportedModel(f"{name} does not see the token itself, which is not supported")
    if mask(none, none, none, at[1:]).any():
        raise UnsupportedModel(f"{name} attends to what comes later too, which is not supported")
    furthest, next_one = (at - seen + 1).clamp(min=0), (at - seen).clamp(min=0)
    behind = sees(at, next_one) & (at >= seen)
    if not sees(at, furthest).all() or behind.any():
        raise UnsupportedModel(
            f"{name} attends in chunks of {seen} tokens, or skips some of those before, which is "
            f"not supported: with max_length={seen} or less it sees them all"
        )
    if not torch.equal(sees(at[-1], at), at > at[-1] - seen):
        raise UnsupportedModel(f"{name} skips some of the tokens before, which is not supported")
    return seen if seen < length else None


class Trial:
    """Runs a model on a few tokens in several ways, which must all compute the same."""

    def __init__(
        self,
        network: Any,
        shape: ModelShape,
        run: Run,
        attend: Callable[..., tuple[torch.Tensor, None]],
    ) -> None:
        """``attend`` is our attention as transformers calls it."""
        for name in (_TRIAL, _MASKED_TRIAL):
            AttentionInterface.register(name, partial(_attend_noted, attend))
        self._network = network
        self._shape = shape
        self._forward = run
        self._name = type(network).__name__
        self._other_way = f"{self._name} does not use transformers' attention interface"
        self._config = network.config.get_text_config()
        self._tokens = torch.tensor(trial_tokens(self._config, shape), device=network.device)

    def layer_traits(self) -> list[LayerTraits]:
        """Return what every layer asks of its attention.

        This raises unless each layer attends once, in the order and shape that the cache expects,
        and a token is computed as in the network's own forward pass, whatever else is in the
        step. The network keeps the attention of the trial.
        """
        try:
            own = own_calls(self._network, self._tokens)
            if not use_attention(self._network, _MASKED_TRIAL):
                raise UnsupportedModel(self._other_way)
            plain = self._run(self._tokens)
            use_attention(self._network, _TRIAL)
            self._check_layers(plain)
            _refuse_other_calls(own, plain.traits)
            self._check_company()
            # This comes last, so as to see what the others changed in the network, and is
            # backwards, since the row of a token in a step does not depend on its position.
            ours = self._run(self._tokens.flip(0), [*reversed(range(len(self._tokens)))])
        except (UnsupportedModel, RanksFailed):
            raise
        except Exception as error:  # of any kind, since models may ask for what nobody gives them
            raise UnsupportedModel(
                f"{self._name} cannot be run on a few tokens: {error}"
            ) from error
        plain.handed = [tensor.flip(0) for tensor in plain.handed]
        if not ours.agrees(plain):
            raise UnsupportedModel(
                f"{self._name} does not count positions from 0 where it counts them itself, "
                "which is not supported"
            )
        windows: dict[Mask, int | None] = {}
        for mask, name in plain.masks.values():
            if mask not in windows:
                most, device = self._shape.max_length, self._network.device
                windows[mask] = _window_of(name, mask, most, device)
        of_layer = {layer: windows[mask] for layer, (mask, _) in plain.masks.items()}
        return [
            replace(traits, window=of_layer.get(layer, self._within(traits.window)))
            for layer, traits in enumerate(plain.traits)
        ]

    def _within(self, window: int | None) -> int | None:
        """Return the window, or None where the longest text fits into it."""
        return window if window and window < self._shape.max_length else None

    def _check_layers(self, noted: _Noted) -> None:
        """Refuse models that keep tokens elsewhere too, and would mix up the sequences."""
        shape = self._shape
        keys = (len(self._tokens), shape.num_kv_heads, shape.head_dim)
        if not noted.layers:
            raise UnsupportedModel(self._other_way)
        if noted.layers != [*range(shape.num_layers)] or {*noted.key_shapes} != {keys}:
            raise UnsupportedModel(
                f"{self._name} is not supported: {shape.num_layers} layers should attend once "
                f"each, with {shape.num_kv_heads} KV heads of {shape.head_dim}, and the layers "
                f"that did are {noted.layers}, with keys of "
                f"{sorted({key[1:] for key in noted.key_shapes})}"
            )

    def _check_company(self) -> None:
        """Refuse models that mix neighbours, or rotate all tokens for the longest request."""
        kind, short = _rotation(self._config)
        most = self._shape.max_length
        at = min(short or _SHORT, most) // 2
        alone = self._between(at, at)
        if alone.agrees(self._between(at, most - 1), _MIDDLE):
            return
        if short and short < most and alone.agrees(self._between(at, short - 1), _MIDDLE):
            raise UnsupportedModel(
                f"{self._name} rotates all requests of a step as the longest of them needs it "
                f"({kind}), which is not supported: with max_length={short} or less all need the "
                "same"
            )
        raise UnsupportedModel(
            f"{self._name} computes a token differently for what else is in its step, which is "
            "not supported"
        )

    def _between(self, position: int, others: int) -> _Noted:
        """Run a token at a position, with one other on each side.

        Where the others are further on, they change places, so that other neighbours are seen too.
        The tokens are always the same, so that rounding is.
        """
        first, token, last = self._tokens[[0, -1, len(self._tokens) // 2]]
        if position != others:
            first, last = last, first
        return self._run(torch.stack((first, token, last)), [others, position, others])

    def _run(self, tokens: torch.Tensor, positions: list[int] | None = None) -> _Noted:
        """Run tokens at positions, or let the network count the positions itself."""
        noted = _Noted()
        inputs: dict[str, Any] = {"input_ids": tokens[None]}
        if positions is not None:
            at = torch.tensor(positions, device=tokens.device)
            inputs |= {"position_ids": at[None], "logits_to_keep": 0}
        noted.handed.append(self._forward(noted, **inputs))
        return noted


def trial_tokens(config: Any, shape: ModelShape) -> list[int]:
    """Return up to four tokens, with the padding token, which a model may not count, amid them."""
    pad = getattr(config, "pad_token_id", None)
    others = [token for token in range(min(5, shape.vocab_size)) if token != pad] or [0]
    tokens = [others[at % len(others)] for at in range(min(4, shape.max_length))]
    if len(tokens) > 2 and pad is not None and 0 <= pad < shape.vocab_size:
        tokens[2] = pad
    return tokens


def _rotation(config: Any) -> tuple[str, int | None]:
    """Return the rotary scaling's name, and the length up to which texts count as short."""
    told = getattr(config, "rope_parameters", None) or {}
    each = [scaling for scaling in told.values() if isinstance(scaling, dict)] or [told]
    lengths = [scaling.get("original_max_position_embeddings") for scaling in each]
    kinds = {scaling.get("rope_type") for scaling in each}
    return ", ".join(sorted(map(str, kinds))), min(filter(None, lengths), default=None)
