"""Search of an engine for requests whose output depends on other requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import conformance, settings
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from pytest_roseinfer.suite.engine_tests import EngineTests
from tests.fresh_run import fresh_run

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter


def verdicts_of(adapter: type[EngineAdapter], *, examples: int, steps: int = 8) -> list[str]:
    """Return a search's verdict on each path; raise where it finds a difference."""
    with fresh_run(settings.Settings(examples=examples, steps=steps, seed=1)):
        tests = conformance(adapter)()
        assert isinstance(tests, EngineTests)
        tests.test_requests_get_what_they_get_alone()
        return [row.verdict for row in TargetVerdict(coverage.current().of(adapter)).rows()]
