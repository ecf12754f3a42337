"""Findings to look at: small caches that are wrong, recorded as a search records them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.run import coverage
from pytest_roseinfer.search.checks import CHECKS
from pytest_roseinfer.search.recorder import record
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.findings.timeline import FindingRecord


class NeverCopies(CutCache):
    """A block that is shared is written to as it is."""

    def must_copy(self, seq: int) -> bool:  # noqa: ARG002
        return False


FORKED = (Append((0,)), Append((1, 2)), Fork(0, 3), Append((4, 5, 6)), Append((0, 3)))
"""Sequences 0 and 3 share a block, to which both write; for 4, 5 and 6 there is no room."""


def recorded(
    adapter: type[KVCacheAdapter],
    steps: tuple[Operation, ...],
    *,
    check: str = "run_history",
    folder: str | None = None,
    **spec: Any,
) -> FindingRecord:
    """Return the only finding of a run whose cache fails a check on this history."""
    seen = coverage.current()
    coverage.set_current(coverage.Coverage())
    example = History(CacheSpec(**spec), steps)
    try:
        with pytest.raises(Divergence) as caught:
            CHECKS[check](adapter, example)
        record(adapter, example, check, caught.value, folder)
        (found,) = coverage.current().of(adapter).found
    finally:
        coverage.set_current(seen)
    return found


def of_never_copies(folder: str | None = None) -> FindingRecord:
    return recorded(NeverCopies, FORKED, folder=folder, num_blocks=5)
