"""Tiny models of any class, built by trying configs until one works."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import transformers

from tests.sweep.tiny_configs import ATTEMPTS, tiny_config
from tests.sweep.tiny_sizes import VOCABULARY
from tests.sweep.weights import enlarge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.sweep.subject import Subject

_MAX_PARAMETERS = 20_000_000


class NotBuilt(Exception):
    """No tiny model of the class could be built; the message has the reasons."""


def build(subject: Subject) -> Any:
    """Build the subject's model in float32, always with the same weights."""
    reasons: dict[str, None] = {}
    for attempt in ATTEMPTS:
        try:
            return _attempt(subject, attempt)
        except Exception as error:  # of any type, because configs can fail in any way
            reasons[_one_line(error)] = None
    raise NotBuilt("; or ".join(reasons))


def _attempt(subject: Subject, attempt: Mapping[str, Any]) -> Any:
    config_class = transformers.CONFIG_MAPPING[subject.kind]
    model_class = getattr(transformers, subject.model_class)
    if unknown := [name for name in subject.changes if not hasattr(config_class(), name)]:
        raise NotBuilt(f"{subject.config_class} has no {', '.join(unknown)}")
    config = _for_class(model_class, tiny_config(config_class, attempt, subject.changes))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(each.numel() for each in model_class(deepcopy(config)).parameters())
    if size > _MAX_PARAMETERS:
        raise NotBuilt(f"{size / 1e6:.0f} million parameters are left")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    enlarge(model)
    _require_useful_logits(model)
    return model


def _for_class(model_class: Any, config: Any) -> Any:
    """Return the config, or the part of it that belongs to the class."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return next((part for part in parts if type(part) is model_class.config_class), config)


@torch.no_grad()
def _require_useful_logits(model: Any) -> None:
    """Raise unless logits are finite and depend on the first token of the text."""
    rows = [torch.tensor([[first, 7, 8, 9]]) for first in (5, 6)]
    one, other = (model(input_ids=row, use_cache=False).logits for row in rows)
    if one.shape != (1, 4, VOCABULARY):
        raise NotBuilt(f"for 4 tokens it returns logits of shape {list(one.shape)}")
    if not (one.isfinite().all() and other.isfinite().all()):
        raise NotBuilt("its logits are no numbers")
    if torch.allclose(one[0, -1], other[0, -1], atol=0.01):
        raise NotBuilt("its logits do not depend on earlier tokens")


def _one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return message if isinstance(error, NotBuilt) else f"{type(error).__name__}: {message}"
