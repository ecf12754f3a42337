"""What a cache counts: the ways a token can reach it, what a row can meet there, and its work.

Every fast path must equal ``Path.PER_TOKEN``, one ``append_token`` call a row, bit for bit over the
whole cache.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class Path(StrEnum):
    """What moved the data."""

    TRITON_FULL_BATCH = "triton_full_batch"
    TRITON_IDENTITY_POS = "triton_identity_pos"
    TRITON_GATHER = "triton_gather"
    TORCH_SCALAR = "torch_scalar"
    TORCH_VECTOR = "torch_vector"
    TORCH_GATHER = "torch_gather"
    CLONE_TRITON = "clone_triton"
    CLONE_TORCH = "clone_torch"
    PER_TOKEN = "per_token"

    @property
    def needs_triton(self) -> bool:
        return "triton" in self.value

    @property
    def needs_rows(self) -> bool:
        return self in GATHER


SCALAR_POSITION = frozenset({Path.TRITON_FULL_BATCH, Path.TORCH_SCALAR})
GATHER = frozenset({Path.TRITON_GATHER, Path.TORCH_GATHER})


class Condition(StrEnum):
    """What a row found at the end of its block list, or what the machine lacked."""

    FRESH = "fresh"
    IN_PLACE = "in_place"
    ROLLOVER = "rollover"
    ROLLOVER_SHARED = "rollover_shared"
    COPY_ON_WRITE = "copy_on_write"
    PADDING = "padding"
    TRITON_UNAVAILABLE = "triton_unavailable"


PathCounts = Counter[str]
"""How often each path ran and each condition was met since the manager was built."""


class Work(StrEnum):
    """Keys of ``KVBlockManager.work_counts``: the host's work for a cache and its attention."""

    KV_PLANS = "kv_plans"
    """How often the places of new tokens were planned."""
    STAGED_INDICES = "staged_indices"
    """Numbers uploaded to the device: positions, blocks, lengths, tokens."""
    TABLE_ROWS = "table_rows"
    """Rows of block tables uploaded to the device."""
