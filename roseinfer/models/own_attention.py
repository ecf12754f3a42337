"""What attention that has a door computes by itself, to be compared with what we make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from roseinfer.attention.reference import attend
from roseinfer.models.doors import close_doors, open_doors
from roseinfer.models.running import RUNNING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.layer_traits import LayerTraits

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
