"""``python -m tests.mutation``: the mutation score."""

from __future__ import annotations

import os
import sys

# Triton decides when it is imported whether kernels are interpreted. More threads than one would
# only wait for each other on tensors this small.
os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

from tests.mutation.command import main

if __name__ == "__main__":
    sys.exit(main())
