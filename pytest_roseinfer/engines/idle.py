"""Notices steps in which an engine had nothing to do but decode, and brought no token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Idle:
    """How many steps in a row brought no token."""

    steps: int = 0
    _before: Mapping[int, int] = field(default_factory=dict)
    """What was noted behind the last step."""

    def note(self, now: Mapping[int, int]) -> None:
        """Look at how many tokens each request that goes on has, if all are decoding."""
        self.steps = self.steps + 1 if now and now == self._before else 0
        self._before = now

    def words(self) -> str:
        """Return what is wrong with that."""
        many = f"{self.steps} steps in a row" if self.steps > 1 else "a step"
        return f"requests {[*self._before]} were decoding, and {many} brought none of them a token"
