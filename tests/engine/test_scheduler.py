"""The scheduler alone: admission, limits, preemption and pauses, on counted blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roseinfer import OutOfBlocks
from roseinfer.engine.request import FinishReason
from tests.engine.scheduler_simulation import SchedulerSimulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.engine.scheduler import Step

MAX_SKIPS = 8
"""Requests that may be admitted before the longest waiting one."""


both_policies = pytest.mark.parametrize("policy", ["fifo", "pack"])


def ids_in(step: Step) -> list[int]:
    return [request.id for request, _ in step.chunks]


# ------------------------------------------------------------------------------- admission


def test_fifo_admits_in_order_of_arrival() -> None:
    simulation = SchedulerSimulation(max_batch_size=3, prefill_max_tokens=10)
    for prompt in (9, 3, 8, 1, 1, 12):
        simulation.submit(prompt, new=3)
    simulation.run()
    assert simulation.admission_order == sorted(simulation.admission_order)
    assert all(request.times_skipped == 0 for request in simulation.requests)


def test_fifo_admits_no_small_prompt_before_a_large_one() -> None:
    simulation = SchedulerSimulation(blocks=4)
    simulation.submit(8, new=4)
    large, small = simulation.submit(12), simulation.submit(1)
    simulation.step()
    assert large.sequence.num_stored == small.sequence.num_stored == 0
    simulation.run()
    assert simulation.admission_order == [0, 1, 2]


def test_pack_fills_a_step_with_prompts_that_fit_it() -> None:
    simulation = SchedulerSimulation(prefill_admission_policy="pack", prefill_max_tokens=10)
    for prompt in (6, 7, 3, 5, 1):
        simulation.submit(prompt)
    step = simulation.step()
    assert [(request.id, count) for request, count in step.chunks] == [(0, 6), (2, 3), (4, 1)]
    assert step.num_out_of_order == 3  # the second request twice, the fourth once
    assert ids_in(simulation.step()) == [1]


def test_pack_admits_a_small_prompt_first_when_blocks_are_scarce() -> None:
    simulation = SchedulerSimulation(blocks=4, prefill_admission_policy="pack")
    simulation.submit(8, new=4)
    simulation.submit(12)
    simulation.submit(1)
    assert ids_in(simulation.step()) == [0, 2]


def test_pack_chunks_a_prompt_larger_than_a_step() -> None:
    simulation = SchedulerSimulation(prefill_admission_policy="pack", prefill_max_tokens=10)
    long = simulation.submit(25)
    steps = simulation.run()
    assert [count for step in steps for _, count in step.chunks] == [10, 10, 5]
    assert long.finish_reason == "length"


@pytest.mark.parametrize(
    ("new", "each_step", "overtaken"), [(5, 1, MAX_SKIPS), (3, 2, MAX_SKIPS), (9, 3, 6)]
)
def test_pack_starves_no_request(new: int, each_step: int, overtaken: int) -> None:
    """Small prompts keep arriving, and there is always room for one more of them.

    Those of 9 tokens run out of blocks, are preempted, and then wait after the large one.
    """
    simulation = SchedulerSimulation(blocks=6, prefill_admission_policy="pack")
    simulation.submit(5, new=2)
    simulation.step()
    large = simulation.submit(24)
    for _ in range(100):
        for _ in range(each_step):
            simulation.submit(1, new=new)
        simulation.step()
        if large.sequence.num_stored:
            break
    overtaking = simulation.admission_order.index(large.id) - 1
    assert overtaking == large.times_skipped == overtaken


def test_pack_overtakes_no_prompt_that_can_start() -> None:
    """Small prompts end at once: the large one starts as soon as there is room."""
    simulation = SchedulerSimulation(blocks=6, prefill_admission_policy="pack")
    simulation.submit(5, new=2)
    simulation.step()
    simulation.submit(24)
    simulation.submit(1)
    assert ids_in(simulation.step()) == [2]
    simulation.submit(1)
    assert ids_in(simulation.step()) == [1]


@both_policies
def test_prompt_is_admitted_only_if_all_of_it_fits(policy: str) -> None:
    """With two prompts of 16 tokens and 6 blocks of 4, the second would stall half way."""
    simulation = SchedulerSimulation(
        blocks=6, prefill_max_tokens=4, prefill_admission_policy=policy
    )
    first, second = simulation.submit(16), simulation.submit(16)
    for _ in range(4):
        assert second.sequence.num_stored == 0
        simulation.step()
    assert first.finish_reason == "length"
    simulation.run()
    assert (first.times_preempted, second.times_preempted) == (0, 0)


def test_cached_blocks_of_a_prompt_count_as_used_once_it_starts() -> None:
    """With 3 cached blocks and 1 more to store, there is just room for both requests."""
    simulation = SchedulerSimulation(blocks=8)
    simulation.submit(16)
    simulation.submit(16, cached=12)
    step = simulation.step()
    assert [(request.id, count) for request, count in step.chunks] == [(0, 16), (1, 4)]
    assert step.max_blocks_needed == 5


def test_cached_prefix_is_dropped_without_room_for_its_copy() -> None:
    simulation = SchedulerSimulation(blocks=2)
    request = simulation.submit(8, cached=6)
    step = simulation.step()
    assert [count for _, count in step.chunks] == [8]
    assert simulation.block_allocator.num_clears == 1
    assert request.finish_reason == "length"


@both_policies
def test_prompt_without_room_is_retried_only_after_blocks_were_freed(policy: str) -> None:
    simulation = SchedulerSimulation(blocks=6, prefill_admission_policy=policy)
    simulation.submit(8, new=9)
    simulation.step()
    large = simulation.submit(20)
    num_lookups = []
    while not large.sequence.num_stored and large.finish_reason is None:
        simulation.step()
        num_lookups.append(simulation.block_allocator.num_lookups)
    assert num_lookups == [2] * 8 + [3]


# -------------------------------------------------------------------------------- limits


@both_policies
def test_max_batch_size_is_respected(policy: str) -> None:
    simulation = SchedulerSimulation(max_batch_size=3, prefill_admission_policy=policy)
    for _ in range(8):
        simulation.submit(2, new=4)
    steps = simulation.run()
    sizes = [len(step.decoding) + len(step.chunks) for step in steps]
    assert max(sizes) == 3
    assert len(steps) == 12  # three rounds of four tokens, the last for two requests


@both_policies
def test_prefill_limits_are_respected(policy: str) -> None:
    simulation = SchedulerSimulation(
        prefill_max_batch_size=2, prefill_max_tokens=7, prefill_admission_policy=policy
    )
    for _ in range(6):
        simulation.submit(3)
    assert [ids_in(step) for step in simulation.run()] == [[0, 1], [2, 3], [4, 5]]


def test_decoding_continues_during_a_chunked_prefill() -> None:
    simulation = SchedulerSimulation(prefill_max_tokens=5)
    running = [simulation.submit(2, new=30) for _ in range(2)]
    simulation.step()
    long = simulation.submit(42)
    for at in range(1, 10):
        step = simulation.step()
        assert step.decoding == running
        assert [count for _, count in step.chunks] == [5 if at < 9 else 2]
        assert [request.num_generated for request in running] == [at + 1] * 2
    assert long.finish_reason == "length"


@both_policies
def test_prompt_is_prefilled_whole_without_chunking(policy: str) -> None:
    simulation = SchedulerSimulation(
        prefill_max_tokens=5, chunked_prefill=False, prefill_admission_policy=policy
    )
    for prompt in (30, 2, 3, 4):
        simulation.submit(prompt)
    counts = [[count for _, count in step.chunks] for step in simulation.run()]
    assert counts == [[30], [2, 3], [4]]


def test_prompt_in_progress_precedes_a_new_one() -> None:
    simulation = SchedulerSimulation(prefill_max_tokens=5)
    simulation.submit(8)
    simulation.submit(4)
    counts = [[(each.id, count) for each, count in step.chunks] for step in simulation.run()]
    assert counts == [[(0, 5)], [(0, 3), (1, 2)], [(1, 2)]]


# ----------------------------------------------------------------------------- preemption


def test_newest_request_is_preempted() -> None:
    """All three need a second block at the same time, and one is free."""
    simulation = SchedulerSimulation(blocks=4)
    requests = [simulation.submit(4, new=5) for _ in range(3)]
    simulation.step()
    step = simulation.step()
    assert [request.id for request in step.decoding] == [0, 1]
    assert [request.times_preempted for request in requests] == [0, 0, 1]
    assert list(simulation.scheduler.waiting) == [requests[2]]
    simulation.run()
    assert [request.num_generated for request in requests] == [5, 5, 5]


def test_preempted_request_precedes_requests_that_never_ran() -> None:
    simulation = SchedulerSimulation(blocks=4, max_batch_size=3)
    for _ in range(5):
        simulation.submit(4, new=5)
    simulation.step()
    simulation.step()
    assert [request.id for request in simulation.scheduler.waiting] == [2, 3, 4]
    simulation.run()
    assert simulation.admission_order == [0, 1, 2, 3, 4]


def test_preempted_request_recomputes_its_generated_tokens() -> None:
    simulation = SchedulerSimulation(blocks=4)
    requests = [simulation.submit(4, new=9) for _ in range(2)]
    for _ in range(5):
        simulation.step()
    assert requests[1].num_generated == 5
    simulation.step()
    assert requests[1].times_preempted == 1
    assert (requests[1].sequence.num_stored, requests[1].num_unstored) == (0, 9)
    simulation.run()
    assert [request.num_generated for request in requests] == [9, 9]


def test_waiting_request_can_be_cancelled_anywhere_in_the_queue() -> None:
    simulation = SchedulerSimulation(max_batch_size=1)
    requests = [simulation.submit(4, new=3) for _ in range(5)]
    simulation.step()
    simulation.end(requests[3], FinishReason.CANCELLED)
    simulation.end(requests[0], FinishReason.CANCELLED)
    simulation.run()
    assert simulation.admission_order == [0, 1, 2, 4]
    assert simulation.block_allocator.num_used == 0


def test_request_that_can_never_fit_is_named_in_the_error() -> None:
    simulation = SchedulerSimulation(blocks=2)
    simulation.submit(9)
    with pytest.raises(OutOfBlocks, match="request 0 alone"):
        simulation.scheduler.next_step()


def test_step_is_empty_without_requests() -> None:
    assert not SchedulerSimulation().scheduler.next_step()


# ---------------------------------------------------------------------------------- pauses


def test_paused_request_holds_no_resources() -> None:
    """It occupies no slot of the batch and no block, and delays no later request."""
    simulation = SchedulerSimulation(blocks=4, max_batch_size=1)
    paused, later = simulation.submit(12, new=4), simulation.submit(16)
    simulation.step()
    simulation.pause(paused)
    assert ids_in(simulation.step()) == [later.id]
    assert simulation.block_allocator.num_used == 0
    assert not simulation.step()
    simulation.scheduler.resume(paused)
    simulation.run()
    assert (paused.num_generated, paused.finish_reason) == (4, "length")


@both_policies
def test_resumed_request_is_queued_by_arrival(policy: str) -> None:
    simulation = SchedulerSimulation(blocks=4, max_batch_size=2, prefill_admission_policy=policy)
    requests = [simulation.submit(4, new=5) for _ in range(5)]
    simulation.step()
    simulation.pause(requests[0])
    simulation.pause(requests[4])
    simulation.step()
    for request in (requests[4], requests[0], requests[0]):
        simulation.scheduler.resume(request)
    assert [each.id for each in simulation.scheduler.running.values()] == [1, 2]
    assert [each.id for each in simulation.scheduler.waiting] == [0, 3, 4]
    simulation.run()


def test_cancelled_paused_request_is_removed() -> None:
    simulation = SchedulerSimulation()
    first, second = simulation.submit(4, new=5), simulation.submit(4, new=5)
    simulation.step()
    simulation.pause(first)
    simulation.end(first, FinishReason.CANCELLED)
    assert not simulation.scheduler._leaving
    simulation.pause(second)
    simulation.step()
    simulation.end(second, FinishReason.CANCELLED)
    for request in (first, second):
        simulation.scheduler.resume(request)
    assert not simulation.step()
    assert simulation.block_allocator.num_used == 0


def test_request_resumed_before_its_pause_took_effect_continues() -> None:
    simulation = SchedulerSimulation()
    request = simulation.submit(4, new=5)
    simulation.step()
    for _ in range(2):
        simulation.pause(request)
        simulation.pause(request)
        simulation.scheduler.resume(request)
    simulation.run()
    assert (request.num_generated, request.times_preempted) == (5, 1)


# ----------------------------------------------------------------------- random histories


@dataclass(frozen=True)
class Arrival:
    """A request of a random history."""

    after: int
    """Steps since the previous arrival."""
    prompt: int
    new: int
    cached: int
    cancelled: int | None
    """Steps after its arrival; None if never."""
    paused: tuple[int, int] | None = None
    """First step of the pause since its arrival, and the number of steps; None if never."""


arrivals = st.lists(
    st.builds(
        Arrival,
        after=st.sampled_from([0, 0, 0, 1, 2, 5]),
        prompt=st.integers(1, 30),
        new=st.integers(1, 12),
        cached=st.sampled_from([0, 0, 3, 4, 8, 9, 20]),
        cancelled=st.none() | st.integers(0, 20),
        paused=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=25,
)
limits = st.fixed_dictionaries(
    {
        "prefill_admission_policy": st.sampled_from(["fifo", "pack"]),
        "max_batch_size": st.sampled_from([1, 2, 5, 64]),
        "prefill_max_batch_size": st.sampled_from([1, 2, 16]),
        "prefill_max_tokens": st.sampled_from([1, 3, 8, 20, 100]),
        "chunked_prefill": st.booleans(),
        "size": st.sampled_from([1, 2, 4, 16]),
    }
)


@settings(max_examples=170, deadline=None, database=None)
@given(arrivals, limits, st.sampled_from([0, 0, 1, 3, 100]))
@example([Arrival(0, 8, 1, 6, None)], {"size": 4}, 0)
def test_requests_of_random_histories_end(
    history: list[Arrival], limits: dict[str, Any], spare: int
) -> None:
    """The simulation checks each step; the cache fits the largest request, or some more tokens."""
    largest = max(each.prompt + each.new - 1 for each in history)
    simulation = SchedulerSimulation(blocks=-(-largest // limits["size"]) + spare, **limits)
    scheduled: list[tuple[int, Callable[[], None]]] = []
    now = 0
    for each in history:
        for _ in range(each.after):
            now = step_and_do(simulation, scheduled, now)
        request = simulation.submit(each.prompt, each.new, each.cached)
        if each.cancelled is not None:
            scheduled.append(
                (now + each.cancelled, partial(simulation.end, request, FinishReason.CANCELLED))
            )
        if each.paused is not None:
            begins, lasts = each.paused
            scheduled.append((now + begins, partial(simulation.pause, request)))
            scheduled.append((now + begins + lasts, partial(simulation.scheduler.resume, request)))
    while (
        simulation.scheduler.waiting or simulation.scheduler.running or simulation.scheduler.paused
    ):
        now = step_and_do(simulation, scheduled, now)
        assert now < 5000, "requests never end"
    assert simulation.block_allocator.num_used == 0
    for request in simulation.requests:
        assert request.finish_reason in ("length", "cancelled")
        if request.finish_reason == "length":
            assert request.num_generated == request.max_generated_tokens


def step_and_do(
    simulation: SchedulerSimulation, scheduled: list[tuple[int, Callable[[], None]]], now: int
) -> int:
    for when, action in scheduled:
        if when == now:
            action()
    simulation.step()
    return now + 1
