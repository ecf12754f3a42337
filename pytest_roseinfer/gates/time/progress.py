"""A measurement that takes long says how far it is, in lines that reach a pipe as well."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

_FIRST = 2.0
"""What takes no longer than so many seconds says nothing."""
_EVERY = 5.0
"""Seconds between two lines, at least."""


class Progress:
    """Hands lines to ``say``, and leaves out those that come too early."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._begin = clock()
        self._due = self._begin + _FIRST

    def note(self, words: Callable[[], str]) -> None:
        """Say ``words()`` and the time that has passed, if a line is due."""
        now = self._clock()
        if now >= self._due:
            self._say(f"{words()} ({now - self._begin:.0f} s)")
            self._due = now + _EVERY


def terminal_of(config: pytest.Config) -> Callable[[str], None]:
    """Return what writes a line of a running test to pytest's output at once, past its capture."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    capture: Any = config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        if reporter is None:
            return
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.write_line(line)
            reporter.flush()

    return say
