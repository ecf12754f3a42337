"""The choice of the tests that are slow, and their shards."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.slow import Shard, mark_slow_cases

_WORKFLOW = Path(__file__).resolve().parents[1] / ".github" / "workflows" / "slow.yml"


class _Case:
    """A case of a test, as pytest collects it."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid = nodeid
        self.markers = list(markers)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, name: str) -> None:
        self.markers.append(name)


def test_one_of_sixteen_similar_cases_is_not_slow() -> None:
    cases: list[Any] = [_Case(f"test_many[{at}]", "sampled_cases") for at in range(33)]
    slow_cases: list[Any] = [_Case(f"test_many[{at}]", "sampled_cases", "slow") for at in "abc"]
    few: list[Any] = [_Case(f"test_few[{at}]", "sampled_cases") for at in range(2)]
    single: list[Any] = [_Case("test_one")]
    mark_slow_cases([*slow_cases, *cases, *few, *single])
    assert sum("slow" not in case.markers for case in cases) == 3
    assert sum("slow" not in case.markers for case in few) == 1
    assert single[0].markers == []


def test_every_test_is_in_one_shard_of_the_workflow() -> None:
    shards = [Shard.parse(each) for each in re.findall(r'"(\d+/\d+)"', _WORKFLOW.read_text())]
    assert len(shards) == shards[0].count > 1
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/test_{at}.py::test") for at in range(1000)]
    parts = [shard.split(items) for shard in shards]
    assert all(len(own) + len(others) == len(items) for own, others in parts)
    names = sorted(item.nodeid for own, _ in parts for item in own)
    assert names == sorted(item.nodeid for item in items)
    assert min(len(own) for own, _ in parts) > 1000 / len(shards) / 2


def test_workflow_runs_the_slow_tests_every_week() -> None:
    text = _WORKFLOW.read_text()
    assert re.search(r'cron: "\d+ \d+ \* \* \d"', text)
    assert "run: pytest -n 2 -m slow --shard ${{ matrix.shard }}" in text


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1", "1/0", "a/b", "1/4/2"])
def test_text_that_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is no shard; write I/N with I from 1 to N"):
        Shard.parse(text)
