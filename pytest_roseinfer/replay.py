"""Running a saved trace again."""

from __future__ import annotations

import sys

from pytest_roseinfer import reproduce
from pytest_roseinfer.divergence import Divergence
from pytest_roseinfer.machine import run_history
from pytest_roseinfer.settings import load_target


def replay(file: str) -> int:
    """Run the history in ``file``; 1 when it still fails, 0 when it runs through."""
    name, history = reproduce.load(file)
    sys.path.insert(0, "")
    print(f"replaying on {name}:\n{history.words()}\n")
    try:
        run_history(load_target(name), history)
    except Divergence as failure:
        print(f"FAILED: {failure}")
        return 1
    print("the history ran through: nothing differed")
    return 0
