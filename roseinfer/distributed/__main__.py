"""Process of a following rank, which its leader starts."""

from __future__ import annotations

import sys
from pathlib import Path

from roseinfer.imports import quick_imports

if __name__ == "__main__":
    with quick_imports():
        from roseinfer.distributed.follower import run_follower_process
    run_follower_process(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
