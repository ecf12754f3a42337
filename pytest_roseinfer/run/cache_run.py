"""A cache under test, beside its oracle: what it shows, and how it fails.

What the cache offers decides which views its snapshots have, and which observers watch it.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from time import process_time
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.answers import WrongAnswer
from pytest_roseinfer.capabilities.capability import AnyObserver, Look, due, offered
from pytest_roseinfer.capabilities.observation import Finding, Observation, Snapshot
from pytest_roseinfer.capabilities.operation import Driven
from pytest_roseinfer.capabilities.payload import Payload
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.watchdog import WATCHED, StepHung

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.capability import Run, View
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History


class CacheRun:
    """One cache, its oracle, and what was done to them so far."""

    def __init__(self, adapter_type: type[KVCacheAdapter], history: History) -> None:
        self.history = history
        self.gathers_every = history.gathers_every
        self.spec = spec = history.spec
        self.can = can = offered(adapter_type, spec)
        if lacking := {need for step in history.operations for need in step.needs} - can:
            raise TypeError(f"{adapter_type.__name__} does not define {', '.join(sorted(lacking))}")
        offers = adapter_type.capabilities
        self.views = due((each for one in offers for each in one.views), can)
        self.oracle = Oracle.of(adapter_type, spec, history.texts)
        self.payload = Payload.of(adapter_type, spec, finite=history.finite)
        self.last = not history.operations
        """True during the last step of the history."""
        self.done: list[Operation] = []
        self.refused: dict[int, str] = {}
        """Why the cache had to refuse steps, by their numbers."""
        self.seen: dict[int, int] = {}
        """Every token that was ever to be written, and the sequence that was the first to do it."""
        self.declared, self.adapter = adapter_type, adapter_type()
        coverage.current().count_calls(self.adapter)
        with self.watched("make()"):
            self.adapter.make(spec)
        self.driven = Driven(self.adapter, spec.options)
        with self.watched("a first look"):
            for setup in due((each for one in offers for each in one.setups), can):
                setup.prepare(self)
            kinds = due((each for one in offers for each in one.observers), can)
            # A run that held itself would keep its cache until the next garbage collection.
            run: Run = weakref.proxy(self)
            self.observers = {kind: kind(run) for kind in kinds}
            self.now = self.look()
            """The cache after the latest step."""

    def look(self, *, reads: bool = False, copies: bool = True) -> Snapshot:
        """Take a snapshot of the cache; without ``copies``, of its live storage."""
        return self._snapshot(self.views, Look(reads=reads, copies=copies))

    def _snapshot(self, views: Sequence[View], look: Look) -> Snapshot:
        """Take the parts that views show; several may add to one of them."""
        shown: dict[str, Any] = {}
        for view in views:
            for name, part in view.show(self, look).items():
                shown[name] = shown[name] | part if name in shown else part
        return Snapshot(**shown)

    def observer(self, kind: type[AnyObserver]) -> AnyObserver | None:
        found = self.observers.get(kind)
        return found if isinstance(found, kind) else None

    def observation(self, after: Snapshot, **what: Any) -> Observation:
        return Observation(
            spec=self.spec,
            after=after,
            oracle=self.oracle,
            payload=self.payload,
            seen=self.seen,
            declared=self.declared,
            scratch_blocks=self.adapter.scratch_blocks,
            notes={kind: each.notes(after) for kind, each in self.observers.items()},
            **what,
        )

    def finish(self) -> None:
        """Have the device do all that it was asked for."""
        try:
            self.driven.device.finish()
        except Exception as error:
            what = f"a call that the device made late raised {type(error).__name__}: {error}"
            self.fail(Finding(what, cause=error))

    def fail(self, finding: Finding, also: str = "") -> NoReturn:
        pictured = [view for view in self.views if view.in_pictures]
        try:
            shown = self._snapshot(pictured, Look(reads=False, copies=False))
        except WrongAnswer:  # the first finding is the one to report
            shown = Snapshot()
        divergence = self._divergence(finding, shown)
        if also:
            divergence.added.append(also)
        raise divergence from finding.cause

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Fail if the block hangs, or gets an answer of a wrong type; that shows no books."""
        WATCHED.began = process_time()
        try:
            yield
        except StepHung as hung:
            raise self._divergence(Finding(f"{what} {hung}"), Snapshot()) from hung
        except WrongAnswer as wrong:
            raise self._divergence(Finding(str(wrong)), Snapshot()) from wrong.__cause__

    def _divergence(self, finding: Finding, shown: Snapshot) -> Divergence:
        so_far = replace(self.history, operations=tuple(self.done))
        return Divergence(finding, so_far, self.oracle, shown, self.refused)
