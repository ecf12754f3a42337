"""What an adapter finds wrong by itself. A failure says what its message says, and no more."""

from __future__ import annotations

from typing import ClassVar


class FoundByAdapter(Exception):
    """What is tested broke a promise that its adapter holds it to."""


class StoppedAnswering(FoundByAdapter):
    """What is tested is gone, so that nothing can be tried on it any more."""

    who: ClassVar[str]
    """What is gone, as a failure calls it."""
