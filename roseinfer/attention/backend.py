"""The contract of attention: what layers ask for, what a step hands over, and who can attend.

A backend is one file of this folder: a subclass of ``AttentionBackend`` under ``@register``.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import roseinfer.attention as room
from roseinfer.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    import torch

    from roseinfer.kv.manager import KVBlockManager, StepAppend
    from roseinfer.kv.storage import IndexStaging


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What one layer asks of its attention, found when its model is loaded.

    A trait that only some layers have is a field whose default says that it is not asked for.
    """

    scale: float
    """Scores are multiplied by it."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The new tokens of a step that the host has planned, a sequence's together."""

    new: StepAppend
    """Stores them, a layer at a time."""
    block_lists: Sequence[Sequence[list[int]]]
    """``block_lists[i][g]`` is sequence ``i``'s list in layer group ``g``."""
    counts: Sequence[int]
    """How many of the tokens are each sequence's own."""
    lengths: Sequence[int]
    """How many tokens each sequence has with them."""
    singles: int
    """How many sequences in front have one new token each."""


@dataclass(frozen=True, slots=True)
class ResidentBatch:
    """One new token for each of some rows whose state is on the device."""

    tables: torch.Tensor
    """Row ``i`` lists sequence ``i``'s blocks, one for the new token included."""
    lengths: torch.Tensor
    """How many tokens each has stored before."""


class Attention(Protocol):
    """What a model calls in every layer."""

    def attend_new(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """``[tokens, heads, head_dim]`` each: store the new, attend to all that is stored."""


class AttentionBackend(ABC):
    """Stores the new keys and values of every layer and attends to all that is stored.

    Resident steps are captured in CUDA graphs: attending to a ``ResidentBatch`` reads nothing
    back on the host.
    """

    name: ClassVar[str]
    knows: ClassVar[frozenset[str]] = frozenset({"scale"})
    """The traits that this backend computes; a model that asks for others is refused."""
    best_on: ClassVar[frozenset[str]] = frozenset()
    """Kinds of devices on which it is taken where nobody says which to take."""

    def __init__(
        self,
        traits: Sequence[LayerTraits],
        kv: KVBlockManager,
        staging: IndexStaging,
        path_counts: Counter[str],
    ) -> None:
        """``traits[i]`` are layer ``i``'s. ``staging`` brings numbers to the device."""
        for trait in sorted({name for layer in traits for name in _asked_for(layer)} - self.knows):
            raise UnsupportedModel(
                f"the model's attention has {trait}, which the attention backend {self.name!r} "
                "does not compute: choose another attention_backend"
            )
        self.scales = [layer.scale for layer in traits]
        self.kv = kv
        self.staging = staging
        self.path_counts = path_counts

    @classmethod
    def why_unusable(cls, device: torch.device) -> str:  # noqa: ARG003  (some can run anywhere)
        """Why this backend cannot run on ``device``, or nothing where it can."""
        return ""

    @abstractmethod
    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Note what the next forward pass works on. Called once a step, before any layer."""

    @abstractmethod
    def attend_new(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store ``[tokens, kv_heads, head_dim]`` and attend to all that is stored by then."""


def _asked_for(layer: LayerTraits) -> set[str]:
    return {each.name for each in fields(layer) if getattr(layer, each.name) != each.default}


_BACKENDS: dict[str, type[AttentionBackend]] = {}
_Backend = TypeVar("_Backend", bound=type[AttentionBackend])


def register(backend: _Backend) -> _Backend:
    """Offer a backend under its name; ``EngineConfig.attention_backend`` chooses by it."""
    _BACKENDS[backend.name] = backend
    return backend


def find_backend(name: str) -> type[AttentionBackend]:
    """The backend of that name. Its file need not be imported by anybody before."""
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend={name!r} is not registered: there are "
            f"{', '.join(sorted(_BACKENDS))}"
        )
    return _BACKENDS[name]


def best_backend(device: torch.device) -> str:
    """The name of the backend to take on a device where nobody says which."""
    find_backend("reference")
    best = (
        name
        for name, backend in _BACKENDS.items()
        if device.type in backend.best_on and not backend.why_unusable(device)
    )
    return next(best, "reference")
