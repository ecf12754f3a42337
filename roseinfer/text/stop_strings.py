"""Ends a text at the first stop string, wherever the text was cut into pieces.

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
"""The state in which no end of the text begins a stop string."""


class StopStrings:
    """Watches one text, which the stop string that is complete first ends.

    Where several are complete at the same character, the longest counts, so that none of it is
    shown. One that began earlier but ends later cannot win: while the text grows, nobody knows
    whether it will ever be complete.
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
        """Take more text; return what may be shown by now, and whether a stop string ended it.

        Only what could be the beginning of a stop string is held back.
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
        """Return what was held back, now that the text has ended and completes no stop string."""
        self._state = _START
        return self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown


class _Matcher:
    """Aho and Corasick's automaton: a state is the longest end of the text that begins a stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._longer: list[dict[str, int]] = [{}]
        """For each state, the characters that lead on, each with the state it leads to."""
        self._shorter = [_START]
        """For each state, that of the next shorter end of the text that begins a stop string."""
        self.begun = [0]
        """For each state, how many characters of a stop string are there."""
        self.complete = [0]
        """For each state, the length of the longest stop string that ends there, or 0."""
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
        """Give each state its next shorter one, which the states of shorter ends already have."""
        waiting = deque(self._longer[_START].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self._longer[state].items():
                shorter = self.after(self._shorter[state], character)
                self._shorter[longer] = shorter
                self.complete[longer] = self.complete[longer] or self.complete[shorter]
                waiting.append(longer)
