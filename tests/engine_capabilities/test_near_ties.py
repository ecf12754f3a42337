"""Near ties: tokens that rounding may decide are excused, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_roseinfer import EngineAdapter, RequestMix, Sampling, run_forks, run_mix
from tests.engine_capabilities.engines.broken_engines import Misrounds
from tests.engine_capabilities.engines.small_mixes import GREEDY, mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.engine_capabilities.engines.toy_engine import ToyRequest

Call = tuple[tuple[int, ...], Sampling]


class ReportsNearTies(Misrounds):
    """Reports a near tie for every text that begins like the first request."""

    calls: ClassVar[list[Call]]

    def is_near_tie(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        assert mix.size
        self.calls.append((tuple(tokens), sampling))
        return tokens[0] == 1


@pytest.fixture
def calls() -> list[Call]:
    ReportsNearTies.calls = []
    return ReportsNearTies.calls


def first_tokens(*prompt: int) -> tuple[int, ...]:
    """Return a prompt and its right first token."""
    (token,) = ToyAdapter().generate_alone(prompt, Sampling(1), mix())
    return (*prompt, token)


@pytest.mark.parametrize("check", [run_mix, run_forks])
def test_is_near_tie_is_called_once_where_tokens_differ(
    check: Callable[[type[EngineAdapter], RequestMix], object], calls: list[Call]
) -> None:
    """The first token was right before, and the third and fourth come later."""
    check(ReportsNearTies, mix(request_spec(1, 2)))
    assert calls == [(first_tokens(1, 2), GREEDY)]


@pytest.mark.parametrize("check", [run_mix, run_forks])
def test_is_near_tie_is_not_called_where_tokens_agree(
    check: Callable[[type[EngineAdapter], RequestMix], object], calls: list[Call]
) -> None:
    class Right(ReportsNearTies):
        engine_type = ToyEngine

    assert check(Right, mix(request_spec(1, 2), request_spec(4, 2)))
    assert calls == []


def test_near_tie_does_not_excuse_other_requests(calls: list[Call]) -> None:
    message = reason(ReportsNearTies, mix(request_spec(1, 2), request_spec(4, 2)))
    assert message.startswith("request 1, token 1: ")
    assert [tokens[0] for tokens, _ in calls] == [1, 4]


def test_near_tie_excuses_only_later_tokens(calls: list[Call]) -> None:
    """Rounding excuses neither the token before a near tie nor a leak at the end."""

    class WrongFromTheStart(ToyEngine):
        def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
            return [token ^ 1 for token in super().choose(batch)]

    class FromTheSecondOn(ReportsNearTies):
        engine_type = WrongFromTheStart

        def is_near_tie(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
            return super().is_near_tie(tokens, sampling, mix) and len(tokens) > 2

    assert reason(FromTheSecondOn, mix(request_spec(1, 2))).startswith("request 0, token 0: ")
    assert calls == [((1, 2), GREEDY)]

    class Leaking(ReportsNearTies):
        def find_leaks(self) -> str:
            return "a block"

    message = reason(Leaking, mix(request_spec(1, 2)))
    assert message == "every request has ended, and the engine still holds a block"
