"""Names for the work that a cache and the attention over it do in every step."""

from __future__ import annotations

from enum import StrEnum


class Work(StrEnum):
    """Keys of ``KVBlockManager.work_counts``."""

    KV_PLANS = "kv_plans"
    """Times that it was worked out where new tokens go."""
    STAGED_INDICES = "staged_indices"
    """Numbers brought to the device: positions, blocks, lengths, tokens."""
    TABLE_ROWS = "table_rows"
    """Rows of block tables brought to the device, one of each sequence and layer group."""
