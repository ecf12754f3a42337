"""The hooks by which pytest runs this plugin."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates import gate
from pytest_roseinfer.plugin import markers, options
from pytest_roseinfer.settings import Part

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from types import TracebackType

    from pytest_roseinfer.run.coverage import Coverage

# Leaves the harness's own frames out of the traceback of an error that an adapter raised.


_HARNESS = Path(__file__).parents[1]
_TARGETS = _HARNESS / "targets"


def leave_out_the_harness(error: BaseException, adapter: type) -> None:
    """Have an error's traceback begin where the harness called the adapter, if it did.

    What else the harness was handling at that time, such as a failure that it makes smaller, is no
    context of it.
    """
    files, first = _files_of(adapter), error.__traceback__
    while first and _file(first) not in files:
        first = first.tb_next
    error.__traceback__ = first or error.__traceback__
    while context := error.__context__:
        if context.__traceback__ and _is_harness(Path(_file(context.__traceback__))):
            error.__context__ = None
            return
        error = context


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _files_of(adapter: type) -> set[str]:
    """Find the files that an adapter and its bases are in, those of the harness left out."""
    modules = (sys.modules.get(each.__module__) for each in adapter.__mro__)
    files = {file for module in modules if (file := getattr(module, "__file__", None))}
    return {file for file in files if not _is_harness(Path(file))}


def _is_harness(file: Path) -> bool:
    """Return True for all that is shipped but the targets, which are as a user's."""
    return file.is_relative_to(_HARNESS) and not file.is_relative_to(_TARGETS)


# Cuts long tests of ``conformance()`` up on a GPU, where several processes share them.
#
# There a search waits mostly for compilers and for the GPU's answers.


_PARAMETER = "roseinfer_part"


def cut_up(metafunc: pytest.Metafunc) -> None:
    """Make a test of each part: ``test_histories[1of2]``."""
    found: list[Part] = metafunc.cls.parts(metafunc.definition.originalname)
    if len(found) > 1:
        metafunc.fixturenames.append(_PARAMETER)  # no test of a user's takes it as an argument
        metafunc.parametrize(_PARAMETER, found, ids=str)


def long_beside_short(items: list[pytest.Item]) -> None:
    """Order tests so that no process is handed two long ones while others have none.

    A worker of pytest-xdist is told of its next test before it begins one, and keeps it.
    """
    at = [place for place, item in enumerate(items) if markers.is_shipped(item)]
    shipped = [items[place] for place in at]
    parts = [item for item in shipped if part_of(item).of > 1]
    others = [item for item in shipped if part_of(item).of == 1]
    pairs = chain.from_iterable(zip_longest(parts, others))
    for place, item in zip(at, filter(None, pairs), strict=True):
        items[place] = item


def part_of(item: pytest.Item) -> Part:
    """Return the part that a test is, which is the whole for most."""
    call = getattr(item, "callspec", None)
    part: Part = call.params.get(_PARAMETER, Part()) if call else Part()
    return part


_WORKER_ERROR = "roseinfer_usage_error"
_OUTER = pytest.StashKey[tuple[settings.Settings, "Coverage | None"]]()
"""The state of a pytest run that started this one in its own process."""


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
    asked = options.read(config)
    config.stash[_OUTER] = (settings.current(), _swap_coverage(None))
    settings.set_current(asked)
    options.check_baselines(asked)
    if asked.costs_requested or asked.update_costs:
        from pytest_roseinfer.gates.costs import CostGate

        CostGate.of(config)
    if asked.timing.folder:
        from pytest_roseinfer.gates.history import HistoryGate

        HistoryGate.of(config)
    if asked.timing.requested:
        from pytest_roseinfer.gates.timing_gate import TimingGate

        with options.mistakes_are_usage_errors():
            TimingGate.of(config).require_other_side()
    options.check_targets(config, asked)  # comes last, since it imports them


def pytest_unconfigure(config: pytest.Config) -> None:
    if outer := config.stash.get(_OUTER, None):
        settings.set_current(outer[0])
        _swap_coverage(outer[1])


def _swap_coverage(new: Coverage | None) -> Coverage | None:
    """Replace this process's coverage, by an empty one if need be, and return the old one."""
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
    from pytest_roseinfer.plugin.run_again import run_again

    return run_again(config, file)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not options.configured(config):
        return []
    asked = settings.current()
    # Workers of pytest-xdist collect the tests, and what they find is not described here.
    shared_out = config.pluginmanager.hasplugin("dsession") and options.tests_targets(config)
    return _describe(asked.targets if shared_out else asked.chosen_targets, asked)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say what the header could not say before the tests were collected."""
    shipped = [item for item in items if markers.is_shipped(item)]
    if not shipped:
        return []
    from pytest_roseinfer.run import coverage

    asked = settings.current()
    names = dict.fromkeys(coverage.name_of(item.cls.adapter) for item in shipped)  # type: ignore[attr-defined]
    unsaid = [name for name in names if name not in asked.chosen_targets]
    return _describe(unsaid, None if options.configured(config) else asked)


def _describe(targets: Iterable[str], asked: settings.Settings | None) -> list[str]:
    """Name targets, and describe the run unless the header did so."""
    from pytest_roseinfer import environment

    lines = [f"roseinfer: target {environment.describe_target(name)}" for name in targets]
    return lines + (environment.describe_run(asked) if asked else [])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    adapters = "pytest_roseinfer.adapters.base" in sys.modules
    if adapters and report.passed and isinstance(collector, pytest.Module):
        from pytest_roseinfer.suite.shipped_tests import warn_of_uncollected, warn_of_unused

        try:
            warn_of_uncollected(collector, report.result)
            warn_of_unused(collector, report.result)
        except Warning as warning:  # where warnings are errors
            report.outcome, report.longrepr = "failed", str(warning)
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if settings.current().gpu and markers.is_shipped(metafunc.definition):
        # merged

        cut_up(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    if settings.current().update_costs:
        from pytest_roseinfer.gates.costs import CostGate

        CostGate.of(item.config).note_collected(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        markers.check(items)
    except pytest.UsageError as error:
        output = getattr(config, "workeroutput", None)
        if output is None:
            raise
        # Raised in a worker of pytest-xdist, it would show as an internal error of its controller.
        output[_WORKER_ERROR] = str(error)
        items.clear()
    if not settings.current().gpu:
        markers.skip_without_gpu(items)
    elif hasattr(config, "workerinput"):
        # merged

        long_beside_short(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    asked = settings.current()
    settings.set_current(markers.budget(item, asked))
    searching = _searching(item) if markers.is_shipped(item) else nullcontext()
    try:
        with searching:
            result = yield
    finally:
        settings.set_current(asked)
    gate.require_checks(item)
    return result


@contextmanager
def _searching(item: pytest.Item) -> Iterator[None]:
    """Have a shipped test search its part, and end steps of it that do not come back.

    Last words go past pytest's capture.
    """
    # merged
    from pytest_roseinfer.run.interpreter import fast_interpreter
    from pytest_roseinfer.run.watchdog import watching

    settings.set_current(replace(settings.current(), part=part_of(item)))
    capture = item.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        stderr = os.dup(2)
    try:
        fast = settings.current().fast_interpreter or item.cls.adapter.fast_interpreter  # type: ignore[attr-defined]
        faster = fast_interpreter() if fast else nullcontext()
        with watching(settings.current().step_seconds, stderr), faster:
            yield
    finally:
        os.close(stderr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a difference as its message alone: its traceback only leads through the harness.

    Of another error, what the user's own code did is shown.
    """
    divergence = sys.modules.get("pytest_roseinfer.findings.divergence")
    if call.excinfo is None or divergence is None or item.config.getoption("fulltrace"):
        return (yield)
    # merged

    failure = call.excinfo.value
    if markers.is_shipped(item) and isinstance(failure, Exception):  # pytest skips with others
        for error in filter(None, (failure, failure.__cause__)):
            leave_out_the_harness(error, item.cls.adapter)  # type: ignore[attr-defined]
        call.excinfo = pytest.ExceptionInfo.from_exception(failure)
    report = yield
    if isinstance(failure, divergence.Difference):
        shown = call.excinfo.getrepr(style="value", chain=False)
        if shown.reprcrash:  # what the short summary says
            shown.reprcrash.message = failure.what
        report.longrepr = shown
        if failure.__cause__:
            trace = "".join(traceback.format_exception(failure.__cause__))
            report.sections.append(("raised by what was tested", trace))
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the seed that was drawn here."""
    node.workerinput["roseinfer_seed"] = settings.current().seed


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    if error := output.get(_WORKER_ERROR):
        raise pytest.UsageError(error)
    gate.take_over(node.config, output)


@pytest.hookimpl(tryfirst=True)  # before the JUnit file is written
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("collectonly"):
        return
    asked = settings.current()
    if "pytest_roseinfer.run.coverage" in sys.modules or asked.named_targets or asked.reports:
        from pytest_roseinfer.report.coverage_gate import CoverageGate

        CoverageGate.of(session.config)
    gate.finish(session)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("collectonly"):
        gate.show(terminalreporter)
