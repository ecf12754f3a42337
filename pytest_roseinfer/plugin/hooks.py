"""Pytest hooks of this plugin."""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates import gate
from pytest_roseinfer.plugin import markers, options

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from pytest_roseinfer.run.coverage import Coverage

_WORKER_ERROR = "roseinfer_usage_error"
_OUTER = pytest.StashKey[tuple[settings.Settings, "Coverage | None"]]()
"""State of the outer pytest run, when it started this one in the same process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


@pytest.hookimpl(tryfirst=True)  # before any conftest.py, which may import torch
def pytest_load_initial_conftests(args: list[str]) -> None:
    options.refuse_unknown(args)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        from pytest_roseinfer.suite.workers import die_by_ctrl_c

        die_by_ctrl_c(config.workerinput)
    for line in markers.LINES:
        config.addinivalue_line("markers", line)
    run_settings = replace(options.read(config), announce=gate.terminal_of(config))
    config.stash[_OUTER] = (settings.current(), _swap_coverage(None))
    settings.set_current(run_settings)
    options.check_baselines(run_settings)
    if run_settings.costs_requested or run_settings.update_costs:
        from pytest_roseinfer.gates.costs import CostGate

        CostGate.of(config)
    if run_settings.timing.folder:
        from pytest_roseinfer.gates.history import HistoryGate

        HistoryGate.of(config)
    if run_settings.timing.requested:
        from pytest_roseinfer.gates.timing_gate import TimingGate

        with options.raising_usage_errors():
            TimingGate.of(config).require_other_side()
    options.check_targets(config, run_settings)  # last, because it imports the targets


def pytest_unconfigure(config: pytest.Config) -> None:
    if outer := config.stash.get(_OUTER, None):
        settings.set_current(outer[0])
        _swap_coverage(outer[1])


def _swap_coverage(new: Coverage | None) -> Coverage | None:
    """Replace this process's coverage, by an empty one for None, and return the previous one."""
    coverage = sys.modules.get("pytest_roseinfer.run.coverage")
    if coverage is None:
        return None
    old: Coverage = coverage.current()
    coverage.set_current(new or coverage.Coverage())
    return old


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Replay a trace instead of running tests, if the command line names one."""
    file = config.getoption("--roseinfer-replay")
    if not file:
        return None
    from pytest_roseinfer.plugin.replay import replay_trace

    return replay_trace(config, file)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not options.configured(config):
        return []
    run_settings = settings.current()
    # Workers of pytest-xdist collect the tests, so the controller cannot list their targets later.
    distributed = config.pluginmanager.hasplugin("dsession") and options.tests_targets(config)
    targets = run_settings.targets if distributed else run_settings.chosen_targets
    return _describe(targets, run_settings)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Describe targets that the header could not name before the tests were collected."""
    shipped = [item for item in items if markers.is_shipped(item)]
    if not shipped or config.get_verbosity() < 0:
        return []
    from pytest_roseinfer.run import coverage

    run_settings = settings.current()
    names = dict.fromkeys(coverage.name_of(item.cls.adapter) for item in shipped)  # type: ignore[attr-defined]
    unlisted = [name for name in names if name not in run_settings.chosen_targets]
    return _describe(unlisted, None if options.configured(config) else run_settings)


def _describe(targets: Iterable[str], run_settings: settings.Settings | None) -> list[str]:
    """Name targets, and describe the run unless the header did so."""
    from pytest_roseinfer import environment

    lines = [f"roseinfer: target {environment.describe_target(name)}" for name in targets]
    return lines + (environment.describe_run(run_settings) if run_settings else [])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    adapters = "pytest_roseinfer.adapters.base" in sys.modules
    if adapters and report.passed and isinstance(collector, pytest.Module):
        from pytest_roseinfer.plugin.shipped import warn_of_uncollected, warn_of_unused

        try:
            warn_of_uncollected(collector, report.result)
            warn_of_unused(collector, report.result)
        except Warning as warning:  # where warnings are errors
            report.outcome, report.longrepr = "failed", str(warning)
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    workers: int = getattr(metafunc.config, "workerinput", {}).get("workercount", 1)
    if (settings.current().gpu or workers > 1) and markers.is_shipped(metafunc.definition):
        from pytest_roseinfer.plugin import shipped

        shipped.split_into_parts(metafunc, None if settings.current().gpu else workers)


def pytest_itemcollected(item: pytest.Item) -> None:
    if settings.current().update_costs:
        from pytest_roseinfer.gates.costs import CostGate

        CostGate.of(item.config).note_collected(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        markers.check(items)
        if settings.current().known_findings:
            from pytest_roseinfer.plugin import shipped

            shipped.check_known_findings(items)
    except pytest.UsageError as error:
        output = getattr(config, "workeroutput", None)
        if output is None:
            raise
        # Raised in a pytest-xdist worker, it would appear as an internal error of the controller.
        output[_WORKER_ERROR] = str(error)
        items.clear()
    if not settings.current().gpu:
        markers.skip_without_gpu(items)
    if hasattr(config, "workerinput"):
        from pytest_roseinfer.plugin import shipped

        shipped.interleave_long_tests(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    run_settings = settings.current()
    settings.set_current(markers.budget(item, run_settings))
    try:
        with ExitStack() as stack:
            if markers.is_shipped(item):
                from pytest_roseinfer.plugin import shipped

                shipped.forget_failure(item)
                stack.enter_context(shipped.expect_known_findings(item))
                stack.enter_context(shipped.search_context(item))
            result = yield
    finally:
        settings.set_current(run_settings)
    gate.require_checks(item)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a difference as its message alone, and other errors by the user's frames.

    The traceback of a difference has nothing but frames of the harness.
    """
    divergence = sys.modules.get("pytest_roseinfer.findings.divergence")
    if call.excinfo is None and markers.is_shipped(item):
        from pytest_roseinfer.plugin import shipped

        report = yield
        shipped.report_unexpected_pass(item, report)
        return report
    if call.excinfo is None or divergence is None or item.config.getoption("fulltrace", False):
        return (yield)
    failure = call.excinfo.value
    if markers.is_shipped(item) and isinstance(failure, Exception):  # skips are BaseException
        from pytest_roseinfer.plugin import shipped

        for error in filter(None, (failure, failure.__cause__)):
            shipped.trim_traceback(error, item.cls.adapter)  # type: ignore[attr-defined]
        call.excinfo = pytest.ExceptionInfo.from_exception(failure)
    report = yield
    if isinstance(failure, divergence.Difference):
        shown = call.excinfo.getrepr(style="value", chain=False)
        if shown.reprcrash:  # the short summary's text
            shown.reprcrash.message = failure.summary
        report.longrepr = shown
        if failure.__cause__:
            trace = "".join(traceback.format_exception(failure.__cause__))
            report.sections.append(("raised by what was tested", trace))
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the controller's seed to a pytest-xdist worker."""
    node.workerinput["roseinfer_seed"] = settings.current().seed


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    if error := output.get(_WORKER_ERROR):
        raise pytest.UsageError(error)
    gate.merge_worker_output(node.config, output)


@pytest.hookimpl(tryfirst=True)  # before the JUnit file is written
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("collectonly"):
        return
    run_settings = settings.current()
    if (
        "pytest_roseinfer.run.coverage" in sys.modules
        or run_settings.named_targets
        or run_settings.reports
    ):
        from pytest_roseinfer.report.coverage_gate import CoverageGate

        CoverageGate.of(session.config)
    gate.finish(session)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("collectonly"):
        gate.show(terminalreporter)
