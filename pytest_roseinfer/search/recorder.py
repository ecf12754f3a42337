"""Recording a failure: for the report, as a drawing, and as files that run it again."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.engines.run import run_forks, run_mix, timeline_of, timeline_of_forks
from pytest_roseinfer.findings.divergence import Difference, Divergence
from pytest_roseinfer.findings.svg import poster
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.frames import frames_of
from pytest_roseinfer.run.watchdog import StepHung, StoppedAnswering, watched
from pytest_roseinfer.search.reproduce import Saved, save

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.capabilities.observation import Location
    from pytest_roseinfer.findings.frame import Frame
    from pytest_roseinfer.findings.timeline import Found, Timeline
    from pytest_roseinfer.search.checks import Example

_NEVER_AGAIN = (StepHung, StoppedAnswering)


def record(
    adapter: type[Adapter], example: Example, check: str, failure: BaseException, folder: str | None
) -> str:
    """Note the failure of ``check`` on the smallest ``example`` for the report, and save it.

    Returns how to run it again. Without a folder nothing is saved.
    """
    found = _found(adapter, example, check, failure)
    saved = Saved()
    if folder:
        saved = save(adapter, example, check, found, folder, poster(found))
    if isinstance(failure, Difference):
        failure.shown_by = _first_test(coverage.current().of(adapter).found, found)
    found |= {"trace": saved.trace, "script": saved.script, "drawing": saved.drawing}
    if not isinstance(failure, KeyboardInterrupt):
        coverage.current().of(adapter).note_found(found)
    return saved.words


def _found(adapter: type[Adapter], example: Example, check: str, failure: BaseException) -> Found:
    said = isinstance(failure, Difference)
    location = failure.location if isinstance(failure, Divergence) else None
    contents = location.contents if location else None
    history = failure.history if isinstance(failure, Divergence) else example
    frames, timeline = _drawn(adapter, check, history, location, failure)
    return {
        "target": coverage.name_of(adapter),
        "check": check,
        "tests": _test(),
        "what": failure.what if isinstance(failure, Difference) else repr(failure),
        "message": str(failure) if said else f"{failure!r}\non {adapter.describe(example)}",
        "expected": contents.expected if contents else "",
        "found": contents.found if contents else "",
        "example": json.loads(json.dumps(example.to_json())),
        "trace": "",
        "script": "",
        "drawing": "",
        "layer": location.layer if location else 0,
        "block_size": history.spec.block_size if isinstance(history, History) else 0,
        "frames": frames,
        "timeline": timeline,
    }


def _first_test(known: list[Found], new: Found) -> str:
    """Name a test of this process that met the same difference, if one did."""
    tests = (each["tests"] for each in known if each["what"] == new["what"])
    return next((test for met in tests for test in met if [test] != new["tests"]), "")


def _test() -> list[str]:
    """Name the test that runs, as pytest does in this variable, with the phase behind it."""
    said = os.environ.get("PYTEST_CURRENT_TEST", "")
    return [said.rpartition(" ")[0]] if said else []


def _drawn(
    adapter: type[Any],
    check: str,
    history: Example,
    location: Location | None,
    failure: BaseException,
) -> tuple[list[Frame], Timeline | None]:
    """Run it once more to draw it; nothing is drawn where it hangs, is gone or cannot begin."""
    if isinstance(failure, KeyboardInterrupt) or isinstance(failure.__cause__, _NEVER_AGAIN):
        return [], None
    # What cannot be drawn must not hide what was found.
    with watched(history), suppress(Exception, StepHung):
        if isinstance(history, History):
            return frames_of(adapter, history, location), None
        if check == run_mix.__name__:
            return [], timeline_of(adapter, history)
        if check == run_forks.__name__:
            return [], timeline_of_forks(adapter, history)
    return [], None
