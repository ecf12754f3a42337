"""Running a saved trace again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import monotonic
from typing import Any


class TraceError(ValueError):
    """A file holds no trace, or one that cannot be run here."""


def replay(file: str) -> int:
    """Run what is in ``file``; return 1 when it still fails, 0 when it runs through."""
    trace = _read(file)
    # Triton reads its switch when kernels are defined, which the imports below do.
    os.environ.update(trace["environment"])

    import torch

    from pytest_roseinfer.adapters.load_target import load_target
    from pytest_roseinfer.findings.divergence import Difference
    from pytest_roseinfer.running.watchdog import WATCHED
    from pytest_roseinfer.search.reproduce import CHECKS, example_of

    example = example_of(trace)
    device = torch.device(example.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TraceError(
            f'{file} was recorded on "{example.device}", which this machine does not have; change '
            '"device" in the file to replay it elsewhere'
        )
    print(f"replaying on {trace['adapter']} ({trace['check']})\n")
    sys.path[:0] = [folder for folder in trace["folders"] if folder not in sys.path]
    adapter = load_target(trace["adapter"], trace["file"])
    WATCHED.example, WATCHED.began = example, monotonic()
    try:
        CHECKS[trace["check"]](adapter, example)
    except Difference as failure:
        print(f"FAILED: {failure}")
        return 1
    finally:
        WATCHED.began = WATCHED.example = None
    print(f"{example.words()}\n\nit ran through: nothing differed")
    return 0


def _read(file: str) -> dict[str, Any]:
    try:
        trace = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise TraceError(f"{file} is no trace: {error}") from None
    expected = {"adapter", "file", "folders", "environment", "check", "example"}
    if not (isinstance(trace, dict) and expected <= trace.keys()):
        raise TraceError(f"{file} is no trace: expected the fields {', '.join(sorted(expected))}")
    return trace
