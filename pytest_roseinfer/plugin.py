"""The pytest plugin: options, markers, fixtures and the verdict at the end.

It is active in every pytest run of an environment that has it, so it imports nothing
heavy: torch, triton, transformers and hypothesis come in with what uses them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from pytest_roseinfer import coverage, settings
from pytest_roseinfer.settings import PROFILES, SHIPPED_TARGETS, Settings

_PROFILE_NAMES = ", ".join(PROFILES)
_WORKER_KEY = "roseinfer_coverage"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("roseinfer", "conformance of KV caches")
    group.addoption(
        "--roseinfer-gpu",
        action="store_true",
        help="run on the GPU with compiled kernels; an error when there is none",
    )
    group.addoption(
        "--roseinfer-target",
        action="append",
        metavar="MODULE:CLASS",
        help="adapter for pytest_roseinfer.suite to test; may be repeated",
    )
    group.addoption(
        "--roseinfer-profile",
        choices=list(PROFILES),
        help=f"how hard to look: {_PROFILE_NAMES}",
    )
    group.addoption("--roseinfer-examples", type=int, help="histories for each search")
    group.addoption("--roseinfer-steps", type=int, help="most steps of one history")
    group.addoption("--roseinfer-seed", type=int, help="make the search repeatable")
    group.addoption(
        "--roseinfer-required-paths",
        choices=["on", "off"],
        help="whether a declared path that was not reached fails the run",
    )
    group.addoption(
        "--roseinfer-replay", metavar="FILE", help="run the history in a trace file, and only it"
    )
    parser.addini("roseinfer_targets", "adapters for pytest_roseinfer.suite", type="linelist")
    parser.addini("roseinfer_profile", f"how hard to look: {_PROFILE_NAMES}", default="dev")
    parser.addini("roseinfer_examples", "histories for each search")
    parser.addini("roseinfer_steps", "most steps of one history")
    parser.addini("roseinfer_seed", "make the search repeatable")
    parser.addini("roseinfer_required_paths", "fail on unreached paths", type="bool", default=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "roseinfer_gpu: needs a GPU; runs with --roseinfer-gpu")
    settings.set_current(_settings(config))
    coverage.reset()


def _settings(config: pytest.Config) -> Settings:
    gpu = bool(config.getoption("--roseinfer-gpu"))
    if gpu and not _has_gpu():
        raise pytest.UsageError("--roseinfer-gpu: torch finds no CUDA device on this machine")
    profile = config.getoption("--roseinfer-profile") or config.getini("roseinfer_profile")
    if profile not in PROFILES:
        raise pytest.UsageError(f"roseinfer_profile = {profile}: choose one of {_PROFILE_NAMES}")
    required = config.getoption("--roseinfer-required-paths")
    return Settings(
        profile=profile,
        examples=_number(config, "examples", at_least=1) or PROFILES[profile].examples,
        steps=_number(config, "steps", at_least=1) or PROFILES[profile].steps,
        seed=_number(config, "seed", at_least=0),
        gpu=gpu,
        require_paths=(
            required == "on" if required else bool(config.getini("roseinfer_required_paths"))
        ),
        targets=tuple(
            config.getoption("--roseinfer-target")
            or config.getini("roseinfer_targets")
            or SHIPPED_TARGETS
        ),
        failures_dir=str(Path(str(config.rootpath)) / ".roseinfer"),
    )


def _number(config: pytest.Config, name: str, *, at_least: int) -> int | None:
    value = config.getoption(f"--roseinfer-{name}")
    if value is None:
        text = config.getini(f"roseinfer_{name}")
        if not text:
            return None
        try:
            value = int(text)
        except ValueError:
            raise pytest.UsageError(f"roseinfer_{name} = {text}: not a whole number") from None
    if value < at_least:
        raise pytest.UsageError(f"roseinfer {name} = {value}: must be at least {at_least}")
    return int(value)


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_report_header(config: pytest.Config) -> list[str]:
    asked = settings.current()
    options = ("target", "profile", "examples", "steps", "seed", "required-paths")
    chosen = any(config.getoption(f"--roseinfer-{name}") is not None for name in options)
    if not (chosen or asked.gpu or config.getini("roseinfer_targets")):
        return []
    seed = "random" if asked.seed is None else asked.seed
    runtime = os.environ.get("TRITON_INTERPRET")
    return [
        f"roseinfer: {', '.join(asked.targets)}",
        f"roseinfer: device {asked.device}, profile {asked.profile} ({asked.examples} examples of "
        f"up to {asked.steps} steps), seed {seed}"
        + (f", TRITON_INTERPRET={runtime}" if runtime is not None else ""),
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if settings.current().gpu:
        return
    skip = pytest.mark.skip(reason="needs a GPU: run with --roseinfer-gpu")
    for item in items:
        marker = item.get_closest_marker("roseinfer_gpu")
        if marker is None:
            continue
        if marker.args or marker.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: the marker roseinfer_gpu takes no arguments")
        item.add_marker(skip)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With ``--roseinfer-replay``, run the trace instead of any test."""
    file = config.getoption("--roseinfer-replay")
    if not file:
        return None
    from pytest_roseinfer.replay import replay

    return replay(file)


# ------------------------------------------------------------------- the verdict at the end


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    seen = coverage.current()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_WORKER_KEY] = seen.to_json()
        return
    failed = session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if seen.targets and settings.current().require_paths and seen.missing() and not failed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    coverage.current().add(getattr(node, "workeroutput", {}).get(_WORKER_KEY, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seen = coverage.current()
    if not seen.targets:
        return
    from pytest_roseinfer.report.terminal import show

    show(terminalreporter, seen, settings.current())


# -------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def roseinfer_device() -> str:
    """Where caches under test live: ``"cuda"`` with --roseinfer-gpu, else ``"cpu"``."""
    settings.choose_kernel_runtime()
    return settings.current().device
