"""The markers, what they may be given, and what they do."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.settings import Settings

_GPU = "roseinfer_gpu"
_BUDGET = "roseinfer"
_BUDGET_ARGUMENTS = ("examples", "steps")
_COSTS = "roseinfer_costs"
_COSTS_ARGUMENTS = ("packages", "keyed_by", "must_not_drop")
_TPOT = "roseinfer_tpot"
_TPOT_ARGUMENTS = {
    "margin": "a number above 0 and below 1",
    "seconds": "a number above 0",
    "cpus": "a whole number from 1",
    "series_per_process": "a whole number from 1",
}
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
        for marker in item.iter_markers(_BUDGET):
            _check_budget(item, marker)
        for marker in item.iter_markers(_COSTS):
            _check_costs(item, marker)
        for marker in item.iter_markers(_TPOT):
            _check_tpot(item, marker)
        _check_shipped(item)


def skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a GPU: run with --roseinfer-gpu")
    for item in items:
        if item.get_closest_marker(_GPU):
            item.add_marker(skip)


def budget(item: pytest.Item, asked: Settings) -> Settings:
    """The settings for one test: what its marker says and the command line leaves open."""
    numbers = {"examples": asked.examples, "steps": asked.steps}
    for marker in reversed([*item.iter_markers(_BUDGET)]):  # the closest says last
        numbers |= {
            name: number
            for name, number in marker.kwargs.items()
            if item.config.getoption(f"--roseinfer-{name}") is None
        }
    return replace(asked, examples=numbers["examples"], steps=numbers["steps"])


def costs(item: pytest.Item) -> dict[str, tuple[str, ...]]:
    """The names that a test's markers say, for each argument; the closest marker says last."""
    said: dict[str, tuple[str, ...]] = dict.fromkeys(_COSTS_ARGUMENTS, ())
    for marker in reversed([*item.iter_markers(_COSTS)]):
        said |= {name: tuple(names) for name, names in marker.kwargs.items()}
    return said


def tpot(item: pytest.Item) -> dict[str, Any]:
    """What a test's markers say about its timing; the closest marker says last."""
    said: dict[str, Any] = {}
    for marker in reversed([*item.iter_markers(_TPOT)]):
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
    """Whether it is a test of ``conformance()``."""
    shipped = sys.modules.get("pytest_roseinfer.running.shipped_tests")
    owner = getattr(item, "cls", None)
    return shipped is not None and owner is not None and issubclass(owner, shipped.ShippedTests)


def _check_tpot(item: pytest.Item, marker: pytest.Mark) -> None:
    unknown = [repr(argument) for argument in marker.args]
    unknown += [name for name in marker.kwargs if name not in _TPOT_ARGUMENTS]
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker {_TPOT} does not take {', '.join(unknown)}, only "
            f"{', '.join(_TPOT_ARGUMENTS)}"
        )
    for name, number in marker.kwargs.items():
        expected = _TPOT_ARGUMENTS[name]
        kinds = int if "whole" in expected else (int, float)
        if (
            isinstance(number, bool)
            or not isinstance(number, kinds)
            or number <= 0
            or (name == "margin" and number >= 1)
        ):
            raise pytest.UsageError(
                f"{item.nodeid}: the marker {_TPOT} has {name}={number!r}: expected {expected}"
            )
    if _TPOT not in getattr(item, "fixturenames", ()):
        raise pytest.UsageError(
            f"{item.nodeid}: marked {_TPOT}, it does not take the fixture of this name, and so "
            "compares nothing"
        )


def _check_budget(item: pytest.Item, marker: pytest.Mark) -> None:
    _refuse_unknown(item, marker, {name: f"{name}=N" for name in _BUDGET_ARGUMENTS})
    for name, number in marker.kwargs.items():
        if not isinstance(number, int) or number < 1:
            raise pytest.UsageError(
                f"{item.nodeid}: the marker {_BUDGET} has {name}={number!r}: expected a whole "
                "number from 1"
            )


def _check_costs(item: pytest.Item, marker: pytest.Mark) -> None:
    _refuse_unknown(item, marker, {name: f"{name}=[...]" for name in _COSTS_ARGUMENTS})
    for name, names in marker.kwargs.items():
        if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
            raise pytest.UsageError(
                f"{item.nodeid}: the marker {_COSTS} has {name}={names!r}: expected a list of names"
            )
    if _COSTS not in getattr(item, "fixturenames", ()):
        raise pytest.UsageError(
            f"{item.nodeid}: marked {_COSTS}, it does not take the fixture of this name, and so "
            "compares nothing"
        )


def _refuse_unknown(item: pytest.Item, marker: pytest.Mark, known: dict[str, str]) -> None:
    unknown = [repr(argument) for argument in marker.args]
    unknown += [name for name in marker.kwargs if name not in known]
    if unknown:
        *others, last = known.values()
        raise pytest.UsageError(
            f"{item.nodeid}: the marker {marker.name} does not take {', '.join(unknown)}, only "
            f"{', '.join(others)} and {last}"
        )
