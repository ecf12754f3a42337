"""Who runs, and how much: the scheduler on its own, with blocks that are only counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roseinfer import OutOfBlocks
from roseinfer.engine.request import FinishReason
from tests.engine.scheduler_simulation import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.engine.scheduler import Step

PATIENCE = 8
"""Requests that may be admitted before the one that waits longest."""


both_policies = pytest.mark.parametrize("policy", ["fifo", "pack"])


def ids_in(step: Step) -> list[int]:
    return [request.id for request, _ in step.chunks]


# ------------------------------------------------------------------------------- admission


def test_first_come_first_served() -> None:
    world = World(max_batch_size=3, prefill_max_tokens=10)
    for prompt in (9, 3, 8, 1, 1, 12):
        world.submit(prompt, new=3)
    world.run()
    assert world.admitted_part == sorted(world.admitted_part)
    assert all(request.times_skipped == 0 for request in world.requests)


def test_first_come_first_served_does_not_let_a_small_prompt_by() -> None:
    world = World(blocks=4)
    world.submit(8, new=4)
    large, small = world.submit(12), world.submit(1)
    world.step()
    assert large.sequence.num_stored == small.sequence.num_stored == 0
    world.run()
    assert world.admitted_part == [0, 1, 2]


def test_pack_fills_a_step_with_prompts_that_fit() -> None:
    world = World(prefill_admission_policy="pack", prefill_max_tokens=10)
    for prompt in (6, 7, 3, 5, 1):
        world.submit(prompt)
    step = world.step()
    assert [(request.id, count) for request, count in step.chunks] == [(0, 6), (2, 3), (4, 1)]
    assert step.num_out_of_order == 3  # the second twice, the fourth once
    assert ids_in(world.step()) == [1]


def test_pack_lets_a_small_prompt_by_where_blocks_are_short() -> None:
    world = World(blocks=4, prefill_admission_policy="pack")
    world.submit(8, new=4)
    world.submit(12)
    world.submit(1)
    assert ids_in(world.step()) == [0, 2]


def test_pack_begins_a_prompt_that_fits_in_no_step_whole() -> None:
    world = World(prefill_admission_policy="pack", prefill_max_tokens=10)
    long = world.submit(25)
    steps = world.run()
    assert [count for step in steps for _, count in step.chunks] == [10, 10, 5]
    assert long.finish_reason == "length"


@pytest.mark.parametrize(
    ("new", "each_step", "overtaken"), [(5, 1, PATIENCE), (3, 2, PATIENCE), (9, 3, 6)]
)
def test_pack_keeps_nobody_waiting_for_ever(new: int, each_step: int, overtaken: int) -> None:
    """Small prompts keep coming, and there is always room for one more of them.

    Those of 9 tokens run out of blocks and must give way, and then wait behind the large one.
    """
    world = World(blocks=6, prefill_admission_policy="pack")
    world.submit(5, new=2)
    world.step()
    large = world.submit(24)
    for _ in range(100):
        for _ in range(each_step):
            world.submit(1, new=new)
        world.step()
        if large.sequence.num_stored:
            break
    overtaking = world.admitted_part.index(large.id) - 1
    assert overtaking == large.times_skipped == overtaken


def test_pack_does_not_overtake_who_can_begin() -> None:
    """Small prompts that end at once: as soon as there is room, the large one takes it."""
    world = World(blocks=6, prefill_admission_policy="pack")
    world.submit(5, new=2)
    world.step()
    world.submit(24)
    world.submit(1)
    assert ids_in(world.step()) == [2]
    world.submit(1)
    assert ids_in(world.step()) == [1]


@both_policies
def test_a_prompt_is_let_in_only_if_all_of_it_has_room(policy: str) -> None:
    """Two of 16 tokens in 6 blocks of 4: the second would be stuck half way."""
    world = World(blocks=6, prefill_max_tokens=4, prefill_admission_policy=policy)
    first, second = world.submit(16), world.submit(16)
    for _ in range(4):
        assert second.sequence.num_stored == 0
        world.step()
    assert first.finish_reason == "length"
    world.run()
    assert (first.times_preempted, second.times_preempted) == (0, 0)


def test_what_is_known_of_a_prompt_counts_as_taken_once_it_begins() -> None:
    """3 blocks that nobody used, and 1 more to store: there is just room for both requests."""
    world = World(blocks=8)
    world.submit(16)
    world.submit(16, known=12)
    step = world.step()
    assert [(request.id, count) for request, count in step.chunks] == [(0, 16), (1, 4)]
    assert step.max_blocks_needed == 5


def test_a_known_prompt_that_has_no_room_for_a_copy_does_without() -> None:
    world = World(blocks=2)
    request = world.submit(8, known=6)
    step = world.step()
    assert [count for _, count in step.chunks] == [8]
    assert world.block_allocator.drops == 1
    assert request.finish_reason == "length"


@both_policies
def test_a_prompt_without_room_is_not_tried_again_until_there_may_be(policy: str) -> None:
    world = World(blocks=6, prefill_admission_policy=policy)
    world.submit(8, new=9)
    world.step()
    large = world.submit(20)
    starts = []
    while not large.sequence.num_stored and large.finish_reason is None:
        world.step()
        starts.append(world.block_allocator.starts)
    assert starts == [2] * 8 + [3]


# -------------------------------------------------------------------------------- limits


@both_policies
def test_no_more_run_than_may(policy: str) -> None:
    world = World(max_batch_size=3, prefill_admission_policy=policy)
    for _ in range(8):
        world.submit(2, new=4)
    steps = world.run()
    sizes = [len(step.decoding) + len(step.chunks) for step in steps]
    assert max(sizes) == 3
    assert len(steps) == 12  # three rounds of four tokens, the last for two


@both_policies
def test_no_more_prompts_and_tokens_in_a_step_than_may_be(policy: str) -> None:
    world = World(prefill_max_batch_size=2, prefill_max_tokens=7, prefill_admission_policy=policy)
    for _ in range(6):
        world.submit(3)
    assert [ids_in(step) for step in world.run()] == [[0, 1], [2, 3], [4, 5]]


def test_decoding_goes_on_while_a_long_prompt_is_stored() -> None:
    world = World(prefill_max_tokens=5)
    running = [world.submit(2, new=30) for _ in range(2)]
    world.step()
    long = world.submit(42)
    for at in range(1, 10):
        step = world.step()
        assert step.decoding == running
        assert [count for _, count in step.chunks] == [5 if at < 9 else 2]
        assert [request.num_generated for request in running] == [at + 1] * 2
    assert long.finish_reason == "length"


@both_policies
def test_without_chunks_a_prompt_goes_whole_however_long(policy: str) -> None:
    world = World(prefill_max_tokens=5, chunked_prefill=False, prefill_admission_policy=policy)
    for prompt in (30, 2, 3, 4):
        world.submit(prompt)
    counts = [[count for _, count in step.chunks] for step in world.run()]
    assert counts == [[30], [2, 3], [4]]


def test_a_prompt_that_goes_on_comes_before_one_that_begins() -> None:
    world = World(prefill_max_tokens=5)
    world.submit(8)
    world.submit(4)
    counts = [[(each.id, count) for each, count in step.chunks] for step in world.run()]
    assert counts == [[(0, 5)], [(0, 3), (1, 2)], [(1, 2)]]


# ----------------------------------------------------------------------------- preemption


def test_the_newest_gives_way() -> None:
    """All three need a second block at the same time, and there is one."""
    world = World(blocks=4)
    requests = [world.submit(4, new=5) for _ in range(3)]
    world.step()
    step = world.step()
    assert [request.id for request in step.decoding] == [0, 1]
    assert [request.times_preempted for request in requests] == [0, 0, 1]
    assert list(world.scheduler.waiting) == [requests[2]]
    world.run()
    assert [request.num_generated for request in requests] == [5, 5, 5]


def test_who_gave_way_comes_before_those_who_never_ran() -> None:
    world = World(blocks=4, max_batch_size=3)
    for _ in range(5):
        world.submit(4, new=5)
    world.step()
    world.step()
    assert [request.id for request in world.scheduler.waiting] == [2, 3, 4]
    world.run()
    assert world.admitted_part == [0, 1, 2, 3, 4]


def test_a_request_that_gave_way_stores_what_it_had_generated_too() -> None:
    world = World(blocks=4)
    requests = [world.submit(4, new=9) for _ in range(2)]
    for _ in range(5):
        world.step()
    assert requests[1].num_generated == 5
    world.step()
    assert requests[1].times_preempted == 1
    assert (requests[1].sequence.num_stored, requests[1].num_unstored) == (0, 9)
    world.run()
    assert [request.num_generated for request in requests] == [9, 9]


def test_one_that_waits_can_leave_from_anywhere() -> None:
    world = World(max_batch_size=1)
    requests = [world.submit(4, new=3) for _ in range(5)]
    world.step()
    world.end(requests[3], FinishReason.CANCELLED)
    world.end(requests[0], FinishReason.CANCELLED)
    world.run()
    assert world.admitted_part == [0, 1, 2, 4]
    assert world.block_allocator.taken == 0


def test_a_request_that_can_never_fit_is_our_fault_and_named() -> None:
    world = World(blocks=2)
    world.submit(9)
    with pytest.raises(OutOfBlocks, match="request 0 alone"):
        world.scheduler.next_step()


def test_nothing_to_do_is_no_step() -> None:
    assert not World().scheduler.next_step()


# ---------------------------------------------------------------------------------- pauses


def test_a_paused_request_is_in_nobodys_way() -> None:
    """Neither in the batch, nor by its blocks; and it holds up nobody behind it."""
    world = World(blocks=4, max_batch_size=1)
    paused, later = world.submit(12, new=4), world.submit(16)
    world.step()
    world.pause(paused)
    assert ids_in(world.step()) == [later.id]
    assert world.block_allocator.taken == 0
    assert not world.step()
    world.scheduler.resume(paused)
    world.run()
    assert (paused.num_generated, paused.finish_reason) == (4, "length")


@both_policies
def test_a_request_that_goes_on_waits_in_front_of_those_that_came_after_it(policy: str) -> None:
    world = World(blocks=4, max_batch_size=2, prefill_admission_policy=policy)
    requests = [world.submit(4, new=5) for _ in range(5)]
    world.step()
    world.pause(requests[0])
    world.pause(requests[4])
    world.step()
    for request in (requests[4], requests[0], requests[0]):
        world.scheduler.resume(request)
    assert [each.id for each in world.scheduler.running.values()] == [1, 2]
    assert [each.id for each in world.scheduler.waiting] == [0, 3, 4]
    world.run()


def test_a_paused_request_that_ends_is_forgotten() -> None:
    world = World()
    first, second = world.submit(4, new=5), world.submit(4, new=5)
    world.step()
    world.pause(first)
    world.end(first, FinishReason.CANCELLED)
    assert not world.scheduler._leaving
    world.pause(second)
    world.step()
    world.end(second, FinishReason.CANCELLED)
    for request in (first, second):
        world.scheduler.resume(request)
    assert not world.step()
    assert world.block_allocator.taken == 0


def test_one_that_is_resumed_before_it_was_set_aside_goes_on() -> None:
    world = World()
    request = world.submit(4, new=5)
    world.step()
    for _ in range(2):
        world.pause(request)
        world.pause(request)
        world.scheduler.resume(request)
    world.run()
    assert (request.num_generated, request.times_preempted) == (5, 1)


# ------------------------------------------------------------------------ any history at all


@dataclass(frozen=True)
class PendingReadback:
    """A request of a random history."""

    after: int
    """Steps since the one before."""
    prompt: int
    new: int
    known: int
    cancelled: int | None
    """Steps after it came."""
    paused: tuple[int, int] | None = None
    """The first step since it came in which it is paused, and for how many."""


arrivals = st.lists(
    st.builds(
        PendingReadback,
        after=st.sampled_from([0, 0, 0, 1, 2, 5]),
        prompt=st.integers(1, 30),
        new=st.integers(1, 12),
        known=st.sampled_from([0, 0, 3, 4, 8, 9, 20]),
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
@example([PendingReadback(0, 8, 1, 6, None)], {"size": 4}, 0)
def test_every_request_of_any_history_ends(
    history: list[PendingReadback], limits: dict[str, Any], spare: int
) -> None:
    """``World`` looks at every step; the cache has room for the largest request, or some more."""
    largest = max(each.prompt + each.new - 1 for each in history)
    world = World(blocks=-(-largest // limits["size"]) + spare, **limits)
    due: list[tuple[int, Callable[[], None]]] = []
    now = 0
    for each in history:
        for _ in range(each.after):
            now = step_and_do(world, due, now)
        request = world.submit(each.prompt, each.new, each.known)
        if each.cancelled is not None:
            due.append((now + each.cancelled, partial(world.end, request, FinishReason.CANCELLED)))
        if each.paused is not None:
            begins, lasts = each.paused
            due.append((now + begins, partial(world.pause, request)))
            due.append((now + begins + lasts, partial(world.scheduler.resume, request)))
    while world.scheduler.waiting or world.scheduler.running or world.scheduler.paused:
        now = step_and_do(world, due, now)
        assert now < 5000, "requests that never end"
    assert world.block_allocator.taken == 0
    for request in world.requests:
        assert request.finish_reason in ("length", "cancelled")
        if request.finish_reason == "length":
            assert request.num_generated == request.max_generated_tokens


def step_and_do(world: World, due: list[tuple[int, Callable[[], None]]], now: int) -> int:
    for when, what in due:
        if when == now:
            what()
    world.step()
    return now + 1
