"""What a search found, as plain data: reports hold it, and workers send it to their controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from pytest_roseinfer.findings.drawn.frame import Frame
    from pytest_roseinfer.findings.drawn.timeline import Timeline


class Found(TypedDict):
    """One difference, however many tests met it."""

    target: str
    check: str
    """The check that found it, by the name that a trace gives it."""
    tests: list[str]
    """The tests that met it, by their ids."""
    what: str
    """What is wrong, in one line."""
    message: str
    expected: str
    """What must stand in the wrong place, where one place is known to be wrong."""
    found: str
    """What stands there."""
    example: dict[str, Any]
    """The smallest history or mix of requests, as in the trace."""
    trace: str
    """The file to replay, from the root of the project; empty where none could be saved."""
    script: str
    drawing: str
    layer: int
    """The layer that frames show."""
    block_size: int
    frames: list[Frame]
    """The cache before the first step of the history and after each; empty for an engine."""
    timeline: Timeline | None
    """What became of an engine's requests."""


def add(known: list[Found], new: Found) -> None:
    """Add what was found; of what is known already, add the tests that met it."""
    for each in known:
        if each["what"] == new["what"] or each["example"] == new["example"]:
            each["tests"] = sorted({*each["tests"], *new["tests"]})
            return
    known.append(new)
