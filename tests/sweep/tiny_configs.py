"""A tiny config of any class: the class's own defaults, but for sizes."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from tests.sweep.odd_configs import LEFT, ODD
from tests.sweep.tiny_sizes import TINY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ABSENT: Any = object()
_OWN_LAYERS = ("layer_types", "mlp_layer_types", "block_types", "layers_block_type")
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    {"head_dim": 8},
    {"layer_types": LEFT},
    dict.fromkeys(_OWN_LAYERS, LEFT),
    {"num_key_value_heads": 4},
)
"""What is tried in turn until a model can be built and run: other values for some names."""


def tiny_config(config_class: Any, attempt: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return a config with ``changes``; the rest is as small as its names allow.

    Of an ``attempt`` the names count that such a config has.
    """
    default = config_class()
    told = dict(_sizes(config_class, default))
    told |= {name: value for name, value in attempt.items() if _value(default, name) is not _ABSENT}
    told |= {**ODD.get(config_class.__name__, {}), **changes}
    told = {name: value for name, value in told.items() if value is not LEFT}
    renamed = getattr(config_class, "attribute_map", {})
    told = {name: value for name, value in told.items() if renamed.get(name) not in told}
    for name in getattr(config_class, "sub_configs", {}):
        if (part := getattr(default, name, None)) is not None:
            told[name] = tiny_config(type(part), attempt, told.get(name, {}))
    return config_class(**told)


def _sizes(config_class: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sizes that a config of the class can be given. What is open stays open.

    What it computes from others is left to it: with another value it would contradict itself.
    """
    given = {*signature(config_class).parameters, *getattr(config_class, "attribute_map", ())}
    for name, value in TINY.items():
        own = _value(default, name) if name in given else _ABSENT
        if own is not _ABSENT and (value is None or type(own) is type(value)):
            yield name, value


def _value(config: Any, name: str) -> Any:
    """Return what a config has under a name."""
    try:
        return getattr(config, name, _ABSENT)
    except Exception:  # of any kind: a number that differs from layer to layer
        return 0
