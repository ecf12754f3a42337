"""Shrinking: failing examples become as small as possible, within a time limit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    Oracle,
    RequestMix,
    RequestSpec,
    conformance,
    settings,
)
from pytest_roseinfer.adapters.engine import Sampling
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.preemption import Preempt, Resume
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill, Reserve
from pytest_roseinfer.engine_capabilities.capability import change
from pytest_roseinfer.engines.run import MixDivergence
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.search import shrink
from pytest_roseinfer.search.shrink import (
    Shrinker,
    keep_valid_steps,
    passes_of_histories,
    passes_of_mixes,
)
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from tests.capabilities.caches.broken_caches import LosesTheBlock, SwapsRows
from tests.capabilities.caches.broken_swap_caches import BringsBackOneLayer, KeepsTheOldLength
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.swap_cache import SwapCache
from tests.capabilities.caches.window_cache import WindowCache
from tests.engine_capabilities.engines import broken_engines
from tests.engine_capabilities.engines.toy_engine import ToyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.capabilities.operation import Operation


@pytest.fixture(autouse=True)
def short_search() -> Iterator[None]:
    previous_settings, previous_coverage = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=60, seed=1))
    coverage.set_current(coverage.Coverage())
    try:
        yield
    finally:
        settings.set_current(previous_settings)
        coverage.set_current(previous_coverage)


class LimitedToTwoRows(PagedCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len(seqs) > 2:
            raise RuntimeError("at most two rows")
        super().append(seqs, key, value)


def first_failure(adapter: type[Adapter]) -> Difference:
    """Return the failure of the first test that fails for a target."""
    tests = conformance(adapter)()
    name = next(iter(tests.shipped()))
    with pytest.raises(Difference) as caught:
        getattr(tests, name)()
    return caught.value


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("adapter", "steps"),
    [
        (SwapsRows, ["append one token to sequences 0, 1"]),
        (LosesTheBlock, ["append one token to sequence 0", "free sequence 0"]),
        (
            KeepsTheOldLength,
            [
                "append one token to sequence 0",
                "preempt sequence 0",
                "resume sequence 0, with its 1 token",
            ],
        ),
        (
            BringsBackOneLayer,
            [
                "append one token to sequence 0",
                "begin to swap sequence 0 out",
                "finish swapping sequence 0 out",
                "begin to swap sequence 0 in",
                "finish swapping sequence 0 in",
            ],
        ),
    ],
)
def test_history_is_shrunk_to_the_minimal_one(adapter: type[Adapter], steps: list[str]) -> None:
    failure = first_failure(adapter)
    assert isinstance(failure, Divergence)
    assert [step.describe() for step in failure.history.operations] == steps


def test_shrinking_keeps_an_error_of_a_step_that_fits() -> None:
    """With fewer blocks the message would be that there is no room, which is not the cause."""
    failure = first_failure(LimitedToTwoRows)
    assert isinstance(failure, Divergence)
    message = "the write raised RuntimeError: at most two rows (3 blocks needed, 3 free)"
    assert failure.summary == message
    assert failure.history.spec.num_blocks == 3


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("adapter", "prompts", "new_tokens"),
    [
        (broken_engines.ReturnsANeighboursToken, [1, 1], [1, 1]),
        (broken_engines.UsesAnotherPrefix, [2, 2], [1, 1]),
        (broken_engines.LosesTheLastToken, [1], [1]),
        (broken_engines.EndsOthersOnCancel, [1, 1], [1, 1]),
        (broken_engines.RaisesInAStep, [1, 1, 1], [1, 1, 1]),
        (broken_engines.KeepsALease, [1, 1], [1, 1]),
    ],
)
def test_mix_is_shrunk_to_the_minimal_requests(
    adapter: type[EngineAdapter], prompts: list[int], new_tokens: list[int]
) -> None:
    failure = first_failure(adapter)
    assert isinstance(failure, MixDivergence)
    requests = failure.mix.requests
    assert [len(each.prompt) for each in requests] == prompts
    assert [each.sampling.max_new_tokens for each in requests] == new_tokens


# ------------------------------------------------------------------------ shrinking passes

STEPS: tuple[Operation, ...] = (Append((0,)), Append((0,)), Fork(0, 1), Free(0), Append((1, 2)))
USUAL_OPTIONS, UNUSUAL_OPTIONS = (
    {name: values[at] for name, values in GroupedManager.option_choices.items()} for at in (0, -1)
)


def shrink_history(
    history: History,
    fails: Callable[[History], bool],
    adapter: type[KVCacheAdapter] = GroupedManager,
) -> History:
    """Shrink a history with a check that fails for a given reason."""

    def check(case: History) -> None:
        if fails(case):
            raise Difference("it fails", str)

    small = Shrinker(history, Difference("it fails", str), check)
    small.shrink(passes_of_histories(adapter))
    return small.example


def has(*kinds: type[Operation], tokens: int = 0) -> Callable[[History], bool]:
    def fails(case: History) -> bool:
        written = sum(count for step in case.operations for _, count in step.rows())
        return {*kinds} <= {type(step) for step in case.operations} and written >= tokens

    return fails


def oracle_before_the_end(case: History) -> Oracle:
    """Return the oracle before the last step of a history."""
    oracle = Oracle.of(GroupedManager, case.spec, case.texts)
    for step in case.operations[:-1]:
        step.apply(oracle)
    return oracle


def test_unneeded_steps_are_removed() -> None:
    small = shrink_history(
        History(CacheSpec(options=UNUSUAL_OPTIONS), STEPS, finite=False), has(Fork)
    )
    assert small.operations == (Append((0,)), Fork(0, 1))
    assert (small.spec.num_blocks, small.spec.options, small.finite) == (2, USUAL_OPTIONS, True)


def test_sequences_are_merged_where_one_is_enough() -> None:
    steps = (Append((3,)), Fork(3, 1), Truncate(1, 0))
    small = shrink_history(History(CacheSpec(options=USUAL_OPTIONS), steps), has(Truncate))
    assert small.operations == (Append((0,)), Truncate(0, 0))


def test_freed_parent_is_merged_with_a_fork() -> None:
    """The last two holders of a block write to it at once."""

    def fails(case: History) -> bool:
        oracle, last = oracle_before_the_end(case), case.operations[-1]
        ends = {seq: id(pages[-1]) for seq, pages in oracle.sequences.items() if pages}
        writing = [ends.get(seq) for seq, _ in last.rows()]
        return len(writing) == 2 == [*ends.values()].count(writing[0] or 0) and len({*writing}) == 1

    steps = (Append((0,)), Fork(0, 1), Fork(0, 2), Free(0), Append((1, 2)))
    small = shrink_history(History(CacheSpec(options=USUAL_OPTIONS), steps), fails)
    assert small.operations == (Append((0,)), Fork(0, 1), Append((0, 1)))


def test_steps_that_take_room_are_removed_with_the_blocks() -> None:
    """The failing batch takes all free blocks."""

    def fails(case: History) -> bool:
        oracle, last = oracle_before_the_end(case), case.operations[-1]
        if len(last.rows()) < 2 or not last.fits(oracle):
            return False
        last.apply(oracle)
        return not oracle.pages_free()

    steps = (*(Append((seq,)) for seq in (0, 1, 2)), Append((3, 4)))
    small = shrink_history(History(CacheSpec(num_blocks=5, options=USUAL_OPTIONS), steps), fails)
    assert (small.operations, small.spec.num_blocks) == ((Append((0, 1)),), 2)


def test_writes_of_one_sequence_are_merged() -> None:
    small = shrink_history(History(CacheSpec(options=USUAL_OPTIONS), STEPS), has(Fork, tokens=2))
    assert small.operations == (Prefill(0, 2), Fork(0, 1))


def test_option_steps_become_initial_options() -> None:
    def fails(case: History) -> bool:
        options_set = [step.options for step in case.operations if isinstance(step, SetOptions)]
        off = [case.spec.options, *options_set][-1]["triton"] is False
        return off and has(Append)(case)

    steps = (Append((0,)), SetOptions(UNUSUAL_OPTIONS), Append((0,)))
    small = shrink_history(History(CacheSpec(options=USUAL_OPTIONS), steps), fails)
    assert (small.operations, small.spec.options) == (STEPS[:1], {**USUAL_OPTIONS, "triton": False})


def test_windows_and_layers_are_reduced() -> None:
    spec = CacheSpec(num_layers=3, windows=(9, None, 5))
    small = shrink_history(History(spec, STEPS), has(Append), WindowCache)
    assert (small.spec.num_layers, small.spec.windows) == (1, (1,))


def test_steps_that_depend_on_a_removed_step_are_removed() -> None:
    def valid_steps(*steps: Operation) -> list[Operation]:
        history = History(CacheSpec(), steps)
        return [*keep_valid_steps(SwapCache, history).operations]

    assert valid_steps(Fork(0, 1), Append((1,)), Fork(1, 2)) == [Append((1,)), Fork(1, 2)]
    assert valid_steps(Append((0,)), Prefill(0, 3), Free(1)) == [Append((0,))]
    preempted: list[Operation] = [Append((0,)), Preempt(0), Resume(0, 5)]
    assert valid_steps(*preempted, Append((0,))) == [*preempted[:2], Resume(0, 1), Append((0,))]
    assert valid_steps(*preempted[:2], Append((0,))) == preempted[:2]


def test_reservation_keeps_its_fill() -> None:
    history = History(CacheSpec(), (Reserve((0,), (2,)), Append((0,)), Truncate(0, 1)))
    valid = keep_valid_steps(GroupedManager, history).operations
    assert [type(step).__name__ for step in valid] == ["Reserve", "Fill"]


def test_request_is_reduced_to_its_defaults() -> None:
    sampling = Sampling(9, 3.0, 5, 0.8, 1.5, 3, ignore_eos=True, min_p=0.4, logprobs=True)
    full_request = RequestSpec((1, 2, 3), sampling, 3, cancel_after=2, ends_early=True)
    full_request = change(full_request, stop_spans=((0, 1), (2, 1)))
    mix = RequestMix(
        (full_request, full_request, full_request),
        block_size=8,
        cache_tokens=99,
        options={"batch_size": 3},
    )
    small = Shrinker(mix, Difference("it fails", str), fail_always)
    small.shrink(passes_of_mixes(ToyAdapter))
    (request,) = small.example.requests
    assert request == RequestSpec((1,), Sampling())
    assert (small.example.block_size, small.example.cache_tokens) == (1, 2)


def fail_always(_: object) -> None:
    raise Difference("it fails", str)


# ---------------------------------------------------------------------------- time limit


def test_shrinking_ends_in_time_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(SwapsRows):
        def write(self, *arguments: object) -> None:
            time.sleep(0.002)
            super().write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 0.0)
    assert "There may be a smaller example: shrinking ended after 0 s." in str(first_failure(Slow))


def test_example_that_fails_differently_is_not_accepted() -> None:
    def check(case: History) -> None:
        if len(case.operations) < len(STEPS):
            raise ZeroDivisionError
        raise Difference("it fails", str)

    small = Shrinker(History(CacheSpec(), STEPS), Difference("it fails", str), check)
    small.shrink(passes_of_histories(GroupedManager))
    assert small.example.size == len(STEPS)


@pytest.mark.parametrize(
    ("large", "small", "expected_size"), [(KeyError, None, 1), (None, KeyError, 5)]
)
def test_smaller_example_without_the_error_is_accepted(
    large: type[Exception] | None, small: type[Exception] | None, expected_size: int
) -> None:
    """The wrong contents of one example cause the error of the other."""

    def failure(case: History) -> Difference:
        difference = Difference("it fails", str)
        error_type = large if case.size == len(STEPS) else small
        difference.__cause__ = error_type() if error_type else None
        return difference

    def check(case: History) -> None:
        raise failure(case)

    history = History(CacheSpec(options=USUAL_OPTIONS), STEPS)
    shrinker = Shrinker(history, failure(history), check)
    shrinker.shrink(passes_of_histories(GroupedManager))
    assert shrinker.example.size == expected_size


def test_equal_steps_are_described_in_one_line() -> None:
    steps = [Append((0,))] * 300 + [Free(0)] * 3 + [Append((1,))]
    words = History(CacheSpec(), tuple(steps)).describe({300: "refused: no room"})
    assert words.splitlines()[1:] == [
        "  1.-299. append one token to sequence 0",
        "  300. append one token to sequence 0; refused: no room",
        "  301. free sequence 0",
        "  302. free sequence 0",
        "  303. free sequence 0",
        "  304. append one token to sequence 1",
    ]


def test_shrinking_ends_in_time_with_repeated_candidates() -> None:
    history = History(CacheSpec(), (Append((0,)),) * 300)
    candidates: list[History] = []

    def repeat(example: History) -> Iterator[History]:
        while len(candidates) < 1000:
            time.sleep(0.001)
            candidates.append(example)
            yield example

    def check(_: History) -> None:
        raise ValueError

    shrinker = Shrinker(history, ValueError(), check, ends=time.monotonic() + 0.1)
    shrinker.shrink([repeat])
    assert shrinker.cut_short
    assert 0 < len(candidates) < 200
