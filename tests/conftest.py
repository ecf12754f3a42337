"""What every test shares: the device, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_roseinfer.run.interpreter import fast_interpreter
from tests.sampled import MARKERS, leave_out, note_whether_every_test

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ("pytester", "tests.project")

# Triton decides when a kernel is defined whether it will be interpreted, so this must stand
# before anything imports roseinfer's kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # The tensors are tiny; on a busy machine threads only wait for each other. The variable is
    # for the processes that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# A file that a test writes twice in a second must be read twice.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
_ONE_EXAMPLE = ("--roseinfer-examples=1", "--roseinfer-required-paths=off")
_ANY_TEST = ("--pyargs", "pytest_roseinfer.suite", "-k", "histories", *_ONE_EXAMPLE)


def pytest_configure(config: pytest.Config) -> None:
    """Have bytecode written of all that the processes of tests import, while tests are collected.

    Hundreds of tests start a pytest, which rewrites the assertions of its plugins: without
    bytecode, each time, and that takes longer than most of the tests.
    """
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if hasattr(config, "workerinput"):
        return
    note_whether_every_test(config)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    folder = tempfile.TemporaryDirectory()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *_ANY_TEST],
        cwd=folder.name,
        env=environment,
        stdout=subprocess.DEVNULL,
    )

    def end() -> None:
        process.wait()
        folder.cleanup()

    config.add_cleanup(end)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items)


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what is there for good: modules, and tests to come."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fast_interpreter() -> Iterator[None]:
    """Spend a quarter less in Triton's interpreter, as searches do."""
    with fast_interpreter():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where caches live: the GPU when there is one, so that the kernels run compiled."""
    return "cuda" if torch.cuda.is_available() else "cpu"
