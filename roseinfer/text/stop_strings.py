"""Ends a text at the first stop string, wherever the text was cut into pieces.

The stop strings form Aho and Corasick's automaton, which every character moves once: the cost is
linear in the text, however it is cut and however alike the stop strings are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

_START = 0


class StopStrings:
    """Watches one text, which ends at the stop string that is complete first.

    Where several are complete at the same character, the longest counts, so that none of it is
    shown. One that began earlier but ends later cannot win: while the text grows, nobody knows
    whether it will ever be complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise BadArgument(
                f"stop strings are {stops!r}; they must be a list of texts, not empty"
            )
        # A state is the longest end of the text that begins a stop string. These have an item
        # for each state:
        self._longer: list[dict[str, int]] = [{}]
        """The characters that lead on, each with the state it leads to."""
        self._shorter = [_START]
        """The state of the next shorter end of the text that begins a stop string."""
        self._begun = [0]
        """How many characters of a stop string are there."""
        self._complete = [0]
        """The length of the longest stop string that ends there, or 0."""
        for stop in stops:
            self._add(stop)
        self._connect()
        self._state = _START
        self._held = ""
        self._met = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown by now, and whether a stop string ended it.

        Only what could be the beginning of a stop string is held back.
        """
        if self._met:
            return "", True
        before = len(self._held)
        self._held += text
        for at, character in enumerate(text, before + 1):
            self._state = self._after(self._state, character)
            if matched := self._complete[self._state]:
                shown = self._held[: at - matched]
                self._held, self._met = "", True
                return shown, True
        certain = len(self._held) - self._begun[self._state]
        shown, self._held = self._held[:certain], self._held[certain:]
        return shown, False

    def flush(self) -> str:
        """Return what was held back, now that the text has ended and completes no stop string."""
        self._state = _START
        shown, self._held = self._held, ""
        return shown

    def _after(self, state: int, character: str) -> int:
        while state != _START and character not in self._longer[state]:
            state = self._shorter[state]
        return self._longer[state].get(character, _START)

    def _add(self, stop: str) -> None:
        state = _START
        for length, character in enumerate(stop, 1):
            if character not in self._longer[state]:
                self._longer[state][character] = len(self._begun)
                self._longer.append({})
                self._shorter.append(_START)
                self._begun.append(length)
                self._complete.append(0)
            state = self._longer[state][character]
        self._complete[state] = len(stop)

    def _connect(self) -> None:
        """Give each state its next shorter one, which the states of shorter ends already have."""
        waiting = deque(self._longer[_START].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self._longer[state].items():
                shorter = self._after(self._shorter[state], character)
                self._shorter[longer] = shorter
                self._complete[longer] = self._complete[longer] or self._complete[shorter]
                waiting.append(longer)
