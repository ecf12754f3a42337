"""The tests of ``conformance()``: parts, watchdog, tracebacks, and warnings of what is not run."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.plugin.markers import is_shipped
from pytest_roseinfer.settings import Part
from pytest_roseinfer.suite.shipped_tests import ShippedTests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

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
    at = [place for place, item in enumerate(items) if is_shipped(item)]
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


# Has a shipped test search, and end steps that do not come back.


@contextmanager
def searching(item: pytest.Item) -> Iterator[None]:
    """Have a shipped test search its part, and end steps of it that do not come back.

    Last words go past pytest's capture.
    """
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


# Classes that were meant to be collected and are not, and adapters without tests.


def warn_of_uncollected(
    module: pytest.Module, collected: Sequence[pytest.Item | pytest.Collector]
) -> None:
    """Warn of each class in a module that was not collected, and none that derives from it."""
    taken = [each.obj for each in collected if isinstance(each, pytest.Class)]
    for name, value in vars(module.obj).items():
        if not name.startswith("_") and _is_made(value) and not _is_taken(value, taken):
            module.warn(
                pytest.PytestCollectionWarning(
                    f"{name} is a class of conformance() that is not run: pytest collects classes "
                    f"whose names begin with {' or '.join(module.config.getini('python_classes'))}"
                )
            )


def warn_of_unused(
    module: pytest.Module, collected: Sequence[pytest.Item | pytest.Collector]
) -> None:
    """Warn of each adapter in a module that has no tests, and no class for them."""
    values = vars(module.obj).values()
    if not all(map(_is_adapter, collected)) or any(map(_is_made, values)):
        return
    for value in values:
        own = isinstance(value, type) and value.__module__ == module.obj.__name__
        if own and issubclass(value, Adapter) and not value.__name__.startswith("_"):
            name = value.__name__.removeprefix("Test")
            rename = f"name it {name}, and " if name != value.__name__ else ""
            module.warn(
                pytest.PytestCollectionWarning(
                    f"{value.__name__} is an adapter that nothing here tests: {rename}write "
                    f"Test{name} = conformance({name})"
                )
            )


def _is_adapter(collected: pytest.Item | pytest.Collector) -> bool:
    """Tell if pytest took an adapter for a class of tests, for its name."""
    return isinstance(collected, pytest.Class) and issubclass(collected.obj, Adapter)


def _is_made(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ShippedTests) and hasattr(value, "adapter")


def _is_taken(made: Any, taken: Sequence[type]) -> bool:
    return any(issubclass(each, made) for each in taken)
