"""Mark for tests of kernels that run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs kernels that run in Triton's interpreter"
)
