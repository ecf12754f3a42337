"""What became of a request before it went wrong, as far as its engine's adapter tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter

_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


@dataclass(slots=True)
class Past:
    """What was seen of a request by now."""

    stage: str = ""
    """What it was at when it was last looked at."""
    tokens: int = 0
    """How many tokens it had then."""
    preempted: int = 0
    """How many times it was preempted."""
    had: int = 0
    """How many tokens it had when it was preempted last."""
    cached: int = 0
    """How many of its first tokens were found in the cache."""

    def note(self, adapter: EngineAdapter, request: Any, tokens: int) -> None:
        """Look at a request that went on and has so many tokens now."""
        self.tokens = tokens
        if adapter.defines("stage") and not adapter.ended(request):
            before, self.stage = self.stage, adapter.stage(request)
            if self.stage == "preempted" and before != "preempted":
                self.preempted, self.had = self.preempted + 1, tokens
        if adapter.defines("cached_tokens"):
            self.cached = adapter.cached_tokens(request)

    def words(self) -> str:
        """Return what a failure of the request says behind what is wrong."""
        said = ""
        if self.cached:
            first = "token was" if self.cached == 1 else f"{self.cached} tokens were"
            said = f"; its first {first} found in the cache"
        if self.preempted:
            last = f" {self.preempted} times, last" if self.preempted > 1 else ""
            when = f"after its {_ordinal(self.had)} token" if self.had else "before its first token"
            said += f"; it was preempted{last} {when}{' and came back' * self._is_back()}"
        return said

    def _is_back(self) -> bool:
        """Return True if it goes on again, or did: it got a token or is at something else."""
        return self.tokens > self.had or self.stage != "preempted"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else _ENDINGS.get(number % 10, "th")
    return f"{number}{ending}"
