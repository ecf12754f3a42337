"""Search of one broken copy as in a user's run, and the size of the shrunk failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import RequestMix
from pytest_roseinfer.findings.divergence import Difference, Divergence
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.interpreter import fast_interpreter
from pytest_roseinfer.search import shrink as shrinking
from pytest_roseinfer.suite.conformance import conformance
from tests.mutants.hunt import Failure
from tests.mutants.shortest import Size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.histories.history import History
    from pytest_roseinfer.settings import Settings
    from tests.mutants.tally import Tally

_SECONDS = 300.0
"""Time limit for shrinking one example, generous because the machine may be busy."""


def shrink(
    targets: Sequence[type[Adapter]], search_settings: Settings, tally: Tally
) -> Failure | None:
    """Search every target until a test fails; return its shrunk example with its size."""
    settings.set_current(search_settings)
    coverage.set_current(coverage.Coverage())
    with fast_interpreter(), patch.object(shrinking, "SHRINK_SECONDS", _SECONDS):
        for target in targets:
            tests = conformance(target)()
            for name in tests.shipped():
                tally.check = name.removeprefix("test_")
                if example := _failing(getattr(tests, name)):
                    return Failure(tally.check, f"{size_of(example)}\n{example.describe()}")
    return None


def _failing(test: Any) -> History | RequestMix | None:
    import pytest

    try:
        test()
    except pytest.skip.Exception:
        return None
    except Difference as failure:
        return failure.history if isinstance(failure, Divergence) else vars(failure)["mix"]
    return None


def size_of(example: History | RequestMix) -> Size:
    """Return the number of steps or requests, and of tokens written or requested."""
    if isinstance(example, RequestMix):
        return Size(example.size, sum(each.max_tokens for each in example.requests))
    rows = [row for step in example.operations for row in step.rows()]
    return Size(example.size, sum(count for _, count in rows))
