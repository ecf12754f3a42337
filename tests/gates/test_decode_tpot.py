"""Time of roseinfer's own decode step, compared with that of another revision.

``pytest tests/gates/test_decode_tpot.py --roseinfer-against main``; skipped without such an
option. Starting an engine takes seconds, so a pair of processes serves five series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gates.decode_target import decode

if TYPE_CHECKING:
    from pytest_roseinfer.gates.tpot import Tpot


@pytest.mark.roseinfer_tpot(series_per_process=5, seconds=60)
def test_decode(roseinfer_tpot: Tpot) -> None:
    roseinfer_tpot.check("tests.gates.decode_target:decode")


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="needs a GPU's memory")
def test_timed_step_decodes() -> None:
    target = decode()
    for _ in range(3):
        target["step"]()
    counts = target["path_counts"]()
    assert sum(counts.values()) > 0
    assert all(type(name) is str for name in counts)
    assert target["tokens"] == 8
