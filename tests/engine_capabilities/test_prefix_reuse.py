"""Cached tokens: no more than a prompt can share, and no fewer than the engine promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import EngineAdapter, PrefixReuseTraits, RequestMix, Sampling, run_mix
from tests.engine_capabilities.engines.small_mixes import mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from tests.engine_capabilities.engines.toy_engine import ToyRequest


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
