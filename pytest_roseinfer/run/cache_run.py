"""A cache under test with its oracle: snapshots, observations and failures.

The features of the cache determine the views of its snapshots, and its observers.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from time import process_time
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.capability import (
    AnyObserver,
    SnapshotScope,
    cache_features,
    select_parts,
)
from pytest_roseinfer.capabilities.observation import Finding, Observation, Snapshot
from pytest_roseinfer.capabilities.operation import CacheUnderTest
from pytest_roseinfer.capabilities.payload import Payload
from pytest_roseinfer.capabilities.return_values import InvalidReturnValue
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.watchdog import CURRENT_EXAMPLE, StepHung

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.capability import Run, View
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History


class CacheRun:
    """A cache, its oracle, and the steps that were applied to both so far."""

    def __init__(self, adapter_type: type[KVCacheAdapter], history: History) -> None:
        self.history = history
        self.gathers_every = history.gathers_every
        self.spec = spec = history.spec
        self.features = can = cache_features(adapter_type, spec)
        if lacking := {need for step in history.operations for need in step.needs} - can:
            raise TypeError(f"{adapter_type.__name__} does not define {', '.join(sorted(lacking))}")
        offers = adapter_type.capabilities
        self.views = select_parts((each for one in offers for each in one.views), can)
        self.oracle = Oracle.of(adapter_type, spec, history.texts)
        self.payload = Payload.of(adapter_type, spec, finite=history.finite)
        self.last = not history.operations
        """True during the last step of the history."""
        self.completed_steps: list[Operation] = []
        self.refused: dict[int, str] = {}
        """Reason of each refused step, by the step's number."""
        self.first_writers: dict[int, int] = {}
        """The first sequence that wrote each token, by token; refused writes count too."""
        self.declared, self.adapter = adapter_type, adapter_type()
        coverage.current().count_calls(self.adapter)
        with self.watched("make()"):
            self.adapter.make(spec)
        self.cache_under_test = CacheUnderTest(self.adapter, spec.options)
        with self.watched("a first look"):
            for setup in select_parts((each for one in offers for each in one.setups), can):
                setup.prepare(self)
            kinds = select_parts((each for one in offers for each in one.observers), can)
            # A reference cycle would keep the cache until the next garbage collection.
            run: Run = weakref.proxy(self)
            self.observers = {kind: kind(run) for kind in kinds}
            self.snapshot = self.take_snapshot()
            """The cache after the latest step."""

    def take_snapshot(self, *, reads: bool = False, copies: bool = True) -> Snapshot:
        """Take a snapshot of the cache; without ``copies``, of its live storage."""
        return self._snapshot(self.views, SnapshotScope(reads=reads, copies=copies))

    def _snapshot(self, views: Sequence[View], look: SnapshotScope) -> Snapshot:
        """Combine the fields from several views, which may add to the same field."""
        shown: dict[str, Any] = {}
        for view in views:
            for name, part in view.show(self, look).items():
                shown[name] = shown[name] | part if name in shown else part
        return Snapshot(**shown)

    def observer(self, kind: type[AnyObserver]) -> AnyObserver | None:
        observer = self.observers.get(kind)
        return observer if isinstance(observer, kind) else None

    def observation(self, after: Snapshot, **fields: Any) -> Observation:
        """Return an observation with a snapshot, the run's own fields, and other ``fields``."""
        return Observation(
            spec=self.spec,
            after=after,
            oracle=self.oracle,
            payload=self.payload,
            first_writers=self.first_writers,
            declared=self.declared,
            scratch_blocks=self.adapter.scratch_blocks,
            notes={kind: each.notes(after) for kind, each in self.observers.items()},
            **fields,
        )

    def finish(self) -> None:
        """Wait until the device has made all calls in flight."""
        try:
            self.cache_under_test.device.finish()
        except Exception as error:
            problem = f"a call in flight raised {type(error).__name__}: {error}"
            kind = f"raised {type(error).__name__} in flight"
            self.fail(Finding(problem, cause=error, kind=kind))

    def fail(self, finding: Finding, also: str = "") -> NoReturn:
        """Raise the failure of the history so far, with one more paragraph ``also``."""
        pictured = [view for view in self.views if view.in_pictures]
        try:
            shown = self._snapshot(pictured, SnapshotScope(reads=False, copies=False))
        except InvalidReturnValue:  # the first finding is the one to report
            shown = Snapshot()
        divergence = self._divergence(finding, shown)
        if also:
            divergence.extra_paragraphs.append(also)
        raise divergence from finding.cause

    @contextmanager
    def watched(self, call: str) -> Iterator[None]:
        """Fail if the block hangs or gets an invalid return value, with an empty snapshot."""
        CURRENT_EXAMPLE.step_began_at = process_time()
        try:
            yield
        except StepHung as hung:
            finding = Finding(f"{call} {hung}", kind="hung")
            raise self._divergence(finding, Snapshot()) from hung
        except InvalidReturnValue as wrong:
            finding = Finding(str(wrong), kind=wrong.kind)
            raise self._divergence(finding, Snapshot()) from wrong.__cause__

    def _divergence(self, finding: Finding, shown: Snapshot) -> Divergence:
        history = replace(self.history, operations=tuple(self.completed_steps))
        return Divergence(finding, history, self.oracle, shown, self.refused)
