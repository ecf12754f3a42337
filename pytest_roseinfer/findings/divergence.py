"""The errors that say what is wrong with a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.picture import picture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_roseinfer.cases.history import History
    from pytest_roseinfer.findings.finding import Finding
    from pytest_roseinfer.findings.observation import Snapshot
    from pytest_roseinfer.oracle.oracle import Oracle


class Difference(AssertionError):
    """The target does something else than it must.

    Its message is put together when it is read: a search sees hundreds of these on its way to the
    smallest example.
    """

    def __init__(self, what: str, details: Callable[[], str]) -> None:
        super().__init__(what)
        self.what = what
        """In one line."""
        self.added: list[str] = []
        """Paragraphs for the end of the message, such as how to replay it."""
        self.without_room = False
        """It is an error of a step that had to be refused anyway."""
        self.shown_by = ""
        """The test that met the same before, and shows what this one leaves out."""
        self._details = details

    def __str__(self) -> str:
        before = f"All of it is shown by {self.shown_by}, which met the same."
        return "\n\n".join([self.what, before if self.shown_by else self._details(), *self.added])


class Divergence(Difference):
    """A cache differs from its oracle after ``history``, which ends with the step that shows it."""

    def __init__(
        self,
        finding: Finding,
        history: History,
        oracle: Oracle,
        shown: Snapshot,
        refused: Mapping[int, str],
    ) -> None:
        """``refused`` says why of the steps that the cache had to refuse, and did."""

        def details() -> str:
            drawn = picture(finding.location, history.spec.num_layers, oracle, shown)
            return f"after step {history.size} of\n{history.words(refused)}\n\n{drawn}"

        super().__init__(finding.what, details)
        self.history = history
        self.location = finding.location
        self.without_room = finding.without_room
