"""Doors to models that compute attention in a way of their own: each family's is one file here.

A door replaces methods of a module, found by its class, by ones that go through transformers'
attention interface as other models do. Beside that interface's own keywords it may ask for
``roseinfer_window``, the tokens that a token sees, and ``roseinfer_slopes``, one for each head.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    Methods = Mapping[str, Callable[..., Any]]

_DOORS: dict[str, Callable[[Any], Methods]] = {}
_Door = TypeVar("_Door", bound="Callable[[Any], Methods]")
_INTERFACE = AttentionInterface()


def register(class_name: str) -> Callable[[_Door], _Door]:
    """Register a door for modules of a class: it prepares one, and says what to replace by what."""

    def note(door: _Door) -> _Door:
        _DOORS[class_name] = door
        return door

    return note


def open_doors(network: Any) -> list[Any]:
    """Replace what there are doors for, and return the modules whose methods were replaced."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    opened = [module for module in network.modules() if type(module).__name__ in _DOORS]
    for module in opened:
        module.roseinfer_config = network.config
        for name, method in _DOORS[type(module).__name__](module).items():
            setattr(module, name, MethodType(method, module))
    return opened


def close_doors(opened: list[Any]) -> None:
    """Give the modules their own methods back."""
    for module in opened:
        for name in _DOORS[type(module).__name__](module):
            delattr(module, name)


def use_attention(network: Any, name: str) -> bool:
    """Have the network's layers attend by the function of that name, and say if they can."""
    if any(type(module).__name__ in _DOORS for module in network.modules()):
        network.config._attn_implementation = name
    else:
        network.set_attn_implementation(name)
    return bool(network.config._attn_implementation == name)


def attend_through_interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    **asked: Any,
) -> torch.Tensor:
    """Attend with ``[1, heads, tokens, head_dim]`` each, and return the heads behind the tokens.

    Masks are not handed on: the cache knows what is before what.
    """
    attend = _INTERFACE[module.roseinfer_config._attn_implementation]
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = attend(module, query, key, value, None, scaling=scaling, **asked)[0]
    return out
