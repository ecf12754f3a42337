"""Test class for caches, and ``conformance()``, which makes a test class for an adapter.

Replay scripts import the file that calls ``conformance``, and must not need pytest or Hypothesis.
So both are imported when a test runs, not before.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, overload

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.writes import BatchKinds
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.coverage import Preludes
from pytest_roseinfer.run.machine import HistoryRunner
from pytest_roseinfer.search.named_checks import CHECKS
from pytest_roseinfer.suite.kept_failures import replay_kept
from pytest_roseinfer.suite.large_search import LargeHistories
from pytest_roseinfer.suite.shipped_tests import ShippedTests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.histories.history import History

_EXAMPLES_OF_A_TURN = 12
_TURNS_BEFORE_LARGE = 1
"""Number of turns of drawn examples before the large ones, which are not the first to find most
bugs."""
_SHARE_IN_BATCHES = 0.13
"""Share of the examples that start with batches: of 100, enough for 40 batches of each kind."""


class ConformanceTests(ShippedTests):
    """Tests of a cache; ``conformance(Adapter)`` derives a class from this one."""

    adapter: ClassVar[type[KVCacheAdapter]]
    max_parts: ClassVar[Mapping[str, int]] = {"test_histories": 2}

    def test_histories(self) -> None:
        """Check that the cache equals the oracle after every step of drawn histories."""
        target = coverage.current().of(self.adapter)
        target.searched = True
        if kept := settings.current().kept_traces:
            replay_kept(self.adapter, kept)

        def check(history: History) -> None:
            machine = HistoryRunner(self.adapter, history)
            target.note_tried(self.adapter, history.spec.options)
            reached = set[str]()
            try:
                for counted in machine.steps():
                    target.note(counted)
                    preludes.note(counted.keys() - reached, machine.history_so_far)
                    reached.update(counted)
                    target.note_sizes(machine.completed_steps[-1], machine.oracle)
            finally:
                target.invariant_checks.update(machine.invariant_checks)
                if batches := machine.observer(BatchKinds):
                    target.note_batches(batches.counts)
            target.histories += 1

        since = Counter(target.counts)
        preludes = Preludes["History"](partial(target.names_below_required, since), target.paths)
        run_settings = settings.current()
        ends = run_settings.search_ends()
        in_batches = round(run_settings.examples * _SHARE_IN_BATCHES)
        others = run_settings.examples - in_batches
        turns = coverage.split_examples(self.adapter, others, _EXAMPLES_OF_A_TURN)
        planned = in_batches + sum(turn.examples for turn in turns)
        duration = coverage.SearchDuration(self.adapter.__name__, planned, "histories")
        for at, turn in enumerate(turns):
            if at == _TURNS_BEFORE_LARGE:
                LargeHistories(self.adapter).run(ends)
            num_skipped = self._search(check, "run_history", turn, ends, preludes)
            target.add_examples(turn.examples, num_skipped)
            duration.note(turn.examples)
        for num_examples in run_settings.part.share_of([in_batches] if in_batches else []):
            turn = coverage.Turn(None, "in batches", num_examples)
            num_skipped = self._search(check, "run_history", turn, ends, in_batches=True)
            target.add_examples(num_examples, num_skipped)
        if len(turns) <= _TURNS_BEFORE_LARGE:
            LargeHistories(self.adapter).run(ends)
        missing = partial(target.missing_paths, since)
        ends = run_settings.further_ends(ends)
        rounds = coverage.repeat_searches(missing, _EXAMPLES_OF_A_TURN, ends)
        for at, turn in enumerate(rounds):
            self._search(check, "run_history", turn, ends, preludes, few_kinds=at % 3 > 0)

    def test_permuting_a_batch_permutes_the_result(self) -> None:
        self._compare("check_permuted", share=0.1)

    def test_one_batch_equals_its_split_in_two(self) -> None:
        self._compare("check_split", share=0.1)

    def test_fork_then_append_equals_copy_then_append(self) -> None:
        if "fork" not in self.adapter.abilities:
            _skip(f"{self.adapter.__name__} does not offer fork()")
        self._compare("check_copied", share=0.1)

    def test_every_option_ends_in_the_same_bits(self) -> None:
        if not self.adapter.option_choices:
            _skip(f"{self.adapter.__name__} has no option_choices")
        self._compare("check_every_option", share=0.05)

    def _compare(self, name: str, *, share: float) -> None:
        check = CHECKS[name]
        target = coverage.current().of(self.adapter)

        def compare(history: History) -> None:
            target.invariant_checks.update(check(self.adapter, history))

        run_settings = settings.current()
        examples = max(1, int(run_settings.examples * share))
        turn = coverage.Turn(None, "0", examples)
        num_skipped = self._search(compare, name, turn, run_settings.search_ends())
        target.add_examples(examples, num_skipped)

    def _search(
        self,
        check: Callable[[History], object],
        name: str,
        turn: coverage.Turn,
        ends: float,
        preludes: Preludes[History] | None = None,
        *,
        few_kinds: bool = False,
        in_batches: bool = False,
    ) -> int:
        """Check histories; return the number that were skipped because ``ends`` had passed."""
        from pytest_roseinfer.histories.strategies import histories
        from pytest_roseinfer.search.search import Search

        settings.require_plugin()
        run_settings = settings.current()
        search = Search(
            self.adapter,
            check,
            histories(
                self.adapter,
                max_steps=run_settings.steps,
                device=run_settings.device,
                aim=turn.aim,
                first_setting=turn.first_setting,
                preludes=preludes.of(turn.aim) if preludes else (),
                few_kinds=few_kinds,
                in_batches=in_batches,
            ),
            examples=turn.examples,
            name=name,
            salt=turn.name if in_batches else f"{turn.aim} {turn.name}",
            ends=ends,
        )
        search.run()
        return search.num_skipped


@overload
def conformance(adapter: type[KVCacheAdapter]) -> type[ConformanceTests]: ...
@overload
def conformance(adapter: type[Adapter]) -> type[ShippedTests]: ...
def conformance(adapter: type[Any]) -> type[ShippedTests]:
    """Make a test class for an adapter.

    A test file has, for example, ``TestMyCache = conformance(MyCache)``.
    """
    settings.choose_kernel_runtime()
    refuse_mistakes(adapter)
    tests: type[ShippedTests] = ConformanceTests
    if issubclass(adapter, EngineAdapter):
        from pytest_roseinfer.suite.engine_tests import EngineTests

        tests = EngineTests
    return type(f"Test{adapter.__name__}", (tests,), {"adapter": adapter})


def _skip(reason: str) -> NoReturn:
    import pytest

    pytest.skip(reason)
