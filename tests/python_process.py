"""Runs of Python code in an interpreter of its own, to test effects on a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests import warm_process

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT = 600


def run_python(
    code: str, *, interpret: bool = False, warm: bool = False, **environment: str
) -> str:
    """Return the output of ``code``, which must exit without an error.

    A ``warm`` process begins with torch and transformers imported.
    """
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= environment
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    arguments = ["-c", dedent(code)]
    if warm:
        done = warm_process.run(arguments, cwd=ROOT, environment=env, timeout=_TIMEOUT)
    else:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    assert done.returncode == 0, f"the process failed:\n{done.stderr}"
    return done.stdout
