"""What an attention backend is given, what it must do, and which backends there are.

A backend is one file of this folder: a subclass of ``AttentionBackend`` under ``@register``.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import roseinfer.attention as room
from roseinfer.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from roseinfer.kv.manager import KVBlockManager, StepAppend
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.layer_traits import LayerTraits, Rotation


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The new tokens of a step that the host has planned, sequence by sequence."""

    new: StepAppend
    """Stores the tokens, a layer at a time."""
    block_lists: Sequence[Sequence[list[int]]]
    """``block_lists[i][g]`` is sequence ``i``'s list in layer group ``g``."""
    counts: Sequence[int]
    """How many new tokens each sequence has."""
    lengths: Sequence[int]
    """How many tokens each sequence has, the new ones included."""
    singles: int
    """How many sequences in front have one new token each."""


@dataclass(frozen=True, slots=True)
class ResidentBatch:
    """One new token in each of some rows whose state is on the device."""

    tables: Sequence[Tensor]
    """Row ``i`` of ``tables[g]`` lists the blocks of its sequence in layer group ``g``, with one
    for the new token."""
    lengths: Tensor
    """How many tokens its sequence has before the new one."""
    drafts: bool = False
    """Several rows may be of one sequence. Each sees the new tokens of those before it, so all are
    stored before any attends."""
    long: bool = False
    """The only row is too long for a step in one kernel."""


class Attention(Protocol):
    """What a model calls in every layer."""

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store new keys and values, ``[tokens, heads, head_dim]``, and attend to all stored."""


class AttentionBackend(ABC):
    """Stores the new keys and values of every layer and attends to all that is stored.

    Resident steps are captured in CUDA graphs: attending to a ``ResidentBatch`` reads nothing
    back on the host.
    """

    name: ClassVar[str]
    knows: ClassVar[frozenset[str]] = frozenset({"scale"})
    """The traits that this backend computes; a model that asks for others is refused."""
    best_on: ClassVar[frozenset[str]] = frozenset()
    """Kinds of devices on which this backend is the default."""

    def __init__(
        self,
        traits: Sequence[LayerTraits],
        kv: KVBlockManager,
        staging: IndexStaging,
        path_counts: Counter[str],
    ) -> None:
        """``traits[i]`` are layer ``i``'s. ``staging`` brings numbers to the device."""
        asked_for = frozenset().union(*(layer.asked_for for layer in traits))
        for trait in sorted(asked_for - self.knows):
            raise UnsupportedModel(
                f"the model's attention has {trait}, which the attention backend {self.name!r} "
                "does not compute: choose another attention_backend"
            )
        self.traits = traits
        self.kv = kv
        self.staging = staging
        self.path_counts = path_counts

    @classmethod
    def why_unusable(cls, device: torch.device) -> str:  # noqa: ARG003  (some can run anywhere)
        """Say why this backend cannot run on ``device``; return nothing where it can."""
        return ""

    @abstractmethod
    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Note what the next forward pass works on. Called once a step, before any layer."""

    def lone_row(self) -> ResidentBatch | None:
        """Return the step's batch if it is one resident row whose caches may be written directly.

        Who computes a whole step in one kernel stores the new key and value in ``kv.caches``
        itself, in the block and at the place that the batch says, and attends to what is there.
        """
        return None

    @abstractmethod
    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store ``[tokens, kv_heads, head_dim]``, then attend to all that is stored."""

    def attend_rotated(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        """Rotate queries and keys, which may change in place, and do as ``attend_new`` then."""
        query = rotation.of_queries(query, positions)
        return self.attend_new(layer, query, rotation.of_keys(key, positions), value)

    def ends_alone(self, rows: Tensor | None) -> bool:  # noqa: ARG002  (some never do)
        """Tell if ``attend_ends`` may be called for these rows, and is worth it."""
        return False

    def attend_ends(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: Rotation | None,
        rows: Tensor,
    ) -> Tensor:
        """Store as the others do, and return what comes of the last token of each sequence alone.

        Those are at ``rows``. In the last layer nobody asks for other tokens, and a backend that
        need not attend from them saves that.
        """
        if rotation is None:
            return self.attend_new(layer, query, key, value)[rows]
        return self.attend_rotated(layer, query, key, value, positions, rotation)[rows]


_BACKENDS: dict[str, type[AttentionBackend]] = {}
_Backend = TypeVar("_Backend", bound=type[AttentionBackend])


def register(backend: _Backend) -> _Backend:
    """Offer a backend under its name; ``EngineConfig.attention_backend`` chooses by it."""
    _BACKENDS[backend.name] = backend
    return backend


def find_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of that name, importing all files of this folder for it."""
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)
    if name not in _BACKENDS:
        known = ", ".join(sorted(_BACKENDS))
        raise ConfigError(f"attention_backend={name!r} is not registered: there are {known}")
    return _BACKENDS[name]


def best_backend(device: torch.device) -> str:
    """Return the name of the default backend of a device."""
    find_backend("reference")
    for name, backend in _BACKENDS.items():
        if device.type in backend.best_on and not backend.why_unusable(device):
            return name
    return "reference"
