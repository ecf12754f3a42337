"""The errors that say what is wrong with a target; each is shown as its message, and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.picture import picture

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.cases.history import History
    from pytest_roseinfer.findings.finding import Finding
    from pytest_roseinfer.oracle import Oracle
    from pytest_roseinfer.running.observation import Snapshot


class Difference(AssertionError):
    """What was tested does something else than it must.

    Its message is put together when somebody reads it: a search sees hundreds on its way to
    the smallest example.
    """

    def __init__(self, what: str, details: Callable[[], str]) -> None:
        super().__init__(what)
        self.what = what
        """In one line."""
        self.added: list[str] = []
        """What else there is to say, as how to replay it."""
        self._details = details

    def __str__(self) -> str:
        return "\n\n".join([self.what, self._details(), *self.added])


class Divergence(Difference):
    """Cache and oracle differ. Carries the history up to the step that showed it."""

    def __init__(self, finding: Finding, history: History, oracle: Oracle, shown: Snapshot) -> None:
        super().__init__(finding.what, self._told)
        self.history = history
        self._drawn = (finding.location, history.spec.num_layers, oracle, shown)

    def _told(self) -> str:
        drawn = picture(*self._drawn)
        return f"after step {self.history.size} of\n{self.history.words()}\n\n{drawn}"
