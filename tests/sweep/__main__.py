"""``python -m tests.sweep``: compare the engine with every causal model of transformers."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # set before Triton is imported: models are on the CPU

from tests.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
