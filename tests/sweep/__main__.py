"""``python -m tests.sweep`` holds the engine to every causal model of transformers."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: models are on the CPU

from tests.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
