"""Findings of small broken caches, recorded as by a search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.run import coverage
from pytest_roseinfer.search.named_checks import CHECKS
from pytest_roseinfer.search.recorder import record
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.findings.timeline import FindingRecord


class NeverCopies(CutCache):
    """Writes to a shared block without a copy."""

    def must_copy(self, seq: int) -> bool:  # noqa: ARG002
        return False


FORKED = (Append((0,)), Append((1, 2)), Fork(0, 3), Append((4, 5, 6)), Append((0, 3)))
"""Sequences 0 and 3 share a block, to which both write; sequences 4, 5 and 6 have no room."""


def record_finding(
    adapter: type[KVCacheAdapter],
    steps: tuple[Operation, ...],
    *,
    check: str = "run_history",
    folder: str | None = None,
    **spec: Any,
) -> FindingRecord:
    """Return the only finding of a run whose cache fails a check on this history."""
    previous_coverage = coverage.current()
    coverage.set_current(coverage.Coverage())
    example = History(CacheSpec(**spec), steps)
    try:
        with pytest.raises(Divergence) as caught:
            CHECKS[check](adapter, example)
        record(adapter, example, check, caught.value, folder)
        (finding,) = coverage.current().of(adapter).findings
    finally:
        coverage.set_current(previous_coverage)
    return finding


def finding_of_never_copies(folder: str | None = None) -> FindingRecord:
    return record_finding(NeverCopies, FORKED, folder=folder, num_blocks=5)
