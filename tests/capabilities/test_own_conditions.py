"""Conditions that the harness counts for any cache that declares them, and then requires."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer.capabilities.cache_data import HARNESS_CONDITIONS
from pytest_roseinfer.capabilities.counting import harness_conditions_met
from pytest_roseinfer.capabilities.forks import Copy, Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.capabilities.writes import Append, AppendMany, AppendPadded, Prefill, Reserve
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run.coverage import CONCLUSIVE_EXAMPLES, TargetCoverage
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager, PerLayerManager
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.uncounted_caches import ALL, CountsAHarnessCondition, UncountedCache

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from tests.project import Project

LAST = {"last_position": 1}
NO_ROOM = {"out_of_room_mid_batch": 1}
AGAIN = {"name_used_again": 1}
SHORT_SEARCH = ("--roseinfer-examples=25", "--roseinfer-seed=4")


def conditions_of(*steps: Operation, block_size: int = 3) -> dict[str, int]:
    """Return the conditions of the last step after the others, in a cache of three blocks."""
    oracle = Oracle(block_size, capacity=3)
    for step in steps[:-1]:
        assert step.apply(oracle)
    return dict(harness_conditions_met(oracle, steps[-1]))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([Prefill(0, 2), Append((0,))], LAST),
        ([Prefill(0, 5), Append((0,))], LAST),
        ([Prefill(0, 2), AppendMany((0,), (4,))], LAST),
        ([Prefill(0, 2), Reserve((0,), (2,))], LAST),
        ([Prefill(0, 2), Fork(0, 1), Append((1, 0))], {"last_position": 2}),
        ([Prefill(0, 2), Prefill(1, 1), AppendPadded((None, 0, 1))], LAST),
        # Elsewhere in the block, across its end, and steps that do not write.
        ([Prefill(0, 1), Append((0,))], {}),
        ([Prefill(0, 3), Append((0,))], {}),
        ([Prefill(0, 1), AppendMany((0,), (2,))], {}),
        ([Prefill(0, 3)], {}),
        ([Prefill(0, 2), Fork(0, 1)], {}),
        ([Prefill(0, 2), Free(0)], {}),
        ([SetOptions({})], {}),
    ],
)
def test_write_to_the_last_position_of_a_block_is_counted(
    steps: list[Operation], expected: dict[str, int]
) -> None:
    assert conditions_of(*steps) == expected


def test_only_position_of_a_block_is_not_counted_as_last() -> None:
    assert conditions_of(Prefill(0, 1), Append((0,)), block_size=1) == {}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([Prefill(0, 6), Append((1, 2))], NO_ROOM),
        ([Prefill(0, 8), Append((0, 1))], NO_ROOM),
        ([Prefill(0, 6), AppendPadded((None, 1, 2))], NO_ROOM),
        ([Prefill(0, 6), AppendMany((1, 2), (3, 1))], NO_ROOM),
        ([Prefill(0, 6), Reserve((1, 2), (3, 1))], NO_ROOM),
        # The first row finds no room, all rows find room, or there is only one row.
        ([Prefill(0, 8), Append((1, 0))], {}),
        ([Prefill(0, 3), Append((1, 2))], {}),
        ([Prefill(0, 10)], {}),
    ],
)
def test_batch_that_runs_out_of_room_is_counted(
    steps: list[Operation], expected: dict[str, int]
) -> None:
    conditions = conditions_of(*steps)
    assert {name: conditions[name] for name in conditions if name != "last_position"} == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([Append((0,)), Free(0), Append((1, 0))], AGAIN),
        ([Append((0,)), Free(0), AppendMany((0,), (2,))], AGAIN),
        ([Append((0,)), Free(0), AppendPadded((None, 0))], AGAIN),
        ([Append((0,)), Free(0), Prefill(0, 2)], AGAIN),
        ([Append((0,)), Free(0), Reserve((0,), (2,))], AGAIN),
        ([Append((0, 1)), Free(1), Fork(0, 1)], AGAIN),
        ([Append((0, 1)), Free(1), Copy(0, 1, 1)], AGAIN),
        ([Append((0, 1)), Free(0), Free(1), Append((0, 1))], {"name_used_again": 2}),
        # Another name, a name that is in use again, and a step that finds no room.
        ([Append((0,)), Free(0), Append((1,))], {}),
        ([Append((0,)), Free(0), Append((0,)), Append((0,))], {}),
        ([Append((0,)), Free(0), Append((0,)), Fork(0, 1)], {}),
        ([Append((0,)), Free(0), Prefill(0, 10)], {}),
    ],
)
def test_reused_sequence_name_is_counted(steps: list[Operation], expected: dict[str, int]) -> None:
    conditions = conditions_of(*steps)
    assert {name: conditions[name] for name in conditions if name != "last_position"} == expected


STEPS: tuple[Operation, ...] = (
    *[Append((0,))] * 4,
    Append((1, 2, 3)),
    Free(0),
    Append((0,)),
)
SPEC = CacheSpec(num_layers=2, block_size=3, num_blocks=4)


def test_declared_harness_conditions_are_counted() -> None:
    assert run_history(UncountedCache, History(SPEC, STEPS)) == {**LAST, **NO_ROOM, **AGAIN}


def test_undeclared_harness_conditions_are_not_counted() -> None:
    assert not run_history(PagedCache, History(SPEC, STEPS)).keys() & set(HARNESS_CONDITIONS)


@pytest.mark.parametrize("kind", [GroupedManager, PerLayerManager])
def test_managers_declare_the_harness_conditions(kind: type[KVCacheAdapter]) -> None:
    options = {name: values[0] for name, values in kind.option_choices.items()}
    counts = run_history(kind, History(replace(SPEC, options=options), STEPS))
    assert {name: counts[name] for name in HARNESS_CONDITIONS} == {**LAST, **NO_ROOM, **AGAIN}
    assert set(HARNESS_CONDITIONS) <= set(kind.conditions)


def test_cache_that_counts_a_harness_condition_fails() -> None:
    message = "path_counts() counts 'last_position', which the harness counts itself"
    with pytest.raises(Divergence, match=re.escape(message)):
        run_history(CountsAHarnessCondition, History(SPEC, (Append((0,)), Free(0))))


def test_caches_declare_every_harness_condition() -> None:
    assert tuple(HARNESS_CONDITIONS) == ALL


def condition_rows_of(lines: list[str]) -> list[list[str]]:
    return [line.split()[1:] for line in lines if line.startswith("condition ")]


@pytest.mark.slow
def test_search_reports_and_sums_harness_conditions(project: Project) -> None:
    project.copy_caches()
    searches = """
        from caches.uncounted_caches import UncountedCache
        from pytest_roseinfer import conformance

        TestUncounted = conformance(UncountedCache)
    """
    project.write(test_mine=searches, test_same=searches)
    alone = project.pytest(*SHORT_SEARCH, "-v", "--roseinfer-report=out.json")
    together = project.pytest(*SHORT_SEARCH, "-v", "-n", "2", "--dist=loadfile")
    assert alone.ret == together.ret == pytest.ExitCode.OK
    condition_rows = condition_rows_of(alone.outlines)
    assert [(name, verdict) for name, _, verdict in condition_rows] == [
        (name, "met") for name in ALL
    ]
    assert condition_rows_of(together.outlines) == condition_rows
    (target,) = json.loads((project.path / "out.json").read_text())["targets"]
    assert [
        [row["name"], str(row["times"]), row["verdict"]] for row in target["rows"]
    ] == condition_rows


def search_project(project: Project, cache: str, setting: str) -> pytest.RunResult:
    """Search one of ``uncounted_caches`` with a setting, and a verdict after 40 examples."""
    project.copy_caches()
    project.write(
        test_mine=f"""
            from caches.uncounted_caches import {cache}
            from pytest_roseinfer import conformance
            from pytest_roseinfer.histories import strategies

            {setting}
            TestMine = conformance({cache})
        """
    )
    project.set_conclusive_examples(40)
    return project.pytest(*SHORT_SEARCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "setting", "condition"),
    [
        ("EndlessCache", "", "out_of_room_mid_batch"),
        ("NeverFreesCache", "", "name_used_again"),
        ("UncountedCache", "UncountedCache.block_sizes = (1,)", "last_position"),
        ("UncountedCache", "strategies._POOLS = (100,) * 6", "out_of_room_mid_batch"),
    ],
    ids=[
        "target",
        "target without free",
        "target of one position",
        "generator of large pools",
    ],
)
def test_unmet_condition_fails_the_run_by_name(
    project: Project, cache: str, setting: str, condition: str
) -> None:
    result = search_project(project, cache, setting)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes() == {"passed": 3, "skipped": 2}
    (problem,) = [line for line in result.outlines if line.startswith("FAILED")]
    assert problem.startswith(f"FAILED: condition {condition!r} was never reached, by none of ")


@pytest.mark.slow
def test_condition_met_only_by_large_histories_is_a_warning(project: Project) -> None:
    new_names = "lambda self, n: (*range(self.names, self.names + n),)"
    result = search_project(project, "UncountedCache", f"strategies._Writer.fresh = {new_names}")
    assert result.ret == pytest.ExitCode.OK
    (warning,) = [line for line in result.outlines if line.startswith("WARNING")]
    alone = "condition 'name_used_again' was reached by large histories alone, "
    assert warning.startswith(f"WARNING: {alone}")


def test_misspelt_condition_is_refused_with_a_suggestion() -> None:
    misspelt = type("Misspelt", (ListCache,), {"conditions": ("last_postion",)})
    message = r"names 'last_postion', which only path_counts\(\) could count.*mean last_position\?$"
    with pytest.raises(TypeError, match=message):
        conformance(misspelt)
    for name in HARNESS_CONDITIONS:
        conformance(type("Right", (ListCache,), {"conditions": (name,)}))


def test_unmet_condition_suggests_a_similar_harness_condition() -> None:
    target = TargetCoverage({}, ["name_use_again", "rare", "common"], searched=True, histories=3)
    target.counts.update(common=1)
    target.eligible_examples.update(name_use_again=CONCLUSIVE_EXAMPLES, rare=CONCLUSIVE_EXAMPLES)
    misspelt, rare = TargetVerdict(target).problems(require_paths=True)
    assert misspelt.endswith("not a pass; did you mean name_used_again?")
    assert rare.endswith("a check that did not run is not a pass")
