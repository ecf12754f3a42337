"""What went wrong, said so that a person can see it: words, a picture of the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.cases.history import History
from pytest_roseinfer.findings.difference import Difference
from pytest_roseinfer.findings.picture import picture

if TYPE_CHECKING:
    from pytest_roseinfer.findings.location import Place
    from pytest_roseinfer.running.machine import Machine


class Divergence(Difference):
    """Cache and oracle differ. Carries the history up to the step that showed it."""

    def __init__(self, machine: Machine, what: str, place: Place | None = None) -> None:
        self.history = History(machine.spec, tuple(machine.done), finite=machine.payload.finite)
        drawn = picture(machine, place)
        super().__init__(
            what, f"after step {len(machine.done)} of\n{self.history.words()}\n\n{drawn}"
        )
