"""Long work says how far it is: in lines to a pipe, at most one in ten seconds."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from roseinfer import progress
from roseinfer.progress import track_items

if TYPE_CHECKING:
    import pytest


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_line_at_the_begin_and_then_one_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    for _ in track_items(range(12), "rungs", "climbed"):
        clock.now += 4
    assert capsys.readouterr().err.splitlines() == [
        f"rungs: {done} of 12 climbed" for done in (0, 3, 6, 9)
    ]


def test_what_is_quick_says_no_more_than_that_it_began(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track_items("abc", "letters", "read")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "letters: 0 of 3 read\n")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert list(track_items([1, 2], "numbers", "added")) == [1, 2]
    assert "numbers:   0%|" in terminal.getvalue()
    assert "numbers: 0 of" not in terminal.getvalue()
