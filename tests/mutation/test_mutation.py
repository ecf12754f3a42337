"""Generated mutants: what is drawn, how one is planted, and the page of survivors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from roseinfer.kv.pool import BlockPool
from tests.mutants.forking import in_child
from tests.mutants.mutant import GROUPED
from tests.mutation import report
from tests.mutation.attempts import SUITE, SURVIVED, TIME, UNIT, Bench, Effort, Result
from tests.mutation.planting import Mutant, NotPlanted, functions_of, plant
from tests.mutation.recording import ROOT, Recorded, record_examples
from tests.mutation.verdicts import VERDICTS, Verdict

if TYPE_CHECKING:
    from pathlib import Path

_SOURCE = '''
LIMIT = 3


class Queue:
    size: int = 4

    @property
    def room(self) -> int:
        """Free places."""
        return self.size - 1

    def take(self, count: int = 1) -> str:
        if (
            count < self.size
        ):
            return f"{count} of {self.size}"
        raise ValueError("too many")
'''


_RELEASE = "self.refcounts[index] -= 1"
_NAME = "BlockPool.decref"
_NOTHING, _SAME = "self.refcounts[index] -= 0", "self.refcounts[index] += -1"
_KEY = ("roseinfer/kv/pool.py", _NAME, 1, "before", "after")
_TESTS = "tests/kv/test_block_records.py::"
_FAILING = _TESTS + "test_recycled_block_keeps_its_record[torch]"
_PASSING = _TESTS + "test_record_is_a_slots_dataclass_of_four_fields"


def _mutant(by: str) -> Mutant:
    file = "roseinfer/kv/pool.py"
    source = (ROOT / file).read_text()
    assert source.count(_RELEASE) == 1
    line = source[: source.index(_RELEASE)].count("\n") + 1
    lines = frozenset({line})
    return Mutant(file, _NAME, lines, _RELEASE, by, source.replace(_RELEASE, by))


def _drawn(tmp_path: Path) -> list[Mutant]:
    generation = pytest.importorskip("tests.mutation.generation")
    file = tmp_path / "queue.py"
    file.write_text(_SOURCE)
    mutants: list[Mutant] = generation.draw(tmp_path, [file], 100, seed=0).mutants
    return mutants


def test_functions_are_mutated_with_their_decorators_and_without_texts(
    tmp_path: Path,
) -> None:
    mutants = _drawn(tmp_path)
    assert {mutant.function for mutant in mutants} == {"Queue.room", "Queue.take"}
    changes = {(mutant.before, mutant.after) for mutant in mutants}
    assert ("return self.size - 1", "return self.size + 1") in changes
    assert ("count < self.size", "count <= self.size") in changes
    assert not any("XX" in mutant.after for mutant in mutants)
    assert all("    @property\n" in mutant.source for mutant in mutants)


def test_statement_of_a_mutant_has_all_its_lines(tmp_path: Path) -> None:
    (mutant,) = [mutant for mutant in _drawn(tmp_path) if mutant.after == "count <= self.size"]
    lines = _SOURCE.splitlines()
    assert [lines[line - 1].strip() for line in sorted(mutant.lines)] == dedent(
        """\
        if (
        count < self.size
        ):"""
    ).splitlines()


@pytest.mark.slow
def test_planted_code_is_that_of_the_function_in_use() -> None:
    mutant, functions = _mutant("self.refcounts[index] -= 2"), functions_of(ROOT)

    def work() -> str:
        pool = BlockPool(layer=0, first_id=0, size=4, block_size=4)
        plant(mutant, ROOT, functions)
        index = pool.allocate(start=0, length=1).block_index
        pool.incref(index)
        pool.incref(index)
        pool.decref(index)
        return str(pool.refcounts[index])

    assert in_child(work).answer == "1"


def test_unknown_function_is_not_planted() -> None:
    with pytest.raises(NotPlanted, match="0 functions exist"):
        plant(_mutant("pass"), ROOT, {})


@pytest.mark.slow
def test_examples_that_execute_the_statement_kill_a_mutant() -> None:
    pytest.importorskip("coverage")
    recorded = in_child(lambda: _dumps(record_examples([GROUPED], examples=4)))
    examples = pickle.loads(bytes.fromhex(recorded.answer))
    bench = Bench(examples, functions_of(ROOT), Effort(examples=0, test_seconds=0))
    killed, equal, hung = (
        bench.try_examples(_mutant(by)) for by in (_NOTHING, _SAME, f"while True: {_NOTHING}")
    )
    assert 0 < killed.num_examples <= len(examples)
    assert (killed.killed_by, killed.check) == (SUITE, "run_history")
    assert (equal.killed_by, equal.num_examples_run) == (SURVIVED, equal.num_examples)
    assert hung.killed_by == TIME
    elsewhere = replace(_mutant(_NOTHING), lines=frozenset({1}))
    assert bench.try_examples(elsewhere).num_examples == 0


def _dumps(pieces: list[Recorded]) -> str:
    return pickle.dumps(pieces).hex()


@pytest.mark.slow
def test_unit_tests_that_execute_the_statement_kill_a_mutant() -> None:
    lines = {_mutant(_SAME).file: _mutant(_SAME).lines}
    tests = [Recorded(name, 1.0, lines) for name in (_FAILING, _PASSING)]
    bench = Bench(tests, functions_of(ROOT), Effort(examples=0, test_seconds=1.5))
    survivor = Result(*_KEY, killed_by=SURVIVED)
    killed, equal = (bench.try_tests(_mutant(by), survivor) for by in (_NOTHING, _SAME))
    assert (killed.killed_by, killed.check, killed.num_tests) == (UNIT, _FAILING, 1)
    assert equal.killed_by == SURVIVED


def test_survivors_without_a_verdict_are_listed_as_gaps(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results -->\n<!-- end -->\n")
    results = [Result(*_KEY, killed_by=each) for each in (SUITE, UNIT, TIME, SURVIVED)]
    assert report.unmarked(results) == [results[-1]]
    report.write(page, results, generated=9, command="the command")
    text = page.read_text()
    assert "4 mutants, drawn from 9." in text
    assert [cell.strip() for cell in text.rpartition("| all ")[2].split("|")[1:8]] == [
        *"4111",
        "0",
        "1",
        "75.0%",
    ]
    gaps, _, equal = text.partition("### Gaps")[2].partition("### Equal")
    assert "-before\n+after\n" in gaps
    assert "None." in equal


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict.function)
def test_verdicts_are_on_statements_of_the_sources(verdict: Verdict) -> None:
    lines = [line.strip() for line in (ROOT / verdict.file).read_text().splitlines()]
    first, *others = verdict.before.splitlines()
    starts = [at for at, line in enumerate(lines) if line == first]
    assert any(lines[at : at + len(others) + 1] == [first, *others] for at in starts)
