"""Requests of all kinds come and go while much goes wrong, and nothing is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roseinfer import EnginePath
from roseinfer.engine.request import Request
from tests.engine.soak import Soak, objects_alive, resident

REQUESTS = 1000
"""How many the test serves; ``python -m tests.engine.soak`` serves as many as one likes."""
GROWTH = 24 << 20
"""Bytes of noise in the size of a process. A block's worth lost with each request, or an output
kept, would be more after a few thousand of them."""
ENDS = {
    *("length", "stop", "cancelled", "left", "loop closed", "refused"),
    *("StepFailed", "NoDistribution"),
}
"""The ends that so many requests meet for certain."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_long_run_leaves_nothing_behind(device: str) -> None:
    alive_before = objects_alive(Request)
    soak = Soak(device)
    soak.run(REQUESTS // 4)
    before = resident()
    device_before = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
    soak.run(REQUESTS - REQUESTS // 4)

    assert soak.ends.total() == REQUESTS
    assert soak.ends.keys() >= ENDS
    paths = soak.llm.engine.path_counts
    assert min(
        paths[path]
        for path in (EnginePath.RECOMPUTED, EnginePath.PREFIX_HIT, EnginePath.ADMITTED_OUT_OF_ORDER)
    )
    assert soak.paused
    assert objects_alive(Request) <= alive_before, "requests that have ended are kept"
    assert resident() - before < GROWTH
    if device.startswith("cuda"):
        assert torch.cuda.memory_allocated() - device_before < 1 << 20
