"""Running a snippet in a fresh interpreter, for what only a whole process can show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *flags: str, interpret: bool = False, **environment: str) -> str:
    """What ``code`` prints. It must exit cleanly; a warning on the way is an error."""
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= environment
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, *flags, "-c", dedent(code)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"the process failed:\n{done.stderr}"
    return done.stdout
