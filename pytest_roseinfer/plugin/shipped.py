"""Support for ``conformance()`` tests: parts, watchdog, tracebacks, and collection warnings."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.findings.known import digest_of
from pytest_roseinfer.plugin.markers import is_shipped
from pytest_roseinfer.run import coverage
from pytest_roseinfer.settings import KnownFinding, Part
from pytest_roseinfer.suite.shipped_tests import ShippedTests
from pytest_roseinfer.words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

# Splitting of long tests among processes. On a GPU there are parts even for one process, so that
# the examples are the same with any number: a search there mostly waits for compilers.


_PARAMETER = "roseinfer_part"


def split_into_parts(metafunc: pytest.Metafunc, workers: int | None = None) -> None:
    """Make one test of each part, at most ``workers``: ``test_histories[1of2]``."""
    parts: list[Part] = metafunc.cls.parts(metafunc.definition.originalname, workers)
    if len(parts) > 1:
        metafunc.fixturenames.append(_PARAMETER)  # tests do not take it as an argument
        metafunc.parametrize(_PARAMETER, parts, ids=str)


def interleave_long_tests(items: list[pytest.Item]) -> None:
    """Order tests so that no process gets two long ones while others have none.

    A pytest-xdist worker gets its next test before it starts the current one, and keeps it.
    """
    indices = [index for index, item in enumerate(items) if is_shipped(item)]
    shipped = [items[index] for index in indices]
    parts = [item for item in shipped if part_of(item).of > 1]
    others = [item for item in shipped if part_of(item).of == 1]
    pairs = chain.from_iterable(zip_longest(parts, others))
    for index, item in zip(indices, filter(None, pairs), strict=True):
        items[index] = item


def part_of(item: pytest.Item) -> Part:
    """Return the part that a test runs; the whole for most tests."""
    call = getattr(item, "callspec", None)
    part: Part = call.params.get(_PARAMETER, Part()) if call else Part()
    return part


def forget_failure(item: pytest.Item) -> None:
    """Forget an earlier failure of a test that runs again, as with pytest-rerunfailures."""
    name = coverage.name_of(item.cls.adapter)  # type: ignore[attr-defined]
    if target := coverage.current().targets.get(name):
        target.forget_failure()


# Known findings: a test that meets only such is xfailed, and one that misses its own is XPASS.


_MISSED = pytest.StashKey[list[KnownFinding]]()
"""Known findings that a test ran to its end without."""


def check_known_findings(items: Iterable[pytest.Item]) -> None:
    """Refuse known findings of tests that their targets do not have."""
    for owner in {item.cls for item in items if is_shipped(item)}:  # type: ignore[attr-defined]
        for known in settings.current().known_of(coverage.name_of(owner.adapter)).values():
            if known.test not in owner.shipped():
                suggestion = did_you_mean(known.test, owner.shipped())
                raise pytest.UsageError(
                    f"{known}: {known.target} has no test {known.test}{suggestion}"
                )


@contextmanager
def expect_known_findings(item: pytest.Item) -> Iterator[None]:
    """Report a test as xfailed if it fails by known findings alone."""
    name = coverage.name_of(item.cls.adapter)  # type: ignore[attr-defined]
    item.stash[_MISSED] = []
    known = settings.current().known_of(name)
    if not known:
        yield
        return
    target = coverage.current().of(item.cls.adapter)  # type: ignore[attr-defined]
    since, skipped = Counter(target.known_met), target.num_skipped
    try:
        yield
    except Exception as failure:
        digest = digest_of(name, failure)
        if digest not in known:
            raise
        target.known_met[digest] += 1
    met = [known[digest] for digest in target.known_met - since]
    if target.num_skipped == skipped:
        missed = _missed_by(item, known.values(), met)
        item.stash[_MISSED] = missed if part_of(item).of == 1 else []
        target.known_missed += [each.digest for each in missed]
    if met:
        pytest.xfail("; ".join(map(str, met)))


def _missed_by(
    item: pytest.Item, known: Iterable[KnownFinding], met: Sequence[KnownFinding]
) -> list[KnownFinding]:
    """Return the known findings of a test that it did not meet.

    Entries with the same reason and link are one defect, which need not show in all of its ways.
    """
    test = getattr(item, "originalname", item.name)
    met_defects = {(each.reason, each.link) for each in met}
    return [
        each for each in known if each.test == test and (each.reason, each.link) not in met_defects
    ]


def report_unexpected_pass(item: pytest.Item, report: pytest.TestReport) -> None:
    """Turn the report of a passed test into XPASS if it should have met a known finding."""
    missed = item.stash.get(_MISSED, [])
    if not (missed and report.when == "call" and report.passed):
        return
    words = "; ".join(map(str, missed))
    if any(_is_strict(item.config, each) for each in missed):
        report.outcome, report.longrepr = "failed", f"[XPASS(strict)] {words}"
    else:
        report.wasxfail = words


def _is_strict(config: pytest.Config, finding: KnownFinding) -> bool:
    """Return True if a missed finding fails its test, by its own key or by pytest's setting."""
    if finding.strict is not None:
        return finding.strict
    strict = config.getini("xfail_strict")
    if strict is None:  # pytest 9 has a setting for all that can be strict
        strict = config.getini("strict")
    return bool(strict)


@contextmanager
def search_context(item: pytest.Item) -> Iterator[None]:
    """Set up a shipped test: its part of the searches, the watchdog and the interpreter.

    The watchdog writes its last message to the real stderr, past pytest's capture.
    """
    from pytest_roseinfer.run.interpreter import fast_interpreter
    from pytest_roseinfer.run.watchdog import limit_steps

    settings.set_current(replace(settings.current(), part=part_of(item)))
    capture = item.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        stderr = os.dup(2)
    try:
        fast = settings.current().fast_interpreter or item.cls.adapter.fast_interpreter  # type: ignore[attr-defined]
        faster = fast_interpreter() if fast else nullcontext()
        with limit_steps(settings.current().step_seconds, stderr), faster:
            yield
    finally:
        os.close(stderr)


# Tracebacks without the harness's own frames.


_HARNESS = Path(__file__).parents[1]
_TARGETS = _HARNESS / "targets"


def trim_traceback(error: BaseException, adapter: type) -> None:
    """Start an error's traceback where the harness called the adapter, if it did.

    Also drop a context that belongs to the harness, such as a failure that was being shrunk.
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
    """Return the source files of an adapter and its bases, without those of the harness."""
    modules = (sys.modules.get(each.__module__) for each in adapter.__mro__)
    files = {file for module in modules if (file := getattr(module, "__file__", None))}
    return {file for file in files if not _is_harness(Path(file))}


def _is_harness(file: Path) -> bool:
    """Return True for the plugin's files except targets, which count as user code."""
    return file.is_relative_to(_HARNESS) and not file.is_relative_to(_TARGETS)


# Warnings of uncollected classes and of adapters without tests.


def warn_of_uncollected(
    module: pytest.Module, collected: Sequence[pytest.Item | pytest.Collector]
) -> None:
    """Warn of each ``conformance()`` class that was not collected, nor any subclass of it."""
    classes = [each.obj for each in collected if isinstance(each, pytest.Class)]
    for name, value in vars(module.obj).items():
        if (
            not name.startswith("_")
            and _is_conformance_class(value)
            and not _is_collected(value, classes)
        ):
            module.warn(
                pytest.PytestCollectionWarning(
                    f"{name}: class of conformance() is not run; pytest collects classes whose "
                    f"names begin with {' or '.join(module.config.getini('python_classes'))}"
                )
            )


def warn_of_unused(
    module: pytest.Module, collected: Sequence[pytest.Item | pytest.Collector]
) -> None:
    """Warn of each adapter in a module that has neither tests nor a ``conformance()`` class."""
    values = vars(module.obj).values()
    if not all(map(_is_adapter, collected)) or any(map(_is_conformance_class, values)):
        return
    for value in values:
        is_local = isinstance(value, type) and value.__module__ == module.obj.__name__
        if is_local and issubclass(value, Adapter) and not value.__name__.startswith("_"):
            name = value.__name__.removeprefix("Test")
            rename = f"name it {name}, and " if name != value.__name__ else ""
            module.warn(
                pytest.PytestCollectionWarning(
                    f"{value.__name__}: adapter without tests in this module; {rename}write "
                    f"Test{name} = conformance({name})"
                )
            )


def _is_adapter(collected: pytest.Item | pytest.Collector) -> bool:
    """Return True if pytest collected an adapter as a test class because of its name."""
    return isinstance(collected, pytest.Class) and issubclass(collected.obj, Adapter)


def _is_conformance_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ShippedTests) and hasattr(value, "adapter")


def _is_collected(test_class: Any, classes: Sequence[type]) -> bool:
    return any(issubclass(each, test_class) for each in classes)
