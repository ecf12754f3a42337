"""Lines of requests where nobody takes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_process import ROOT

LINES = "from roseinfer.server.access_log import write_line\nfor _ in range(3): write_line('{}')"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_full_disk_is_said_once() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", LINES],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    said = b"no more lines of requests are printed: No space left on device\n"
    assert (done.returncode, done.stderr) == (0, said)
