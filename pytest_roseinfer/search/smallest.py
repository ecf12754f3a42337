"""Makes an example on which a check fails as small as it goes, within a time.

It tries smaller examples and keeps each on which the check still fails, until none does. It works
on the example itself, a history or a mix of requests, and not on the choices it was drawn by: a
choice means something else once one before it is gone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from pytest_roseinfer.findings.divergence import Difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_roseinfer.search.reproduce import Example

SECONDS = 20.0
"""The time that making one example smaller may take."""
_Case = TypeVar("_Case", bound="Example")


@dataclass(slots=True)
class Smallest(Generic[_Case]):
    """The smallest example so far, and how the check failed on it."""

    example: _Case
    failure: Exception
    check: Callable[[_Case], object]
    ends: float = field(default_factory=lambda: monotonic() + SECONDS)
    cut_short: bool = False
    """The time was over before all that is smaller had been tried."""
    _tried: set[str] = field(default_factory=set)

    def shrink(self, passes: Sequence[Callable[[_Case], Iterator[_Case]]]) -> None:
        """Try what the passes list, in turns, until nothing smaller fails or the time is over."""
        before = None
        while before != self.example and not self.cut_short:
            before = self.example
            for smaller in passes:
                self._go_through(smaller)

    def say_if_cut_short(self) -> None:
        """Have a failure say that there may be a smaller example."""
        if self.cut_short and isinstance(self.failure, Difference):
            self.failure.added.append(
                f"There may be a smaller one: making it smaller ended after {SECONDS:g} s."
            )

    def _go_through(self, smaller: Callable[[_Case], Iterator[_Case]]) -> None:
        """Try what one pass lists; go on at the same place of the new list where one is kept."""
        at: int | None = 0
        while at is not None:
            at = self._next_kept(smaller, at)

    def _next_kept(self, smaller: Callable[[_Case], Iterator[_Case]], begin: int) -> int | None:
        for at, candidate in enumerate(islice(smaller(self.example), begin, None), begin):
            if self.cut_short:
                return None
            if self._still_fails(candidate):
                return at
        return None

    def _still_fails(self, candidate: _Case) -> bool:
        """Try an example unless it was tried before; keep it if the check fails in the same way."""
        # Of a long history there are many that come to the same, and listing them takes long too.
        self.cut_short = monotonic() > self.ends
        text = json.dumps(candidate.to_json())
        if self.cut_short or text in self._tried:
            return False
        self._tried.add(text)
        try:
            self.check(candidate)
        except type(self.failure) as failure:
            # Who raises an error has another mistake than who holds what is wrong. But an error may
            # come of what was held, which a smaller example shows at once.
            if type(failure.__cause__) not in (type(self.failure.__cause__), type(None)):
                return False
            # An error of a step that fits is worse than one where another is due.
            if _without_room(failure) and not _without_room(self.failure):
                return False
            self.example, self.failure = candidate, failure
            return True
        except Exception:  # something else is wrong there
            return False
        return False


def _without_room(failure: Exception) -> bool:
    return isinstance(failure, Difference) and failure.without_room
