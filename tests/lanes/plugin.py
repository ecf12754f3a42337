"""Pytest plugin with bounds checks of a session's launches: ``pytest -p tests.lanes.plugin ...``.

A test fails if one of its kernels accesses memory out of bounds, even if it catches the error of
the launch. Not for tests of pointers themselves, in ``tests/lanes`` and ``tests/kernels``.
"""

from __future__ import annotations

import os

# Set before Triton is imported and a GPU is looked for: only interpreted kernels are checked.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.kernels.calls import CALLS
from tests.lanes.bounds import BoundsReport, OutOfBounds, checking_bounds

if TYPE_CHECKING:
    from collections.abc import Generator

EVERY_KERNEL = "--require-every-kernel"
_report = pytest.StashKey[BoundsReport]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        EVERY_KERNEL, action="store_true", help="fail if a kernel of roseinfer is never launched"
    )


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    config.stash[_report] = stack.enter_context(checking_bounds())
    config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    findings = item.config.stash[_report].findings
    if findings:
        message = "\n".join(f"{access}: {first}" for access, first in findings.items())
        findings.clear()
        raise OutOfBounds(message)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption(EVERY_KERNEL) and _never_launched(session.config):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    launches = config.stash[_report].launches
    terminalreporter.section("kernel launches with bounds checks")
    for kernel, times in sorted(launches.items()):
        terminalreporter.line(f"{times:8} {kernel}")
    if missing := _never_launched(config):
        terminalreporter.line(f"never launched: {', '.join(missing)}")


def _never_launched(config: pytest.Config) -> list[str]:
    kernels = {kernel for _, each in CALLS.values() for kernel in each}
    return sorted(kernels - config.stash[_report].launches.keys())
