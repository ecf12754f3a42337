"""Ending a text at the first stop string, wherever it was cut into pieces.

The stop strings are one automaton that each character moves once, so the cost is linear in
the text whatever the pieces are and however alike the stop strings.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

_START = 0
"""The state in which the text could be the beginning of nothing."""


class StopStrings:
    """Watches one text. The stop string that is complete first ends it; of those complete at
    the same character, the longest does, so that none of it is shown.

    Whichever ends first must win: nobody could know while the text grows whether one that
    began earlier will ever be complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise BadArgument(
                f"stop strings are {stops!r}; they must be a list of texts, not empty"
            )
        self._matcher = _Matcher(stops)
        self._state = _START
        self._held = ""
        self._met = False

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be shown by now, and whether a stop string was met: then nothing follows.

        Held back is what could be the beginning of a stop string, and no more.
        """
        if self._met:
            return "", True
        matcher, before = self._matcher, len(self._held)
        self._held += text
        for at, character in enumerate(text, before + 1):
            self._state = matcher.after(self._state, character)
            if matched := matcher.complete[self._state]:
                shown = self._held[: at - matched]
                self._held, self._met = "", True
                return shown, True
        return self._show(len(self._held) - matcher.begun[self._state]), False

    def flush(self) -> str:
        """What was held back, once the text has ended: no stop string goes on beyond."""
        self._state = _START
        return self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown


class _Matcher:
    """Aho and Corasick's automaton. A state is the longest end of the text that begins a stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._longer: list[dict[str, int]] = [{}]
        """From a state, the characters with which it begins a stop string still."""
        self._shorter = [_START]
        """The state for the next shorter end of the text that begins a stop string."""
        self.begun = [0]
        """How many characters of a stop string are there."""
        self.complete = [0]
        """The length of the longest stop string that ends here, or 0."""
        for stop in stops:
            self._add(stop)
        self._connect()

    def after(self, state: int, character: str) -> int:
        while state != _START and character not in self._longer[state]:
            state = self._shorter[state]
        return self._longer[state].get(character, _START)

    def _add(self, stop: str) -> None:
        state = _START
        for length, character in enumerate(stop, 1):
            if character not in self._longer[state]:
                self._longer[state][character] = len(self.begun)
                self._longer.append({})
                self._shorter.append(_START)
                self.begun.append(length)
                self.complete.append(0)
            state = self._longer[state][character]
        self.complete[state] = len(stop)

    def _connect(self) -> None:
        """Shorter states first: each leads on to what its beginning leads to."""
        waiting = deque(self._longer[_START].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self._longer[state].items():
                shorter = self.after(self._shorter[state], character)
                self._shorter[longer] = shorter
                self.complete[longer] = self.complete[longer] or self.complete[shorter]
                waiting.append(longer)
