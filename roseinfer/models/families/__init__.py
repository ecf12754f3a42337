"""Families of models that run on fused kernels. Each is one file here that registers itself."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.models.causal import CausalModel

_FAMILIES: dict[str, Any] = {}
_Family = TypeVar("_Family", bound="type[CausalModel]")


def register_family(*class_names: str) -> Callable[[_Family], _Family]:
    """Register a family for the transformers models of these classes that it supports."""

    def note(family: _Family) -> _Family:
        _FAMILIES.update(dict.fromkeys(class_names, family))
        return family

    return note


def fused_family(model: Any) -> type[CausalModel] | None:
    """Return the family that runs ``model`` on fused kernels, if any. This imports Triton."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    family = _FAMILIES.get(type(model).__name__)
    return family if family is not None and family.is_supported(model) else None
