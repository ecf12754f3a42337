"""How much is let in: a bounded queue, and nothing once the server drains."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from roseinfer.server.refusals import LATER, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

_ELSEWHERE = LATER | {"Connection": "close"}
"""A client that comes again on this connection would meet the same server."""


class Admission:
    """Counts the texts that are worked on or wait, and refuses those beyond a limit."""

    def __init__(self, at_once: int, max_queue: int) -> None:
        """``at_once`` run together, and ``max_queue`` more may wait for them to end."""
        self._most = at_once + max_queue
        self.open = 0
        self.draining = False

    @contextmanager
    def admit(self, texts: int) -> Iterator[None]:
        """Count so many texts until the block ends."""
        if self.draining:
            why = "the server is about to end, and takes no more requests"
            raise Refused(503, why, code="draining", headers=_ELSEWHERE)
        if texts > self._most:
            why = f"this asks for {texts} texts at once, and there is never room for so many"
            raise Refused(400, f"{why}: at most {self._most}", code="invalid_value")
        if self.open + texts > self._most:
            why = f"{self.open} texts are open, and {self._most} may be: try again later"
            raise Refused(429, why, code="rate_limit_exceeded", headers=LATER)
        self.open += texts
        try:
            yield
        finally:
            self.open -= texts
