"""Tokens that rounding may decide are excused, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_roseinfer import EngineAdapter, RequestMix, Sampling, run_forks, run_mix
from tests.engine_capabilities.engines.broken_engines import Misrounds
from tests.engine_capabilities.engines.small_mixes import GREEDY, asked, mix, reason
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.engine_capabilities.engines.toy_engine import ToyRequest

Question = tuple[tuple[int, ...], Sampling]


class Undecided(Misrounds):
    """Rounding excuses every text that begins like the first request."""

    questions: ClassVar[list[Question]]

    def is_near_tie(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        assert mix.size
        self.questions.append((tuple(tokens), sampling))
        return tokens[0] == 1


@pytest.fixture
def questions() -> list[Question]:
    Undecided.questions = []
    return Undecided.questions


def first_tokens(*prompt: int) -> tuple[int, ...]:
    """Return a prompt and the tokens that must follow."""
    (token,) = ToyAdapter().generate_alone(prompt, Sampling(1), mix())
    return (*prompt, token)


@pytest.mark.parametrize("check", [run_mix, run_forks])
def test_undecided_is_asked_once_where_tokens_differ(
    check: Callable[[type[EngineAdapter], RequestMix], object], questions: list[Question]
) -> None:
    """By then the first token was found right, and the third and fourth have not been."""
    check(Undecided, mix(asked(1, 2)))
    assert questions == [(first_tokens(1, 2), GREEDY)]


@pytest.mark.parametrize("check", [run_mix, run_forks])
def test_undecided_is_not_asked_where_nothing_differs(
    check: Callable[[type[EngineAdapter], RequestMix], object], questions: list[Question]
) -> None:
    class Right(Undecided):
        engine_type = ToyEngine

    assert check(Right, mix(asked(1, 2), asked(4, 2)))
    assert questions == []


def test_undecided_excuses_nobody_else(questions: list[Question]) -> None:
    said = reason(Undecided, mix(asked(1, 2), asked(4, 2)))
    assert said.startswith("request 1, token 1: ")
    assert [tokens[0] for tokens, _ in questions] == [1, 4]


def test_undecided_excuses_only_what_follows(questions: list[Question]) -> None:
    """Rounding excuses neither the token before nor what is held at the end."""

    class WrongFromTheStart(ToyEngine):
        def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
            return [token ^ 1 for token in super().choose(batch)]

    class FromTheSecondOn(Undecided):
        engine_type = WrongFromTheStart

        def is_near_tie(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
            return super().is_near_tie(tokens, sampling, mix) and len(tokens) > 2

    assert reason(FromTheSecondOn, mix(asked(1, 2))).startswith("request 0, token 0: ")
    assert questions == [((1, 2), GREEDY)]

    class Leftover(Undecided):
        def find_leaks(self) -> str:
            return "a block"

    said = reason(Leftover, mix(asked(1, 2)))
    assert said == "every request has ended, and the engine still holds a block"
