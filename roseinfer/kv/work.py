"""Names of the host's work for a cache and the attention over it."""

from __future__ import annotations

from enum import StrEnum


class Work(StrEnum):
    """Keys of ``KVBlockManager.work_counts``."""

    KV_PLANS = "kv_plans"
    """How often the places of new tokens were planned."""
    STAGED_INDICES = "staged_indices"
    """Numbers uploaded to the device: positions, blocks, lengths, tokens."""
    TABLE_ROWS = "table_rows"
    """Rows of block tables uploaded to the device."""
