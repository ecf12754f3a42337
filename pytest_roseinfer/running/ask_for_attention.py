"""Asks a cache for attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.answers.checked import attention
from pytest_roseinfer.cases.operations.operation import asked
from pytest_roseinfer.cases.payload import lay_out
from pytest_roseinfer.findings.observation import Attended
from pytest_roseinfer.invariants.stored.attention import questions

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.cases.operations.operation import Device
    from pytest_roseinfer.cases.payload import Payload
    from pytest_roseinfer.oracle.oracle import Oracle


def ask_for_attention(
    adapter: KVCacheAdapter, device: Device, payload: Payload, oracle: Oracle, step: int
) -> list[Attended]:
    """Ask the questions that are due behind a step, up to the first that raises an error."""
    answers: list[Attended] = []
    for seqs, query, layout, layer in questions(payload, oracle, step):
        laid_out = lay_out(query[None], layout)[0]
        device.hand_over(laid_out)
        with device.working():
            found = asked(_attend, adapter, list(seqs), laid_out, layer)
        answers.append(Attended(seqs, layer, query, found))
        if isinstance(found, Exception):
            break
    return answers


def _attend(
    adapter: KVCacheAdapter, seqs: list[int], query: torch.Tensor, layer: int
) -> torch.Tensor:
    return attention(f"attend({seqs}, query, {layer})", adapter.attend(seqs, query, layer))
