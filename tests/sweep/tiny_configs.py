"""Tiny configs of any class: its defaults with small sizes."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from tests.sweep.odd_configs import DEFAULT, ODD
from tests.sweep.tiny_sizes import TINY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ABSENT: Any = object()
_OWN_LAYERS = ("layer_types", "mlp_layer_types", "block_types", "layers_block_type")
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    {"head_dim": 8},
    {"layer_types": DEFAULT},
    dict.fromkeys(_OWN_LAYERS, DEFAULT),
    {"num_key_value_heads": 4},
)
"""Further values, tried in turn until a model can be built and run."""


def tiny_config(config_class: Any, attempt: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return a config with ``changes`` and otherwise small sizes.

    Names of ``attempt`` that the config does not have are ignored.
    """
    default = config_class()
    values = dict(_sizes(config_class, default))
    values |= {
        name: value for name, value in attempt.items() if _value(default, name) is not _ABSENT
    }
    values |= {**ODD.get(config_class.__name__, {}), **changes}
    values = {name: value for name, value in values.items() if value is not DEFAULT}
    renamed = getattr(config_class, "attribute_map", {})
    values = {name: value for name, value in values.items() if renamed.get(name) not in values}
    for name in getattr(config_class, "sub_configs", {}):
        if (part := getattr(default, name, None)) is not None:
            values[name] = tiny_config(type(part), attempt, values.get(name, {}))
    return config_class(**values)


def _sizes(config_class: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Yield small sizes for the arguments of a config class.

    Values that it computes from others are left out, because they would contradict these.
    """
    settable = {*signature(config_class).parameters, *getattr(config_class, "attribute_map", ())}
    for name, value in TINY.items():
        own = _value(default, name) if name in settable else _ABSENT
        if own is not _ABSENT and (value is None or type(own) is type(value)):
            yield name, value


def _value(config: Any, name: str) -> Any:
    """Return a config's value of a name, or ``_ABSENT``."""
    try:
        return getattr(config, name, _ABSENT)
    except Exception:  # of any type: the number differs between layers
        return 0
