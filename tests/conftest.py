"""Fixtures and hooks of all tests: the device, and Triton's interpreter where no GPU is present."""

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
from tests.slow import MARKERS, Shard, mark_slow_cases

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ("pytester", "tests.project")

# Triton decides at the definition of a kernel whether it is interpreted: set the variable before
# roseinfer's kernels are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Tensors are tiny, and threads would only wait for each other on a busy machine. The variable
    # is for processes that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# Bytecode is matched by time in seconds: that of a file written twice in a second would be stale.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
BYTECODE_EXISTS = "BYTECODE_EXISTS"
"""Variable of processes that run tests after another process has written the bytecode."""
_ONE_EXAMPLE = ("--roseinfer-examples=1", "--roseinfer-required-paths=off")
_ANY_TEST = ("--pyargs", "pytest_roseinfer.suite", "-k", "histories", *_ONE_EXAMPLE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard",
        type=Shard.parse,
        metavar="I/N",
        help="run the I-th of N parts of the tests, which are chosen by hashes of their names",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Write bytecode of the modules that processes of tests import, while tests are collected.

    Hundreds of tests start pytest, which rewrites the assertions of its plugins. Without bytecode
    each start does so again, which takes longer than most of the tests.
    """
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    lists_tests = hasattr(config, "workerinput") or config.option.collectonly
    if lists_tests or os.environ.get(BYTECODE_EXISTS):
        return
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


def pytest_collectstart() -> None:
    """Collect no garbage while tests are imported, which leaves hardly any."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow_cases(items)
    if config.option.shard is not None:
        items[:], others = config.option.shard.split(items)
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests, which stay, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _fast_interpreter() -> Iterator[None]:
    """Run Triton's interpreter as searches do, which saves a quarter of its time."""
    with fast_interpreter():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of caches: the GPU if there is one, so that kernels run compiled."""
    return "cuda" if torch.cuda.is_available() else "cpu"
