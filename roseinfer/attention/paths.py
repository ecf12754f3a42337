"""The ways attention can be computed; each must agree with the reference within tolerance."""

from __future__ import annotations

from enum import StrEnum


class AttentionPath(StrEnum):
    """What computed the attention of some rows."""

    DECODE_TRITON = "attention_decode_triton"
    CHUNK_TRITON = "attention_chunk_triton"
    PROMPTS = "attention_prompts"
    """Warpgroups do the same for prompts of many tokens, with the same bits."""
    APPEND_AND_ATTEND = "attention_append_and_attend"
    """This kernel also stores the token that it attends from."""
    ROWS = "attention_rows"
    """A kernel that fetches ahead does both, with the same bits."""
    SLOTS_REFERENCE = "attention_slots_reference"
    """Torch operations do the same."""
    REFERENCE = "attention_reference"
