"""The exhaustive walk: every short history of a small cache is run once, and finds bugs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import Divergence, History, Oracle, run_history
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.prefixes import LookUp
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.settings import SHIPPED_TARGETS
from pytest_roseinfer.suite import exhaustive
from pytest_roseinfer.suite.exhaustive import (
    WalkCounts,
    empty_histories,
    every_step,
    every_texts,
    walk,
)
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from roseinfer.cli import main
from tests.capabilities.caches import (
    branching_text_caches,
    broken_text_caches,
    broken_window_caches,
    namespaced_caches,
)
from tests.capabilities.caches.adversaries import UploadsItsTableLate
from tests.capabilities.caches.branching_text_caches import BranchingTextCache
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.window_cache import LazyCache, WindowCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

MANAGER = "pytest_roseinfer.targets.roseinfer_kv:GroupedManager"
KERNELS_OFF = {"triton": False}
FIRST_STEPS: dict[type[KVCacheAdapter], tuple[Operation, ...]] = {
    broken_text_caches.ReusesAStaleLookup: (Prefill(0, 6), Free(0), LookUp(2, 4)),
    broken_text_caches.RenewsOnARefusal: (
        Prefill(0, 2),
        Prefill(1, 2),
        Free(0),
        Free(1),
        Prefill(2, 8),
    ),
    broken_text_caches.EvictsWhileBlocksAreFree: (
        Prefill(0, 2),
        Free(0),
        Append((1,)),
        Free(1),
        Append((2,)),
    ),
    broken_text_caches.HitsDoNotRenew: (Prefill(0, 6), Free(0), Prefill(1, 6)),
    branching_text_caches.WritesUnderAKeptKey: (
        Prefill(0, 2),
        Prefill(1, 2),
        Truncate(0, 1),
        Free(1),
    ),
}
"""First steps of a walk, for bugs that only the fifth step or a later one reveals."""
BROKEN = (
    broken_window_caches.FreesATokenEarly,
    broken_window_caches.SlidesTheFirstGroupOnly,
    *broken_text_caches.BROKEN,
    *branching_text_caches.BROKEN,
    *namespaced_caches.BROKEN,
)


def walk_all(
    adapter: type[KVCacheAdapter], most_steps: int, steps: tuple[Operation, ...] = ()
) -> WalkCounts:
    counts = WalkCounts()
    options = KERNELS_OFF if "triton" in adapter.option_choices else {}
    for empty_history in empty_histories(adapter, options):
        history = replace(empty_history, operations=steps)
        assert all(each.size == most_steps for each in walk(adapter, history, most_steps, counts))
    return counts


@pytest.mark.sampled_cases
@pytest.mark.parametrize("cache", BROKEN, ids=lambda cache: cache.__name__)
def test_bug_within_the_bounds_is_found(cache: type[KVCacheAdapter]) -> None:
    steps = FIRST_STEPS.get(cache, ())
    with pytest.raises(Divergence):
        walk_all(cache, len(steps) + 2 if steps else 3, steps)


def test_bug_that_needs_an_unread_step_is_found() -> None:
    steps = (Append((0,)),) * 3
    with pytest.raises(Divergence, match="gather: sequence 0"):
        walk_all(UploadsItsTableLate, 5, steps)


def test_every_history_is_run_once() -> None:
    histories_run: list[Sequence[Operation]] = []
    counts = WalkCounts()
    for empty_history in empty_histories(GroupedManager, KERNELS_OFF):
        histories_run += [
            each.operations for each in walk(GroupedManager, empty_history, 3, counts)
        ]
    assert len(histories_run) == len(set(histories_run)) == 26
    assert counts.histories == 33
    assert len(counts.states) == 20


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "cache",
    [ListCache, BranchingTextCache, namespaced_caches.NamespacedCache, WindowCache, LazyCache],
)
def test_right_caches_pass(cache: type[KVCacheAdapter]) -> None:
    assert walk_all(cache, 2).histories


class FreesUnknownSequences(GroupedManager):
    """Accepts to free an unknown sequence."""

    def free(self, seq: int) -> None:
        if seq in self.lists:
            super().free(seq)


def test_bad_calls_are_made() -> None:
    with pytest.raises(Divergence, match="free of a sequence that never was went through"):
        walk_all(FreesUnknownSequences, 1)


def test_symmetric_names_and_texts_are_walked_once() -> None:
    assert every_step(GroupedManager, Oracle(2, 3)) == [Append((0,))]
    (equal_texts, *branching_texts) = every_texts(BranchingTextCache)
    for texts in (equal_texts, *branching_texts):
        steps = every_step(BranchingTextCache, Oracle(2, 3, branches=texts))
        assert steps == [Append((0,)), Prefill(0, 6), Prefill(0, 8)]


def test_reused_name_differs_from_a_new_one() -> None:
    oracle = Oracle(2, 3)
    oracle.append([(0, 1)], [0])
    steps = [Append((0,)), Free(0), Truncate(0, 0), Append((1,)), Fork(0, 1)]
    assert {*every_step(GroupedManager, oracle)} == {*steps}
    oracle.free(0)
    assert every_step(GroupedManager, oracle) == [Append((0,)), Append((1,))]


def test_both_branches_of_a_text_can_be_repeated() -> None:
    oracle = Oracle(2, 3, branches=((0, 0), (0, 2)))
    oracle.append([(0, 1)], [0])
    oracle.free(0)
    appends = [step for step in every_step(BranchingTextCache, oracle) if isinstance(step, Append)]
    assert appends == [Append((2,)), Append((1,))]


def test_walk_divided_among_processes_has_equal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "_DIVIDED_AT", 2)
    with ThreadPoolExecutor(1) as pool:
        result = exhaustive.every_history(MANAGER, KERNELS_OFF, 3, pool)
    assert (result.walked.histories, len(result.walked.states), result.wrong) == (33, 20, "")


def test_walk_reports_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exhaustive, "_DIVIDED_AT", 2)
    monkeypatch.setattr(exhaustive, "_SAID_EVERY", 0.0)
    with ThreadPoolExecutor(1) as pool:
        exhaustive.every_history(MANAGER, KERNELS_OFF, 3, pool)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"{MANAGER}: {len(lines)} of {len(lines)} parts, 33 histories"


def test_bug_found_by_a_process_ends_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "_DIVIDED_AT", 1)
    with ThreadPoolExecutor(1) as pool:
        result = exhaustive.every_history(
            "tests.capabilities.caches.broken_text_caches:RevivesWithoutItsKey", {}, 3, pool
        )
    assert "after step 3 of" in result.wrong


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("list_cache:ListCache", 0, "histories, "),
        ("broken_text_caches:KeysByABareHash", 1, "wrong, found by "),
    ],
)
def test_walk_reports_the_number_of_histories(
    name: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exhaustive.run([f"tests.capabilities.caches.{name}"], steps=2) == status
    output = capsys.readouterr().out
    assert output.startswith("every history of up to 2 steps, on 3 blocks of 2 tokens and 2 sequen")
    assert message in output


@pytest.mark.slow
def test_known_finding_does_not_end_the_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One defect of this cache shows in two ways, and a walk names the first that is not known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exhaustive, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    name = "tests.capabilities.caches.broken_text_caches:KeysByABareHash"
    known = Path("roseinfer-known.toml")
    for _ in range(2):
        assert exhaustive.run([name], steps=2) == 1
        *_, entry = capsys.readouterr().out.partition("has an entry in roseinfer-known.toml:")
        entry = dedent(entry.strip("\n")).replace('reason = ""', 'reason = "a bare hash"')
        with known.open("a", encoding="utf-8") as file:
            file.write(f"{entry}\n")
    assert exhaustive.run([name], steps=2) == 0
    line, *met = capsys.readouterr().out.splitlines()[1:]
    assert re.fullmatch(rf"{name}: \d+ histories, .*, all equal but for known findings .*", line)
    assert len(met) == 2
    for each in met:
        assert re.fullmatch(r"  [1-9]\d* of them: known finding [0-9a-f]{10}: a bare hash", each)
    others = known.read_text(encoding="utf-8").replace("KeysByABareHash", "RevivesWithoutItsKey")
    known.write_text(others, encoding="utf-8")
    assert exhaustive.run([name], steps=2) == 1


def test_verify_walks_the_named_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    walked_targets: list[Sequence[str]] = []

    def fake_run(targets: Sequence[str]) -> int:
        walked_targets.append(targets)
        return 7

    monkeypatch.setattr(exhaustive, "run", fake_run)
    assert main(["verify", "--exhaustive"]) == main(["verify", "--exhaustive", MANAGER]) == 7
    assert main(["verify", "--exhaustive", "--target", MANAGER]) == 7
    assert walked_targets == [[], [MANAGER], [MANAGER]]


def test_shipped_targets_can_be_walked() -> None:
    assert len(exhaustive.SHIPPED) == 3
    assert exhaustive.run((), steps=2) == 0


def test_bad_call_does_not_use_an_empty_sequence() -> None:
    """A bad call reads past the end of the newest sequence with blocks; sequence 1 has none."""
    steps = (Append((0,)), Append((1,)), Truncate(1, 0))
    (empty_history,) = empty_histories(GroupedManager, KERNELS_OFF)
    run_history(GroupedManager, History(empty_history.spec, steps))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Nothing", "there is no module nowhere"),
        ("json:JSONDecoder", "not a subclass of KVCacheAdapter or EngineAdapter"),
        (SHIPPED_TARGETS[0], "adapter of an engine; --exhaustive needs one of a cache"),
    ],
)
def test_invalid_name_of_a_cache_is_a_usage_error(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--exhaustive", name]) == 4
    error = capsys.readouterr().err
    assert error.startswith("ERROR: ")
    assert message in error
