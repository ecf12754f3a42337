"""Markers, their arguments, and their effects."""

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
COSTS = "roseinfer_costs"
TPOT = "roseinfer_tpot"


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _share(value: Any) -> bool:
    return _number(value) and value < 1


def _whole(value: object) -> bool:
    return isinstance(value, int) and _number(value)


def _names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


_EXPECTED: dict[Callable[[Any], bool], str] = {
    _number: "a number above 0",
    _share: "a number above 0 and below 1",
    _whole: "a whole number from 1",
    _names: "a list of names",
}
_ARGUMENTS: dict[str, dict[str, Callable[[Any], bool]]] = {
    _GPU: {},
    _BUDGET: {"examples": _whole, "steps": _whole},
    COSTS: {"packages": _names, "keyed_by": _names, "must_not_drop": _names},
    TPOT: {"margin": _share, "seconds": _number, "cpus": _whole, "series_per_process": _whole},
}
"""Arguments of each marker, each with its check."""
_SHOWN = {_BUDGET: "{}=N", COSTS: "{}=[...]", TPOT: "{}"}
LINES = (
    f"{_GPU}: needs a GPU; runs with --roseinfer-gpu",
    f"{_BUDGET}(examples=N, steps=N): search effort of this test; command-line options override it",
    f"{COSTS}(packages=[...], keyed_by=[...], must_not_drop=[...]): what this test counts as work; "
    "the test must take the fixture of this name",
    f"{TPOT}(margin=0.02, seconds=300, cpus=1, series_per_process=1): how this test compares "
    "step times; the test must take the fixture of this name",
)


def check(items: Iterable[pytest.Item]) -> None:
    """Refuse unknown arguments of a marker, and markers that a test cannot have."""
    for item in items:
        for marker in item.iter_markers():
            if marker.name in _ARGUMENTS:
                _check_arguments(item, marker)
            if marker.name in (COSTS, TPOT) and marker.name not in getattr(
                item, "fixturenames", ()
            ):
                raise pytest.UsageError(
                    f"{item.nodeid}: marked {marker.name}, but does not take the fixture of this "
                    "name and so compares nothing; add the fixture or remove the marker"
                )
        if is_shipped(item):
            _check_shipped(item)


def _check_arguments(item: pytest.Item, marker: pytest.Mark) -> None:
    about, allowed = f"{item.nodeid}: the marker {marker.name}", _ARGUMENTS[marker.name]
    unknown = [repr(argument) for argument in marker.args]
    unknown += [name for name in marker.kwargs if name not in allowed]
    if unknown and not allowed:
        raise pytest.UsageError(f"{about} takes no arguments")
    if unknown:
        *others, last = map(_SHOWN[marker.name].format, allowed)
        raise pytest.UsageError(
            f"{about} does not take {', '.join(unknown)}, only {', '.join(others)} and {last}"
        )
    for name, value in marker.kwargs.items():
        if not allowed[name](value):
            expected = _EXPECTED[allowed[name]]
            raise pytest.UsageError(f"{about} has {name}={value!r}: expected {expected}")


def _check_shipped(item: pytest.Item) -> None:
    """Refuse markers that would keep a shipped test from running."""
    from pytest_roseinfer.suite.shipped_tests import allows_failure

    for marker in item.iter_markers():
        if marker.name in ("skip", "skipif") or (
            marker.name == "xfail" and not allows_failure(marker)
        ):
            raise pytest.UsageError(
                f"{item.nodeid}: a test of pytest_roseinfer cannot be marked {marker.name} in this "
                "way; if the target is known to fail it, use @pytest.mark.xfail(reason=...); to "
                "leave it out, deselect it with -k, -m or --deselect"
            )


def is_shipped(item: pytest.Item) -> bool:
    """Return True for a test made by ``conformance()``."""
    shipped = sys.modules.get("pytest_roseinfer.suite.shipped_tests")
    owner = getattr(item, "cls", None)
    return shipped is not None and owner is not None and issubclass(owner, shipped.ShippedTests)


def skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker(_GPU):  # the mark is unknown with -p no:skipping
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --roseinfer-gpu"))


def budget(item: pytest.Item, settings: Settings) -> Settings:
    """Return the settings for one test: command-line options, then its marker's arguments."""
    overrides = {
        name: number
        for name, number in arguments(item, _BUDGET).items()
        if item.config.getoption(f"--roseinfer-{name}") is None
    }
    return replace(settings, **overrides)


def arguments(item: pytest.Item, name: str) -> dict[str, Any]:
    """Return the arguments of all markers of a name; the closest marker wins."""
    merged: dict[str, Any] = {}
    for marker in reversed([*item.iter_markers(name)]):
        merged |= marker.kwargs
    return merged
