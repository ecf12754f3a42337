"""Counts of conditions and paths are compared with the oracle and the options."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import CacheSpec, Divergence, FastPath, History, Oracle, run_history
from pytest_roseinfer.capabilities.counting import conditions_met
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.capabilities.writes import Append, AppendMany, AppendPadded, Prefill
from tests.capabilities.caches.paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.operation import Operation

SIZE = 2


def conditions_of(*steps: Operation) -> dict[str, int]:
    """Return the conditions that the last step meets after the others."""
    oracle = Oracle(SIZE, capacity=20)
    for step in steps[:-1]:
        step.apply(oracle)
    return dict(conditions_met(oracle, steps[-1]))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([Append((0, 1))], {"fresh": 2}),
        ([Prefill(0, 1), Append((0,))], {"in_place": 1}),
        ([Prefill(0, 2), Append((0, 1))], {"rollover": 1, "fresh": 1}),
        ([Prefill(0, 2), Fork(0, 1), Append((1,))], {"rollover_shared": 1}),
        ([Prefill(0, 1), Fork(0, 1), Append((0,))], {"copy_on_write": 1}),
        ([Prefill(0, 1), Fork(0, 1), Append((0, 1))], {"copy_on_write": 1, "in_place": 1}),
        (
            [Prefill(0, 1), Fork(0, 1), Fork(0, 2), Append((0, 2))],
            {"copy_on_write": 2},
        ),
        ([Prefill(0, 1), AppendMany((0, 1), (4, 3))], {"in_place": 1, "fresh": 1}),
        ([AppendPadded((None, 0, None))], {"fresh": 1, "padding": 2}),
        ([Prefill(0, 1), Free(0)], {}),
        ([SetOptions({})], {}),
    ],
)
def test_oracle_counts_conditions_of_rows(steps: list[Operation], expected: dict[str, int]) -> None:
    assert conditions_of(*steps) == expected


class CountingCache(PagedCache):
    """Counts the conditions of its rows, once for all layers."""

    conditions = ("new", "old")
    row_conditions: ClassVar[Mapping[str, str]] = {"fresh": "new", "in_place": "old"}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        lengths = self.lengths.copy()
        super().append(seqs, key, value)
        del self.counts["new_block"]
        self.count([not lengths[seq] for seq in seqs])

    def count(self, fresh: list[bool]) -> None:
        self.counts.update({"new": sum(fresh), "old": len(fresh) - sum(fresh)})


class CountsEachLayer(CountingCache):
    def count(self, fresh: list[bool]) -> None:
        for _ in range(self.spec.num_layers):
            super().count(fresh)


class CountsTheFirstRow(CountingCache):
    def count(self, fresh: list[bool]) -> None:
        super().count(fresh[:1])


class CountsAllAsNew(CountingCache):
    def count(self, fresh: list[bool]) -> None:
        self.counts["new"] += len(fresh)


MIXED = History(CacheSpec(num_layers=2), (Append((0, 1)), Append((1, 2, 0))))


@pytest.mark.parametrize("cache", [CountingCache, CountsEachLayer])
def test_right_counts_pass(cache: type[CountingCache]) -> None:
    run_history(cache, MIXED)


@pytest.mark.parametrize("cache", [CountsTheFirstRow, CountsAllAsNew])
def test_wrong_counts_fail(cache: type[CountingCache]) -> None:
    with pytest.raises(Divergence, match="conditions were counted as"):
        run_history(cache, MIXED)


class SwitchedCache(PagedCache):
    """Has an option that turns the fast path off, and obeys it."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"fast": (True, False)}
    paths: ClassVar[Mapping[str, FastPath]] = {
        "all_rows": FastPath(equals="row_by_row", never_with=[{"fast": False}])
    }

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.fast = spec.options["fast"]

    def set_options(self, options: Mapping[str, Any]) -> None:
        self.fast = options["fast"]

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if self.fast:
            super().write(blocks, positions, key, value)
            return
        for row, (block, position) in enumerate(zip(blocks, positions, strict=True)):
            one = slice(row, row + 1)
            super().write([block], [position], key[:, one], value[:, one])


class IgnoresItsOptions(SwitchedCache):
    def set_options(self, options: Mapping[str, Any]) -> None:
        pass


def history_with_switch(*, fast: bool, fast_later: bool) -> History:
    return History(
        CacheSpec(options={"fast": fast}),
        (Append((0, 1)), SetOptions({"fast": fast_later}), Append((0, 1))),
    )


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("fast_later", [True, False])
def test_cache_that_obeys_its_options_passes(fast: bool, fast_later: bool) -> None:
    counts = run_history(SwitchedCache, history_with_switch(fast=fast, fast_later=fast_later))
    assert Counter(counts)["all_rows"] == fast + fast_later


class SwapsItsSwitch(SwitchedCache):
    """Writes row by row if ``fast`` is on, and all rows at once if it is off."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        "all_rows": FastPath(equals="row_by_row", runs_with=[{"fast": True}])
    }

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.fast = not self.fast


class NeverFast(SwitchedCache):
    """Always writes row by row, which needs ``fast`` to be off."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        **SwitchedCache.paths,
        "row_by_row": FastPath(equals="row_by_row", runs_with=[{"fast": False}]),
    }

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.fast = False


def test_path_must_not_run_without_the_switches_that_it_needs() -> None:
    slow, fast = (
        History(CacheSpec(options={"fast": on}), (Append((0, 1)),)) for on in (False, True)
    )
    run_history(SwapsItsSwitch, fast)
    with pytest.raises(
        Divergence, match="path 'all_rows' was counted, which needs fast=True, under fast=False"
    ):
        run_history(SwapsItsSwitch, slow)
    run_history(NeverFast, slow)
    with pytest.raises(Divergence, match="'row_by_row' was counted, which needs fast=False, under"):
        run_history(NeverFast, fast)


@pytest.mark.parametrize(
    ("options", "exclusion"),
    [
        ({"fast": 1, "least": 8}, ""),
        ({"fast": 1}, ""),
        ({}, ""),
        ({"fast": 0, "least": 2}, ""),
        ({"fast": 0, "least": 8}, "which needs fast=1 or least=2, under fast=0 with least=8"),
        ({"fast": 0, "least": 4}, "which needs fast=1 or least=2, under fast=0 with least=4"),
        ({"fast": 1, "off": 1}, "which off=1 rules out"),
    ],
)
def test_exclusion_names_the_switches_of_the_nearest_settings(
    options: Mapping[str, int], exclusion: str
) -> None:
    path = FastPath(
        "slow",
        runs_with=[{"fast": 1}, {"least": 2}, {"fast": 2, "least": 3}],
        never_with=[{"off": 1}],
    )
    assert path.describe_exclusion(options) == exclusion
    assert path.can_run(options, "cpu") == (not exclusion)


def test_path_that_an_option_turns_off_must_not_run() -> None:
    run_history(IgnoresItsOptions, history_with_switch(fast=True, fast_later=True))
    with pytest.raises(Divergence, match="path 'all_rows' was counted, which fast=False rules out"):
        run_history(IgnoresItsOptions, history_with_switch(fast=True, fast_later=False))
