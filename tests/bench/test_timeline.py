"""Latencies of one request, from known times."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.bench.driver import Timeline, latencies

KNOWN = Timeline(arrived=10.0, started=11.0, tokens=(13.0, 14.0, 16.0, 19.0))


def check_tpot(timeline: Any) -> None:
    assert timeline.time_per_output_token == pytest.approx((19.0 - 13.0) / 3)


def test_time_per_output_token_excludes_the_first() -> None:
    check_tpot(KNOWN)
    assert Timeline(0, 0, (2.0,)).time_per_output_token is None


class PerToken(Timeline):
    """Wrong formula that divides by the number of all tokens."""

    @property
    def time_per_output_token(self) -> float | None:
        return (self.tokens[-1] - self.tokens[0]) / len(self.tokens)


class FromArrival(Timeline):
    """Wrong formula that includes the time to the first token."""

    @property
    def time_per_output_token(self) -> float | None:
        return (self.tokens[-1] - self.arrived) / (len(self.tokens) - 1)


@pytest.mark.parametrize("wrong", [PerToken, FromArrival])
def test_wrong_formula_fails_the_check(wrong: type[Timeline]) -> None:
    with pytest.raises(AssertionError):
        check_tpot(wrong(KNOWN.arrived, KNOWN.started, KNOWN.tokens))


def test_latencies_are_measured_from_the_arrival() -> None:
    waits = {row.metric: row.mean_ms for row in latencies("x", [KNOWN])}
    assert (waits["queue wait"], waits["TTFT"], waits["latency"]) == (1000.0, 3000.0, 9000.0)


def test_tokens_of_one_step_have_one_gap() -> None:
    assert KNOWN.gaps() == [1.0, 2.0, 3.0]
    assert Timeline(0, 0, (1.0, 1.0, 3.0, 3.0, 4.0)).gaps() == [2.0, 1.0]
    assert Timeline(0, 0, (1.0,)).gaps() == []


def test_gaps_can_be_selected_by_token() -> None:
    together = Timeline(0, 0, (1.0, 1.0, 3.0, 3.0, 7.0))
    assert together.gaps(lambda number: number == 3) == [2.0]
    assert together.gaps(lambda number: number == 4) == [4.0]
    assert (
        together.gaps(lambda number: number < 2) == []
    )  # the first tokens have no gap before them


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)),
        (2, (1.0, 3.0, 3.0, 5.0, 5.0, 6.0)),
        (4, (1.0, 5.0, 5.0, 5.0, 5.0, 6.0)),
        (9, (1.0, 6.0, 6.0, 6.0, 6.0, 6.0)),
    ],
)
def test_chunk_arrives_with_its_last_token(interval: int, expected: tuple[float, ...]) -> None:
    timeline = Timeline(0.5, 0.6, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)).batch_tokens(interval)
    assert timeline == Timeline(0.5, 0.6, expected)
