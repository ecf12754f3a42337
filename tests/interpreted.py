"""A mark for tests of kernels that Triton's interpreter runs."""

from __future__ import annotations

import pytest
import torch

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="its kernels are those of the interpreter"
)
