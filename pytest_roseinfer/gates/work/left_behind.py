"""Entries of a file of baselines that no test stands for any more: it, or its step, was renamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.baselines import read_steps
from pytest_roseinfer.gates.work.cost_file import name_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import pytest

    from pytest_roseinfer.gates.work.cost_file import Where

    Test = tuple[str, str]
    """The file of a test, and its name in there."""


def is_of_whole_file(item: pytest.Item) -> bool:
    """Return True if all tests of this one's file are collected, whatever is deselected later."""
    said, here = item.config.args, item.config.invocation_params.dir
    in_part = {(here / each.partition("::")[0]).resolve() for each in said if "::" in each}
    return not item.config.getoption("lf", False) and item.path.resolve() not in in_part


def left_behind(file: Path, tests: Iterable[Test], measured: Collection[Where]) -> Iterator[str]:
    """Yield the names of entries: of tests that are gone, and of steps that a test has no more.

    ``tests`` are all of their files, and ``measured`` is what this run found.
    """
    known = {name_of(file, Path(path), test) for path, test in tests}
    whole_files = {name.partition("::")[0] for name in known}
    ran = {(test, device) for test, _, device in measured}
    for test, steps in read_steps(file).items():
        test_file = test.partition("::")[0]
        renamed = test_file in whole_files and test not in known
        if renamed or not (file.parent / test_file).exists():
            yield test
            continue
        for step, devices in steps.items():
            here = [device for device in devices if (test, device) in ran]
            if any((test, step, device) not in measured for device in here):
                yield f"{test}, {step}"
