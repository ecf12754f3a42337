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


def tests_of_whole_files(config: pytest.Config, items: Iterable[pytest.Item]) -> list[Test]:
    """Return the tests of those files of which all tests were collected."""
    if config.getoption("lf", False):
        return []
    here = config.invocation_params.dir
    in_part = {(here / said.partition("::")[0]).resolve() for said in config.args if "::" in said}
    return [
        (str(item.path), item.nodeid.partition("::")[2])
        for item in items
        if item.path.resolve() not in in_part
    ]


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
