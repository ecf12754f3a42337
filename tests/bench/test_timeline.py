"""What one request waited for, from times that are known."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.bench.driver import Timeline, latencies

KNOWN = Timeline(arrived=10.0, started=11.0, tokens=(13.0, 14.0, 16.0, 19.0))


def check_tpot(seen: Any) -> None:
    assert seen.time_per_output_token == pytest.approx((19.0 - 13.0) / 3)


def test_time_per_output_token_leaves_the_first_one_out() -> None:
    check_tpot(KNOWN)
    assert Timeline(0, 0, (2.0,)).time_per_output_token is None


class PerToken(Timeline):
    """The mistake of dividing by all tokens."""

    @property
    def time_per_output_token(self) -> float | None:
        return (self.tokens[-1] - self.tokens[0]) / len(self.tokens)


class FromArrival(Timeline):
    """The mistake of counting the prompt's time in."""

    @property
    def time_per_output_token(self) -> float | None:
        return (self.tokens[-1] - self.arrived) / (len(self.tokens) - 1)


@pytest.mark.parametrize("wrong", [PerToken, FromArrival])
def test_a_wrong_formula_is_seen(wrong: type[Timeline]) -> None:
    with pytest.raises(AssertionError):
        check_tpot(wrong(KNOWN.arrived, KNOWN.started, KNOWN.tokens))


def test_waits_are_counted_from_the_arrival() -> None:
    waits = {row.metric: row.mean_ms for row in latencies("x", [KNOWN])}
    assert (waits["queue wait"], waits["TTFT"], waits["latency"]) == (1000.0, 3000.0, 9000.0)


def test_tokens_that_come_together_have_one_gap_before_them() -> None:
    assert KNOWN.gaps() == [1.0, 2.0, 3.0]
    assert Timeline(0, 0, (1.0, 1.0, 3.0, 3.0, 4.0)).gaps() == [2.0, 1.0]
    assert Timeline(0, 0, (1.0,)).gaps() == []


def test_gaps_are_those_before_the_wanted_tokens() -> None:
    together = Timeline(0, 0, (1.0, 1.0, 3.0, 3.0, 7.0))
    assert together.gaps(lambda number: number == 3) == [2.0]
    assert together.gaps(lambda number: number == 4) == [4.0]
    assert together.gaps(lambda number: number < 2) == []  # nothing comes before those


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        (1, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)),
        (2, (1.0, 3.0, 3.0, 5.0, 5.0, 6.0)),
        (4, (1.0, 5.0, 5.0, 5.0, 5.0, 6.0)),
        (9, (1.0, 6.0, 6.0, 6.0, 6.0, 6.0)),
    ],
)
def test_parts_come_when_their_last_token_does(interval: int, shown: tuple[float, ...]) -> None:
    seen = Timeline(0.5, 0.6, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)).batch_tokens(interval)
    assert seen == Timeline(0.5, 0.6, shown)
