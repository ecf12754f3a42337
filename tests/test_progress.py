"""Progress of long work: a bar on a terminal, and at most one line in ten seconds elsewhere."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from roseinfer import terminal as terminal_module
from roseinfer.terminal import track_items

if TYPE_CHECKING:
    import pytest


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_first_line_and_one_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(terminal_module, "time", clock)
    for _ in track_items(range(12), "rungs", "climbed"):
        clock.now += 4
    assert capsys.readouterr().err.splitlines() == [
        f"rungs: {done} of 12 climbed" for done in (0, 3, 6, 9)
    ]


def test_short_work_prints_the_first_line_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track_items("abc", "letters", "read")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "letters: 0 of 3 read\n")


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert list(track_items([1, 2], "numbers", "added")) == [1, 2]
    assert "numbers:   0%|" in terminal.getvalue()
    assert "numbers: 0 of" not in terminal.getvalue()
