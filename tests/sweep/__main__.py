"""``python -m tests.sweep`` holds the engine to every causal model of transformers."""

from __future__ import annotations

import sys

from tests.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
