"""Short soak test of an engine under faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roseinfer import EnginePath
from roseinfer.engine.request import Request
from tests.engine.soak import Soak, objects_alive, resident_bytes

REQUESTS = 1000
"""Requests of the test; ``python -m tests.engine.soak`` serves any number."""
GROWTH = 24 << 20
"""Bytes of noise in the size of a process. A block's worth lost per request, or a stored output,
exceeds it within a few thousand requests.
"""
ENDS = {
    *("length", "stop", "cancelled", "disconnected", "loop closed", "rejected"),
    *("StepFailed", "NoDistribution"),
}
"""Ends of streams that this many requests certainly meet."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_soak_leaks_no_objects_and_no_memory(device: str) -> None:
    alive_before = objects_alive(Request)
    soak = Soak(device)
    soak.run(REQUESTS // 4)
    before = resident_bytes()
    device_before = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
    soak.run(REQUESTS - REQUESTS // 4)

    assert soak.ends.total() == REQUESTS
    assert soak.ends.keys() >= ENDS
    paths = soak.llm.engine.path_counts
    assert min(
        paths[path]
        for path in (EnginePath.RECOMPUTED, EnginePath.PREFIX_HIT, EnginePath.ADMITTED_OUT_OF_ORDER)
    )
    assert soak.num_pauses
    assert objects_alive(Request) <= alive_before, "ended requests are still referenced"
    assert resident_bytes() - before < GROWTH
    if device.startswith("cuda"):
        assert torch.cuda.memory_allocated() - device_before < 1 << 20
