"""Interface of attention backends, their inputs, and the registry of backends.

A backend is one file of this folder: a subclass of ``AttentionBackend`` under ``@register``.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import roseinfer.attention as attention_package
from roseinfer.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from roseinfer.kv.manager import KVBlockManager, StepBatch
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding


@dataclass(frozen=True, slots=True)
class ResidentBatch:
    """One new token per row, of rows whose state is on the device."""

    tables: Sequence[Tensor]
    """Block tables: row ``i`` of ``tables[g]`` lists the blocks of row ``i``'s sequence in layer
    group ``g``, including the one for the new token."""
    lengths: Tensor
    """Tokens of each row's sequence before the new one."""
    has_drafts: bool = False
    """True if several rows may belong to one sequence. Each attends to the new tokens of the rows
    before it, so all tokens are stored before any row attends."""
    long_context: bool = False
    """True if the only row is too long for a step in one kernel."""


class Attention(Protocol):
    """Interface that a model calls in every layer."""

    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store new keys and values, ``[tokens, heads, head_dim]``; attend to all stored tokens."""


class AttentionBackend(ABC):
    """Backend that stores new keys and values, and attends to all stored tokens.

    Resident steps are captured in CUDA graphs: attending to a ``ResidentBatch`` reads nothing
    back on the host.
    """

    name: ClassVar[str]
    supported_traits: ClassVar[frozenset[str]] = frozenset({"scale"})
    """Supported ``LayerTraits``; a model that needs others is refused."""
    default_device_types: ClassVar[frozenset[str]] = frozenset()
    """Device types whose default is this backend."""
    uses_kernels: ClassVar[bool] = True
    """False if a resident step with it has no kernels either."""

    def __init__(
        self,
        traits: Sequence[LayerTraits],
        kv: KVBlockManager,
        staging: IndexStaging,
        path_counts: Counter[str],
    ) -> None:
        """Set up for a model whose layer ``i`` has ``traits[i]``.

        ``staging`` uploads indices to the device.
        """
        required = frozenset().union(*(layer.trait_names for layer in traits))
        for trait in sorted(required - self.supported_traits):
            raise UnsupportedModel(
                f"attention_backend={self.name!r}: does not support {trait}, which the model's "
                "attention needs; choose another attention_backend"
            )
        self.traits = traits
        self.kv = kv
        self.staging = staging
        self.path_counts = path_counts

    @classmethod
    def unusable_reason(cls, device: torch.device) -> str:  # noqa: ARG003  (some run anywhere)
        """Return why this backend cannot run on ``device``; an empty string where it can."""
        return ""

    @abstractmethod
    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Set the batch of the next forward pass. Called once a step, before any layer."""

    def single_row_batch(self) -> ResidentBatch | None:
        """Return the batch if it is one resident row that a megakernel may serve, else None.

        A kernel that computes a whole step stores the new key and value in ``kv.caches`` itself,
        in the block and at the position given by the batch, and attends to the stored tokens.
        """
        return None

    @abstractmethod
    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store ``[tokens, kv_heads, head_dim]``, then attend to all stored tokens."""

    def rotate_store_and_attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: RotaryEmbedding,
    ) -> Tensor:
        """Rotate queries and keys, possibly in place, then store and attend."""
        query = rotation.apply_to_queries(query, positions)
        return self.store_and_attend(layer, query, rotation.apply_to_keys(key, positions), value)

    def can_attend_last_tokens(self, rows: Tensor | None) -> bool:  # noqa: ARG002  (the default)
        """Return True if ``attend_last_tokens`` supports these rows and saves work."""
        return False

    def attend_last_tokens(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: RotaryEmbedding | None,
        rows: Tensor,
    ) -> Tensor:
        """Store all tokens, and attend only from each sequence's last token, at ``rows``.

        The last layer only needs each sequence's final row, so a backend can skip the others.
        """
        if rotation is None:
            return self.store_and_attend(layer, query, key, value)[rows]
        return self.rotate_store_and_attend(layer, query, key, value, positions, rotation)[rows]


_BACKENDS: dict[str, type[AttentionBackend]] = {}
_Backend = TypeVar("_Backend", bound=type[AttentionBackend])


def register(backend: _Backend) -> _Backend:
    """Register a backend under its name, for ``EngineConfig.attention_backend``."""
    _BACKENDS[backend.name] = backend
    return backend


def find_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of that name, after importing all files of this folder."""
    for module in pkgutil.iter_modules(
        attention_package.__path__, f"{attention_package.__name__}."
    ):
        importlib.import_module(module.name)
    if name not in _BACKENDS:
        backend_names = ", ".join(sorted(_BACKENDS))
        raise ConfigError(
            f"attention_backend={name!r} is not registered; choose one of {backend_names}"
        )
    return _BACKENDS[name]


def default_backend(device: torch.device) -> str:
    """Return the name of the default backend of a device."""
    find_backend("reference")
    for name, backend in _BACKENDS.items():
        if device.type in backend.default_device_types and not backend.unusable_reason(device):
            return name
    return "reference"
