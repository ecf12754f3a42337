"""One mix served at a time: every request is compared, to its last token and after it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_roseinfer import FastPath, MixDivergence, RequestMix, Sampling, run_forks, run_mix
from tests.engine_capabilities.engines.broken_engines import (
    EndsOthersWithTheCancelled,
    LosesTheLastToken,
    Misrounds,
    RaisesInAStep,
)
from tests.engine_capabilities.engines.small_mixes import GREEDY, asked, mix, reason
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine, ToyForks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.engine_capabilities.engines.toy_engine import ToyRequest


def test_a_mix_that_goes_well_returns_the_paths_it_took() -> None:
    requests = mix(asked(1, 2), asked(1, 2, 3, arrival=9), asked(7, arrival=9), prefixes=True)
    assert run_mix(ToyAdapter, requests) == {
        "from the start": 2,
        "from a prefix": 1,
        "by itself": 4,
        "together": 4,
    }


def test_an_engine_is_stepped_before_and_between_its_requests() -> None:
    steps: list[int] = []

    class Watched(ToyAdapter):
        def step(self) -> None:
            super().step()
            steps.append(self.engine.counts["by itself"])

    run_mix(Watched, mix(asked(1, arrival=2), asked(1, arrival=8)))
    assert steps == [0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8]


def test_what_a_cancelled_request_got_before_must_be_right() -> None:
    leaving = asked(1, cancel_after=1), asked(2, cancel_after=3)
    assert run_mix(ToyAdapter, mix(*leaving))
    assert reason(Misrounds, mix(*leaving)).startswith("request 1, token 1: ")


def test_a_step_that_raised_is_to_blame() -> None:
    with pytest.raises(MixDivergence) as caught:
        run_mix(RaisesInAStep, mix(*[asked(1)] * 3, batch_size=3))
    assert isinstance(caught.value.__cause__, IndexError)


SHOWN = mix(
    asked(1, 2, sampling=Sampling(3, temperature=1.0, seed=2, repetition_penalty=1.5)),
    asked(3, sampling=GREEDY, arrival=1, cancel_after=2),
    room=30,
)


def test_a_failure_tells_its_mix_in_words() -> None:
    with pytest.raises(MixDivergence) as caught:
        run_mix(LosesTheLastToken, SHOWN)
    assert str(caught.value).splitlines()[1:] == [
        "",
        "a cache of 30 tokens in blocks of 4, batch_size=2, prefixes=False",
        "  0. at step 0: 2 tokens [1, 2], up to 3 new, drawn at temperature 1.0 from seed 2, "
        "repetition penalty 1.5",
        "  1. at step 1: 1 token [3], up to 4 new, past the end of the text, cancelled 2 steps "
        "later",
    ]
    assert caught.value.mix is SHOWN


def test_a_mix_survives_being_saved() -> None:
    assert RequestMix.from_json(json.loads(json.dumps(SHOWN.to_json()))) == SHOWN


def test_forks_get_a_cache_that_has_room_for_all() -> None:
    rooms: list[int] = []

    class Watched(ToyForks):
        def make(self, mix: RequestMix) -> None:
            rooms.append(mix.cache_tokens)
            super().make(mix)

    first, second = asked(1, 2, 3), asked(9, sampling=replace(GREEDY, max_new_tokens=7))
    assert run_forks(Watched, mix(first, second, room=5)) == {"from the start": 1}
    assert rooms == [2 * (3 + 7 + 4)]


def test_a_request_that_is_over_at_once_is_compared_too() -> None:
    class Closed(ToyAdapter):
        def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
            request = super().submit(prompt, sampling)
            self.engine.cancel(request)
            return request

    assert reason(Closed, mix(asked(1))) == "request 0 ended after 0 tokens; alone it gets 4"


def test_requests_that_end_with_a_cancelled_one_are_compared_too() -> None:
    both = mix(asked(1, cancel_after=2), asked(2))
    said = reason(EndsOthersWithTheCancelled, both)
    assert said == "request 1 ended after 2 tokens; alone it gets 4"


def test_a_token_that_was_right_must_stay_so() -> None:
    class Rewriting(ToyEngine):
        def take(self, request: ToyRequest, token: int) -> None:
            super().take(request, token)
            if len(request.tokens) == 3:
                request.tokens[0] ^= 1

    class Rewrites(ToyAdapter):
        engine_type = Rewriting

    assert reason(Rewrites, mix(asked(1))).startswith("request 0, token 0: ")


def test_a_request_that_was_cancelled_gets_nothing_more() -> None:
    class Deaf(ToyAdapter):
        """It says that a request has ended and goes on with it."""

        def make(self, mix: RequestMix) -> None:
            super().make(mix)
            self.left: set[ToyRequest] = set()

        def cancel(self, request: ToyRequest) -> None:
            self.left.add(request)

        def is_finished(self, request: ToyRequest) -> bool:
            return request.over or request in self.left

    assert "request 0" in reason(Deaf, mix(asked(1, cancel_after=1), asked(2)))


def test_a_path_that_its_switches_rule_out_must_not_be_counted() -> None:
    class Contradicting(ToyAdapter):
        paths: ClassVar[Mapping[str, FastPath]] = {
            **ToyAdapter.paths,
            "together": FastPath(equals="by itself", never_with=[{"batch_size": 2}]),
        }

    assert "'together'" in reason(Contradicting, mix(asked(1), asked(2)))


def test_forks_take_declared_paths_only() -> None:
    class Undeclared(ToyForks):
        paths: ClassVar[Mapping[str, FastPath]] = {}

    with pytest.raises(
        MixDivergence,
        match="'from the start' was counted, and is in neither paths nor conditions",
    ):
        run_forks(Undeclared, mix(asked(1)))


def test_the_last_step_counts() -> None:
    class Late(ToyAdapter):
        def make(self, mix: RequestMix) -> None:
            super().make(mix)
            self.steps = 0

        def step(self) -> None:
            self.steps += 1
            if self.steps == 22:  # one for each of two tokens, and twenty
                super().step()

    assert run_mix(Late, mix(asked(1, sampling=Sampling(1)))) == {
        "from the start": 1,
        "by itself": 1,
    }
