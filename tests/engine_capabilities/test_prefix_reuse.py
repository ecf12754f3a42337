"""Cached tokens: no more than a prompt can share, and no fewer than the engine promises."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import (
    EngineAdapter,
    PrefixReuseTraits,
    RequestMix,
    Sampling,
    conformance,
    run_mix,
    settings,
)
from pytest_roseinfer.engine_capabilities.capability import required_conditions
from pytest_roseinfer.report.verdict import problems_of
from pytest_roseinfer.run import coverage
from tests.engine_capabilities.engines.prefix_engines import (
    DropsPrefixesBesideAColdPrompt,
    FindsColdStartsOfItsStep,
    GoesOnFromTheLastPrompt,
    NeverFindsAPrompt,
    PrefixEngine,
    ReadsAPromptOnItsPrefix,
    RoundsTheLogprobsOfAHit,
)
from tests.engine_capabilities.engines.small_mixes import mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine
from tests.fresh_run import fresh_run

if TYPE_CHECKING:
    from tests.engine_capabilities.engines.toy_engine import ToyRequest

    Arrivals = tuple[tuple[tuple[int, ...], int], ...]
    """Prompts, each with the step in which it arrives."""


class CachingEngine(ToyEngine):
    """Keeps the prompts that fit its room together, and evicts the least recent one."""

    kept: list[tuple[int, ...]]
    cached: dict[ToyRequest, int]

    def read_prompt(self, request: ToyRequest) -> None:
        self.kept = [*getattr(self, "kept", []), request.prompt]
        shared = [self.shared(request.prompt, other) for other in self.kept[:-1]]
        self.cached = {**getattr(self, "cached", {}), request: max(shared, default=0)}
        self.kept = [each for each in self.kept[:-1] if each != request.prompt] + [request.prompt]
        super().read_prompt(request)
        while sum(map(len, self.kept)) > self.room:
            self.kept.remove(self.evicted())

    def shared(self, prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
        length = max(at for at in range(len(prompt) + 1) if prompt[:at] == other[:at])
        return min(length, len(prompt) - 1)

    def evicted(self) -> tuple[int, ...]:
        return self.kept[0]


class Caching(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = CachingEngine
    prefix_reuse = PrefixReuseTraits(
        finds="full blocks", evicts="least recent", enabled_by={"prefixes": True}
    )

    def cached_tokens(self, request: Any) -> int:
        return int(getattr(self.engine, "cached", {}).get(request, 0))


class EvictsTheMostRecent(Caching):
    class engine_type(CachingEngine):  # noqa: N801
        def evicted(self) -> tuple[int, ...]:
            return self.kept[-2]


class ForgetsEnds(Caching):
    class engine_type(CachingEngine):  # noqa: N801
        def shared(self, prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
            return super().shared(prompt, other) // 8 * 8


class CountsATokenMore(Caching):
    class engine_type(CachingEngine):  # noqa: N801
        def shared(self, prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
            length = super().shared(prompt, other)
            return length + (length > 0) * 2


class EvictsEnds(Caching):
    """Evicts the last tokens of the least recent prompt."""

    prefix_reuse = Caching.prefix_reuse.but(evicts_from_end={})

    class engine_type(CachingEngine):  # noqa: N801
        def read_prompt(self, request: ToyRequest) -> None:
            room, self.room = self.room, 10_000
            super().read_prompt(request)
            self.room = room
            while (over := sum(map(len, self.kept)) - room) > 0:
                least, *others = self.kept
                rest = self.rest_of(least, over)
                self.kept = [rest, *others] if rest else others

        def rest_of(self, prompt: tuple[int, ...], over: int) -> tuple[int, ...]:
            return prompt[: max(0, len(prompt) - over)]


class EvictsBeginnings(EvictsEnds):
    class engine_type(EvictsEnds.engine_type):  # noqa: N801
        def rest_of(self, prompt: tuple[int, ...], over: int) -> tuple[int, ...]:
            return prompt[over:]


PROMPT, OTHER, LONG = tuple(range(9)), tuple(range(20, 29)), tuple(range(31, 0, -1))
ONE = Sampling(1, ignore_eos=True)


def in_turn(*prompts: tuple[int, ...], room: int, prefixes: bool = True) -> RequestMix:
    specs = [request_spec(*each, sampling=ONE, arrival=3 * at) for at, each in enumerate(prompts)]
    return mix(*specs, room=room, prefixes=prefixes)


AGAIN = in_turn(PROMPT, PROMPT, room=64)
LATER = in_turn(LONG, PROMPT, OTHER, PROMPT, room=48)


@pytest.mark.parametrize("requests", [AGAIN, LATER])
def test_right_counts_pass(requests: RequestMix) -> None:
    counts = run_mix(Caching, requests)
    assert counts["prompt_found_again"] == 1
    assert counts["prompt_found_after_eviction"] == (requests is LATER)


@pytest.mark.parametrize(
    ("adapter", "requests", "message"),
    [
        (
            ForgetsEnds,
            in_turn(PROMPT[:6], PROMPT[:6], room=64),
            "request 1 began with 0 cached tokens; the cache has room for the 4 that it shares "
            "with request 0",
        ),
        (
            EvictsTheMostRecent,
            LATER,
            "request 3 began with 0 cached tokens; the cache has room for the 8 that it shares "
            "with request 1",
        ),
        (
            CountsATokenMore,
            in_turn(PROMPT, (*PROMPT[:4], *OTHER), room=64),
            "request 1 began with 6 cached tokens; it shares 4 with the texts before it",
        ),
    ],
)
def test_wrong_count_is_found(
    adapter: type[EngineAdapter], requests: RequestMix, message: str
) -> None:
    assert reason(adapter, requests).startswith(message)


IN_PART = in_turn(LONG, OTHER, PROMPT, LONG, room=40)


def test_first_blocks_of_a_text_are_found_after_its_end_was_evicted() -> None:
    assert run_mix(EvictsEnds, IN_PART)["prompt_found_in_part_after_eviction"] == 1
    assert reason(EvictsBeginnings, IN_PART).startswith(
        "request 3 began with 0 cached tokens; the cache has room for the first 4 of the 28 that "
        "it shares with request 0"
    )


def test_text_that_may_have_evicted_itself_is_not_judged() -> None:
    """A prompt whose logprobs are wanted is computed again after a pause, beside its own blocks."""
    first = replace(IN_PART.requests[0], sampling=replace(ONE, prompt_logprobs=True))
    counts = run_mix(EvictsBeginnings, replace(IN_PART, requests=(first, *IN_PART.requests[1:])))
    assert not counts["prompt_found_in_part_after_eviction"]


def test_order_of_blocks_is_promised_for_some_switches_only() -> None:
    order = EvictsBeginnings.prefix_reuse.but(evicts_from_end={"prefixes": (False,)})
    counts = run_mix(type("Promises", (EvictsBeginnings,), {"prefix_reuse": order}), IN_PART)
    assert not counts["prompt_found_in_part_after_eviction"]


def test_order_of_blocks_cannot_be_promised_where_some_are_not_found() -> None:
    promise = {"prefix_reuse": PrefixReuseTraits(evicts_from_end={})}
    with pytest.raises(TypeError, match="evicts_from_end is set, and finds is 'some'"):
        conformance(type("Mine", (Caching,), promise))


def test_nothing_is_promised_where_the_switch_is_off() -> None:
    assert not run_mix(Caching, in_turn(PROMPT, PROMPT, room=64, prefixes=False))[
        "prompt_found_again"
    ]
    run_mix(ForgetsEnds, in_turn(PROMPT[:6], PROMPT[:6], room=64, prefixes=False))


def test_any_eviction_is_right_without_a_promise() -> None:
    class AnyOrder(EvictsTheMostRecent):
        prefix_reuse = EvictsTheMostRecent.prefix_reuse.but(evicts="any")

    run_mix(AnyOrder, LATER)
    assert "cache has room" in reason(
        type("Forgets", (ForgetsEnds,), {"prefix_reuse": AnyOrder.prefix_reuse}),
        in_turn(PROMPT[:6], PROMPT[:6], room=64),
    )


def test_hits_are_counted_and_those_behind_another_text() -> None:
    for requests, behind in ((AGAIN, 0), (LATER, 1)):
        counts = run_mix(Caching, requests)
        assert (counts["prompt_hit"], counts["prompt_hit_behind_another"]) == (1, behind)
    other_first = in_turn(OTHER, PROMPT, PROMPT, room=64)
    assert not run_mix(Caching, other_first)["prompt_hit_behind_another"]


@pytest.mark.parametrize(
    ("prompts", "arrivals", "cold_starts"),
    [
        ((PROMPT, PROMPT), (0, 0), 1),
        ((PROMPT, PROMPT, PROMPT), (0, 0, 0), 1),
        ((PROMPT, PROMPT), (0, 1), 0),
        ((PROMPT, PROMPT, PROMPT), (0, 1, 1), 0),
        ((PROMPT, OTHER), (0, 0), 0),
        ((PROMPT[:3], PROMPT[:3]), (0, 0), 0),
    ],
)
def test_cold_starts_of_one_prompt_are_counted(
    prompts: tuple[tuple[int, ...], ...], arrivals: tuple[int, ...], cold_starts: int
) -> None:
    specs = [
        request_spec(*prompt, sampling=ONE, arrival=arrival)
        for prompt, arrival in zip(prompts, arrivals, strict=True)
    ]
    counts = run_mix(Caching, mix(*specs, room=64, batch_size=3))
    assert counts["cold_starts_of_one_prompt"] == cold_starts


def test_engine_that_shows_cached_tokens_must_have_hits() -> None:
    required = {"prompt_hit", "prompt_hit_behind_another", "cold_starts_of_one_prompt"}
    assert required <= {*required_conditions(Caching)}
    assert required.isdisjoint(required_conditions(ToyAdapter))


def test_bits_of_a_hit_are_compared_with_those_of_a_computed_prompt() -> None:
    settings.set_current(settings.Settings(examples=30, seed=1))
    tests: Any = conformance(PrefixEngine)()
    tests.test_requests_get_what_they_get_alone()
    sampling = Sampling(2, ignore_eos=True, logprobs=True)
    specs = [request_spec(1, 2, 3, sampling=sampling, arrival=3 * at) for at in range(3)]
    requests = RequestMix(tuple(specs), options={"batch": 1}, block_size=2)
    assert run_mix(PrefixEngine, requests)["prompt_hit_compared_with_computed"] == 2
    message = reason(RoundsTheLogprobsOfAHit, requests)
    assert message.startswith("request 1, whose prompt was found, has logprob -")
    assert "request 0, whose equal prompt was computed, has -" in message


def test_search_without_a_hit_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """No history can show it: what an engine computes again is right."""
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 100)  # of conditions that need a hit
    with fresh_run(settings.Settings(examples=100, seed=1)):
        tests: Any = conformance(NeverFindsAPrompt)()
        tests.test_requests_get_what_they_get_alone()
        (problems,) = problems_of(coverage.current(), require_paths=True).values()
    assert any("'prompt_hit' was never" in each for each in problems), problems


FIVE, REVERSED = tuple(range(5)), tuple(range(5))[::-1]


@pytest.mark.parametrize(
    ("adapter", "wrong", "right"),
    [
        (GoesOnFromTheLastPrompt, ((FIVE, 0), (REVERSED, 3), (FIVE, 6)), ((FIVE, 0), (FIVE, 3))),
        (FindsColdStartsOfItsStep, ((FIVE, 0), (FIVE, 0)), ((FIVE, 0), (FIVE, 3))),
        (
            DropsPrefixesBesideAColdPrompt,
            ((FIVE, 0), (REVERSED, 3), (FIVE, 3)),
            ((FIVE, 0), (REVERSED, 3), (FIVE, 6)),
        ),
    ],
)
def test_hit_is_wrong_beside_or_behind_another_prompt_alone(
    adapter: type[EngineAdapter], wrong: Arrivals, right: Arrivals
) -> None:
    assert "were found in the cache" in reason(adapter, mix_of(wrong))
    assert run_mix(adapter, mix_of(right))["prompt_hit"] == 1
    run_mix(PrefixEngine, mix_of(wrong))


def mix_of(prompts: Arrivals) -> RequestMix:
    specs = [request_spec(*each, sampling=ONE, arrival=arrival) for each, arrival in prompts]
    return RequestMix(tuple(specs), options={"batch": 4}, block_size=2)


def test_prompt_that_is_read_on_its_prefix_is_wrong() -> None:
    message = reason(ReadsAPromptOnItsPrefix, mix_of(((FIVE, 0), (FIVE, 3))))
    assert "its first 4 tokens were found in the cache" in message


def test_bits_cannot_be_compared_without_logprobs() -> None:
    promise = {"prefix_reuse": PrefixReuseTraits(same_bits=True)}
    with pytest.raises(TypeError, match="cannot be judged without logprobs: define it"):
        conformance(type("Mine", (Caching,), promise))
