"""A pytest plugin that judges every launch of a session: ``pytest -p tests.lanes.plugin ...``.

A test fails in which a kernel was out of bounds, though it caught what the launch raised. Not
for tests that look at pointers themselves: those in ``tests/lanes`` and ``tests/kernels``.
"""

from __future__ import annotations

import os

# Before anything imports Triton or asks for a GPU: it is interpreted kernels that are judged.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.kernels.calls import CALLS
from tests.lanes.bounds import Judged, OutOfBounds, judging

if TYPE_CHECKING:
    from collections.abc import Generator

EVERY_KERNEL = "--require-every-kernel"
_judged = pytest.StashKey[Judged]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        EVERY_KERNEL, action="store_true", help="fail if a kernel of roseinfer is never launched"
    )


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    config.stash[_judged] = stack.enter_context(judging())
    config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    found = item.config.stash[_judged].findings
    if found:
        words = "\n".join(f"{access}: {first}" for access, first in found.items())
        found.clear()
        raise OutOfBounds(words)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption(EVERY_KERNEL) and _never_launched(session.config):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    launches = config.stash[_judged].launches
    terminalreporter.section("launches judged by the bounds of their tensors")
    for kernel, times in sorted(launches.items()):
        terminalreporter.line(f"{times:8} {kernel}")
    if missing := _never_launched(config):
        terminalreporter.line(f"never launched: {', '.join(missing)}")


def _never_launched(config: pytest.Config) -> list[str]:
    kernels = {kernel for _, each in CALLS.values() for kernel in each}
    return sorted(kernels - config.stash[_judged].launches.keys())
