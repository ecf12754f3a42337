"""Runs of single mixes: every request is compared, including its tokens after the end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_roseinfer import FastPath, MixDivergence, RequestMix, Sampling, run_forks, run_mix
from tests.engine_capabilities.engines.broken_engines import (
    EndsOthersOnCancel,
    LosesTheLastToken,
    Misrounds,
    RaisesInAStep,
)
from tests.engine_capabilities.engines.small_mixes import GREEDY, mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine, ToyForks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.engine_capabilities.engines.toy_engine import ToyRequest


def test_passing_mix_returns_its_path_counts() -> None:
    requests = mix(
        request_spec(1, 2),
        request_spec(1, 2, 3, arrival=9),
        request_spec(7, arrival=9),
        prefixes=True,
    )
    assert run_mix(ToyAdapter, requests) == {
        "from the start": 2,
        "from a prefix": 1,
        "by itself": 4,
        "together": 4,
        "ended_by_length_later": 3,
    }


def test_engine_is_stepped_before_and_between_requests() -> None:
    steps: list[int] = []

    class Recording(ToyAdapter):
        def step(self) -> None:
            super().step()
            steps.append(self.engine.counts["by itself"])

    run_mix(Recording, mix(request_spec(1, arrival=2), request_spec(1, arrival=8)))
    assert steps == [0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8]


def test_tokens_of_a_cancelled_request_must_be_right() -> None:
    cancelled = request_spec(1, cancel_after=1), request_spec(2, cancel_after=3)
    assert run_mix(ToyAdapter, mix(*cancelled))
    assert reason(Misrounds, mix(*cancelled)).startswith("request 1, token 1: ")


def test_error_of_a_step_is_the_cause() -> None:
    with pytest.raises(MixDivergence) as caught:
        run_mix(RaisesInAStep, mix(*[request_spec(1)] * 3, batch_size=3))
    assert isinstance(caught.value.__cause__, IndexError)


DESCRIBED_MIX = mix(
    request_spec(1, 2, sampling=Sampling(3, temperature=1.0, seed=2, repetition_penalty=1.5)),
    request_spec(3, sampling=GREEDY, arrival=1, cancel_after=2),
    room=30,
)


def test_failure_describes_its_mix() -> None:
    with pytest.raises(MixDivergence) as caught:
        run_mix(LosesTheLastToken, DESCRIBED_MIX)
    assert str(caught.value).splitlines()[1:] == [
        "",
        "a cache of 30 tokens in blocks of 4, batch_size=2, prefixes=False",
        "  0. at step 0: 2 tokens [1, 2], up to 3 new, drawn at temperature 1.0 from seed 2, "
        "repetition penalty 1.5",
        "  1. at step 1: 1 token [3], up to 4 new, past the end of the text, cancelled 2 steps "
        "later",
    ]
    assert caught.value.mix is DESCRIBED_MIX


def test_mix_is_saved_and_loaded() -> None:
    assert RequestMix.from_json(json.loads(json.dumps(DESCRIBED_MIX.to_json()))) == DESCRIBED_MIX


def test_cache_for_forks_has_room_for_all() -> None:
    cache_sizes: list[int] = []

    class Recording(ToyForks):
        def make(self, mix: RequestMix) -> None:
            cache_sizes.append(mix.cache_tokens)
            super().make(mix)

    first, second = (
        request_spec(1, 2, 3),
        request_spec(9, sampling=replace(GREEDY, max_new_tokens=7)),
    )
    assert run_forks(Recording, mix(first, second, room=5)) == {"from the start": 1}
    assert cache_sizes == [2 * (3 + 7 + 4)]


def test_request_that_ends_at_once_is_compared() -> None:
    class Closed(ToyAdapter):
        def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
            request = super().submit(prompt, sampling)
            self.engine.cancel(request)
            return request

    assert reason(Closed, mix(request_spec(1))) == "request 0 ended after 0 tokens; alone it gets 4"


def test_requests_that_end_with_a_cancelled_one_are_compared() -> None:
    requests = mix(request_spec(1, cancel_after=2), request_spec(2))
    message = reason(EndsOthersOnCancel, requests)
    assert message == "request 1 ended after 2 tokens; alone it gets 4"


def test_earlier_tokens_must_not_change() -> None:
    class Rewriting(ToyEngine):
        def take(self, request: ToyRequest, token: int) -> None:
            super().take(request, token)
            if len(request.tokens) == 3:
                request.tokens[0] ^= 1

    class Rewrites(ToyAdapter):
        engine_type = Rewriting

    assert reason(Rewrites, mix(request_spec(1))).startswith("request 0, token 0: ")


def test_cancelled_request_must_get_no_more_tokens() -> None:
    class ContinuesCancelled(ToyAdapter):
        """Reports a request as ended and continues it."""

        def make(self, mix: RequestMix) -> None:
            super().make(mix)
            self.reported_ended: set[ToyRequest] = set()

        def cancel(self, request: ToyRequest) -> None:
            self.reported_ended.add(request)

        def is_finished(self, request: ToyRequest) -> bool:
            return request.ended or request in self.reported_ended

    assert "request 0" in reason(
        ContinuesCancelled, mix(request_spec(1, cancel_after=1), request_spec(2))
    )


def test_path_that_an_option_rules_out_must_not_be_counted() -> None:
    class Contradicting(ToyAdapter):
        paths: ClassVar[Mapping[str, FastPath]] = {
            **ToyAdapter.paths,
            "together": FastPath(equals="by itself", never_with=[{"batch_size": 2}]),
        }

    assert "'together'" in reason(Contradicting, mix(request_spec(1), request_spec(2)))


def test_path_must_not_be_counted_without_the_switches_that_it_needs() -> None:
    class SwapsItsSwitch(ToyAdapter):
        def make(self, mix: RequestMix) -> None:
            other = not mix.options["prefixes"]
            super().make(replace(mix, options={**mix.options, "prefixes": other}))

    requests = request_spec(1), request_spec(1, arrival=9)
    problem = "'from a prefix' was counted, which needs prefixes=True, under prefixes=False"
    assert problem in reason(SwapsItsSwitch, mix(*requests, prefixes=False))


def test_error_of_a_fork_is_reported_with_its_mix() -> None:
    class Raising(ToyForks):
        def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
            raise KeyError(len(prompt), len(samplings))

    message = r"fork\(\) raised KeyError: \(1, 1\)\n[\s\S]*1 token \[1\]"
    with pytest.raises(MixDivergence, match=message):
        run_forks(Raising, mix(request_spec(1)))


def test_forks_must_count_declared_paths_only() -> None:
    class Undeclared(ToyForks):
        paths: ClassVar[Mapping[str, FastPath]] = {}

    with pytest.raises(
        MixDivergence,
        match="'from the start' was counted, and is in neither paths nor conditions",
    ):
        run_forks(Undeclared, mix(request_spec(1)))


def test_paths_of_the_last_step_are_counted() -> None:
    class Late(ToyAdapter):
        def make(self, mix: RequestMix) -> None:
            super().make(mix)
            self.steps = 0

        def step(self) -> None:
            self.steps += 1
            if self.steps == 22:  # one step for each of two tokens, and twenty more
                super().step()

    assert run_mix(Late, mix(request_spec(1, sampling=Sampling(1)))) == {
        "from the start": 1,
        "by itself": 1,
        "ended_by_length_at_first_token": 1,
    }
