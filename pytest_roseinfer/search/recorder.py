"""Recording of a failure: for the report, as a drawing, and as files to replay it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.engines.run import run_forks, run_mix, timeline_of, timeline_of_forks
from pytest_roseinfer.findings.divergence import Difference, Divergence
from pytest_roseinfer.findings.known import digest_of
from pytest_roseinfer.findings.svg import draw_failure
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.frames import frames_of
from pytest_roseinfer.run.watchdog import StepHung, TargetGoneError, register_example
from pytest_roseinfer.search.reproduce import SavedFiles, keep, save

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.capabilities.observation import Location
    from pytest_roseinfer.findings.frame import Frame
    from pytest_roseinfer.findings.timeline import FindingRecord, Timeline
    from pytest_roseinfer.search.named_checks import Example

_NEVER_AGAIN = (StepHung, TargetGoneError)


def record(
    adapter: type[Adapter], example: Example, check: str, failure: BaseException, folder: str | None
) -> str:
    """Record the failure of ``check`` on the smallest ``example`` for the report, and save it.

    Return instructions to replay it. Without a folder nothing is saved.
    """
    finding = _make_finding(adapter, example, check, failure)
    saved = SavedFiles()
    if folder:
        saved = save(adapter, example, check, finding, folder, draw_failure(finding))
    if isinstance(failure, Difference):
        failure.reported_by = _first_test(coverage.current().of(adapter).findings, finding)
    finding |= {"trace": saved.trace, "script": saved.script, "drawing": saved.drawing}
    if not isinstance(failure, KeyboardInterrupt):
        coverage.current().of(adapter).add_finding(finding)
    if settings.current().keeps_failures and not finding["known"]:
        return "\n".join(filter(None, [saved.description, keep(saved)]))
    return saved.description


def _make_finding(
    adapter: type[Adapter], example: Example, check: str, failure: BaseException
) -> FindingRecord:
    is_difference = isinstance(failure, Difference)
    location = failure.location if isinstance(failure, Divergence) else None
    contents = location.contents if location else None
    history = failure.history if isinstance(failure, Divergence) else example
    frames, timeline = _record_drawing(adapter, check, history, location, failure)
    return {
        "target": (target := coverage.name_of(adapter)),
        "check": check,
        "digest": (digest := digest_of(target, failure)),
        "known": str(settings.current().known_of(target).get(digest, "")),
        "tests": list(filter(None, [coverage.current_test()])),
        "summary": failure.summary if isinstance(failure, Difference) else repr(failure),
        "message": str(failure)
        if is_difference
        else f"{failure!r}\non {adapter.describe(example)}",
        "expected": contents.expected if contents else "",
        "actual": contents.actual if contents else "",
        "example": json.loads(json.dumps(example.to_json())),
        "trace": "",
        "script": "",
        "drawing": "",
        "layer": location.layer if location else 0,
        "block_size": history.spec.block_size if isinstance(history, History) else 0,
        "frames": frames,
        "timeline": timeline,
    }


def _first_test(findings: list[FindingRecord], new: FindingRecord) -> str:
    """Return another test of this process that hit the same failure; "" if none did."""
    tests = (each["tests"] for each in findings if each["summary"] == new["summary"])
    return next((test for names in tests for test in names if [test] != new["tests"]), "")


def _record_drawing(
    adapter: type[Any],
    check: str,
    history: Example,
    location: Location | None,
    failure: BaseException,
) -> tuple[list[Frame], Timeline | None]:
    """Run an example once more to draw it; draw nothing if it hangs, is gone or cannot start."""
    if isinstance(failure, KeyboardInterrupt) or isinstance(failure.__cause__, _NEVER_AGAIN):
        return [], None
    # A failing drawing must not hide the failure itself.
    with register_example(history), suppress(Exception, StepHung):
        if isinstance(history, History):
            return frames_of(adapter, history, location), None
        if check == run_mix.__name__:
            return [], timeline_of(adapter, history)
        if check == run_forks.__name__:
            return [], timeline_of_forks(adapter, history)
    return [], None
