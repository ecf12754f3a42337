"""The markers, what they may be given, and what they do."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_roseinfer.settings import Settings

_GPU = "roseinfer_gpu"
_BUDGET = "roseinfer"
_COSTS = "roseinfer_costs"
_TPOT = "roseinfer_tpot"


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _whole(value: object) -> bool:
    return isinstance(value, int) and _number(value)


def _share(value: Any) -> bool:
    return _number(value) and value < 1


def _names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


_WHOLE = ("a whole number from 1", _whole)
_NAMES = ("a list of names", _names)
_ARGUMENTS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    _BUDGET: {"examples": _WHOLE, "steps": _WHOLE},
    _COSTS: {"packages": _NAMES, "keyed_by": _NAMES, "must_not_drop": _NAMES},
    _TPOT: {
        "margin": ("a number above 0 and below 1", _share),
        "seconds": ("a number above 0", _number),
        "cpus": _WHOLE,
        "series_per_process": _WHOLE,
    },
}
"""What each argument must be, in words and as a check."""
_SHOWN = {_BUDGET: "{}=N", _COSTS: "{}=[...]", _TPOT: "{}"}
LINES = (
    f"{_GPU}: needs a GPU; runs with --roseinfer-gpu",
    f"{_BUDGET}(examples=N, steps=N): how hard to look here, unless the command line says",
    f"{_COSTS}(packages=[...], keyed_by=[...], must_not_drop=[...]): what counts as work here; "
    "the test must take the fixture of this name",
    f"{_TPOT}(margin=0.02, seconds=300, cpus=1, series_per_process=1): how the step that this test "
    "times is compared; the test must take the fixture of this name",
)


def check(items: Iterable[pytest.Item]) -> None:
    """Refuse arguments that a marker does not have, and marks that a test cannot have."""
    for item in items:
        for marker in item.iter_markers(_GPU):
            if marker.args or marker.kwargs:
                raise pytest.UsageError(f"{item.nodeid}: the marker {_GPU} takes no arguments")
        for name in _ARGUMENTS:
            for marker in item.iter_markers(name):
                _check_arguments(item, marker)
        for name in (_COSTS, _TPOT):
            if item.get_closest_marker(name) and name not in getattr(item, "fixturenames", ()):
                raise pytest.UsageError(
                    f"{item.nodeid}: marked {name}, it does not take the fixture of this name, and "
                    "so compares nothing"
                )
        _check_shipped(item)


def skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a GPU: run with --roseinfer-gpu")
    for item in items:
        if item.get_closest_marker(_GPU):
            item.add_marker(skip)


def budget(item: pytest.Item, asked: Settings) -> Settings:
    """The settings for one test: what its marker says and the command line leaves open."""
    numbers = {"examples": asked.examples, "steps": asked.steps} | {
        name: number
        for name, number in _said(item, _BUDGET).items()
        if item.config.getoption(f"--roseinfer-{name}") is None
    }
    return replace(asked, examples=numbers["examples"], steps=numbers["steps"])


def costs(item: pytest.Item) -> dict[str, tuple[str, ...]]:
    """The names that a test's markers say, for each argument."""
    return dict.fromkeys(_ARGUMENTS[_COSTS], ()) | {
        name: tuple(names) for name, names in _said(item, _COSTS).items()
    }


def tpot(item: pytest.Item) -> dict[str, Any]:
    """What a test's markers say about its timing."""
    return _said(item, _TPOT)


def _said(item: pytest.Item, name: str) -> dict[str, Any]:
    """The arguments of all markers of that name; the closest says last."""
    said: dict[str, Any] = {}
    for marker in reversed([*item.iter_markers(name)]):
        said |= marker.kwargs
    return said


def _check_shipped(item: pytest.Item) -> None:
    """A shipped test runs, whatever is marked around it."""
    if not is_shipped(item):
        return
    from pytest_roseinfer.running.shipped_tests import excuses

    for marker in item.iter_markers():
        if marker.name in ("skip", "skipif") or (marker.name == "xfail" and not excuses(marker)):
            raise pytest.UsageError(
                f"{item.nodeid}: a test of pytest_roseinfer cannot be marked {marker.name} in this "
                "way. If the target is known to fail it, mark it: @pytest.mark.xfail(reason=...); "
                "deselect what is not to run: -k, -m, --deselect"
            )


def is_shipped(item: pytest.Item) -> bool:
    """True for a test of ``conformance()``."""
    shipped = sys.modules.get("pytest_roseinfer.running.shipped_tests")
    owner = getattr(item, "cls", None)
    return shipped is not None and owner is not None and issubclass(owner, shipped.ShippedTests)


def _check_arguments(item: pytest.Item, marker: pytest.Mark) -> None:
    known = _ARGUMENTS[marker.name]
    unknown = [repr(argument) for argument in marker.args]
    unknown += [name for name in marker.kwargs if name not in known]
    if unknown:
        *others, last = map(_SHOWN[marker.name].format, known)
        raise pytest.UsageError(
            f"{item.nodeid}: the marker {marker.name} does not take {', '.join(unknown)}, only "
            f"{', '.join(others)} and {last}"
        )
    for name, value in marker.kwargs.items():
        expected, holds = known[name]
        if not holds(value):
            raise pytest.UsageError(
                f"{item.nodeid}: the marker {marker.name} has {name}={value!r}: expected {expected}"
            )
