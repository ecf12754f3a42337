"""The ways attention can be computed; each must agree with the reference within tolerance."""

from __future__ import annotations

from enum import Enum


class AttentionPath(str, Enum):
    """Who computed the attention of some rows."""

    DECODE_TRITON = "attention_decode_triton"
    CHUNK_SDPA = "attention_chunk_sdpa"
    REFERENCE = "attention_reference"

    def __str__(self) -> str:
        value: str = self.value
        return value
