"""A thread that alone runs an engine, and tells streams what its steps bring."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from roseinfer.config import MOST_UNREAD, RESUMED_AT
from roseinfer.errors import BadArgument, EngineStopped, RanksFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request
    from roseinfer.errors import RoseinferError
    from roseinfer.guided.compiler import GuideProgress
    from roseinfer.llm import LLM
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.text.request_text import RequestText


_MOST_FAILURES = 3
"""After so many failed steps in a row the engine stops: the requests are not to blame."""
_GLANCE = 1.0
"""Seconds after which an idle engine looks whether those who do not read can still come back."""


class Inbox(Protocol):
    """Where what steps bring is handed over: to the tasks of a loop, or to another process."""

    @property
    def gone(self) -> bool:
        """True if nobody reads it any more."""

    def put(self, news: Sequence[News]) -> bool:
        """Hand things over, all at once, and return False if nobody reads them any more."""


@dataclass(slots=True, eq=False)
class Listener:
    """A stream, which waits for its updates beside others in an inbox."""

    inbox: Inbox
    request: Request | None = None
    told: int = 0
    """How many things were handed over, which the engine's thread alone counts."""
    taken: int = 0
    """How many of them were read, which the stream alone counts."""
    full: bool = False
    """True while its request is paused, since too many were not read."""

    @property
    def unread(self) -> int:
        return self.told - self.taken


News = tuple[Listener, "Update | BaseException"]


def tell(inbox: Inbox, news: Sequence[News]) -> bool:
    """Hand things over, and count them."""
    if not inbox.put(news):
        return False
    for listener, _ in news:
        listener.told += 1
    return True


class EngineThread:
    """Starts with the first listener. It alone uses the ``LLM`` until it ends."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[Request, Listener] = {}
        self._full: set[Listener] = set()
        """Those of them whose requests are paused."""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._failures = 0
        """How many steps in a row failed."""
        self.rounds = 0
        """How often it has looked for work and done a step."""
        self._closed = False
        self._why: Callable[[], RoseinferError] = partial(EngineStopped, "the engine was closed")
        """Makes the error that a stream raises when the engine no longer runs."""
        self._ended = False
        """True when the thread will not look into ``_todo`` again."""

        if llm.ranks is not None:
            # A thread that waits for work looks at the ranks then.
            llm.ranks.links.on_failure.append(partial(self._todo.put, lambda: None))

    @property
    def closed(self) -> bool:
        """True when it serves nobody any more: it was closed, or it broke down."""
        return self._closed

    @property
    def busy(self) -> bool:
        """True if there is something to do. Requests that are paused are nothing to do."""
        return self._engine.has_work or not self._todo.empty()

    @property
    def stopped(self) -> str | None:
        """Reason why it serves nobody any more; None while it does."""
        return str(self._why()) if self._closed else None

    def submit(
        self,
        listener: Listener,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: RequestText | None,
        guide: GuideProgress | None,
    ) -> None:
        """Tell a listener what comes of a prompt."""
        self._do(lambda: self._submit(listener, prompt, params, text, guide))

    def note_taken(self, listener: Listener, count: int = 1) -> None:
        """Count that a stream was read, and let its request go on if it was paused."""
        listener.taken += count
        if listener.full and listener.unread <= RESUMED_AT:
            self._do(lambda: self._resume(listener))

    def leave(self, listener: Listener) -> None:
        """Cancel a listener's request, unless it has ended."""
        self._do(lambda: self._leave(listener))

    def stop(self) -> None:
        """Ask the thread to end. This waits for nothing, so that a finaliser may call it."""
        self._closed = True
        self._todo.put(lambda: None)

    def close(self) -> None:
        """End the thread, and tell listeners that are left."""
        if self._llm.forked:
            return
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self.stop()
            self._thread.join()

    def _do(self, what: Callable[[], None]) -> None:
        """Have the thread do something between two steps."""
        if self._llm.forked:
            return  # the thread is in the other process, and its locks may be held for ever here
        with self._starting:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="roseinfer", daemon=True)
                thread.start()
                self._thread = thread
            self._todo.put(what)
            if self._ended or self._thread is None:
                self._do_all()

    def _run(self) -> None:
        try:
            with self._llm.in_use():
                try:
                    while not self._closed:
                        self._serve()
                except BaseException as error:  # whatever it is, no stream may wait for ever
                    self._why = partial(EngineStopped, "the engine's thread broke down", error)
                self._end()
        except BadArgument as error:
            self._why = partial(BadArgument, str(error))
            self._end()

    def _serve(self) -> None:
        """Wait for work, do a step, and tell of it."""
        self._do_all(wait=not self._engine.has_work)
        if self._llm.ranks is not None:
            self._llm.ranks.require()
        brought: defaultdict[Inbox, list[News]] = defaultdict(list)
        for update in self._step():
            if listener := self._listeners.get(update.request):
                if update.finish_reason is not None:
                    self._leave(listener)
                brought[listener.inbox].append((listener, update))
        for inbox, news in brought.items():
            alive = tell(inbox, news)
            for listener, _ in news:
                if not alive:
                    self._leave(listener)
                elif listener.told - listener.taken >= MOST_UNREAD:  # a call takes longer
                    self._pause(listener)
        for listener in [each for each in self._full if each.inbox.gone]:
            self._leave(listener)
        self.rounds += 1

    def _step(self) -> list[Update]:
        idle = not self._engine.has_work
        try:
            updates = self._engine.step()
        except RanksFailed:
            raise  # they do not come back
        except Exception as error:
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                what = f"the engine stopped, since {self._failures} steps in a row failed"
                self._why = partial(EngineStopped, what, error)
                self._closed = True
            return self._engine.fail_step(error)
        if not idle:
            self._failures = 0
        return updates

    def _do_all(self, *, wait: bool = False) -> None:
        try:
            while True:
                self._todo.get(block=wait, timeout=_GLANCE if self._full else None)()
                wait = False
        except queue.Empty:
            return

    def _submit(
        self,
        listener: Listener,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: RequestText | None,
        guide: GuideProgress | None,
    ) -> None:
        if self._closed:
            tell(listener.inbox, [(listener, self._why())])
            return
        try:
            listener.request = self._engine.submit(prompt, params, text, guide)
        except BaseException as error:  # whatever it is, only this stream fails
            tell(listener.inbox, [(listener, error)])
        else:
            self._listeners[listener.request] = listener

    def _pause(self, listener: Listener) -> None:
        if listener.request not in self._listeners:
            return  # it has ended
        self._engine.pause(listener.request)
        self._full.add(listener)
        listener.full = True
        if listener.unread <= RESUMED_AT:  # read meanwhile, by who did not know that it is full
            self._resume(listener)

    def _resume(self, listener: Listener) -> None:
        if listener in self._full and listener.request is not None:
            listener.full = False
            self._full.discard(listener)
            self._engine.resume(listener.request)

    def _leave(self, listener: Listener) -> None:
        self._full.discard(listener)
        if listener.request in self._listeners:
            self._engine.cancel(listener.request)
            del self._listeners[listener.request]

    def _end(self) -> None:
        """End all streams. They are told first: an engine that broke down may do so again."""
        self._closed = True
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            tell(listener.inbox, [(listener, self._why())])
        try:
            for request in listeners:
                self._engine.cancel(request)
        finally:
            with self._starting:
                self._ended = True
                self._do_all()
