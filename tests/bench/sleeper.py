"""Work for a subprocess that starts a process of its own; imports nothing slow."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def start_sleeper(folder: str, wait: bool) -> str:
    """Start a process that sleeps, and make a temporary folder."""
    Path(folder, "temporary").write_text(tempfile.mkdtemp())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(folder, "pid").write_text(str(child.pid))
    if wait:
        child.wait()
    print("this is no answer")
    return "done"
