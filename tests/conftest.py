"""What every test shares: the device, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_roseinfer.running.interpreter import remembering

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ("pytester",)

# Triton decides when a kernel is defined whether it will be interpreted, so this must stand
# before anything imports roseinfer's kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # The tensors are tiny; on a busy machine threads only wait for each other. The variable is
    # for the processes that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# Hundreds of tests start a pytest. Where the environment forbids bytecode, each of them would
# rewrite the assertions of all plugins anew, which takes longer than most of the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def _interpreter_remembers() -> Iterator[None]:
    """Spend a quarter less in Triton's interpreter, as searches do."""
    with remembering():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where caches live: the GPU when there is one, so that the kernels run compiled."""
    return "cuda" if torch.cuda.is_available() else "cpu"
