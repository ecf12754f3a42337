"""The engine's thread: runs steps, and delivers their updates to streams."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from roseinfer.config import MAX_UNREAD_UPDATES, RESUME_UNREAD_UPDATES
from roseinfer.errors import BadArgument, EngineStopped, RanksFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request
    from roseinfer.errors import RoseinferError
    from roseinfer.guided.compiler import GuideMatcher
    from roseinfer.llm import LLM
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.text.completion_text import CompletionText


_MAX_FAILURES = 3
"""Number of failed steps in a row that stops the engine: the requests cannot be the cause of so
many."""
_POLL_S = 1.0
"""Seconds between two checks of an idle engine for closed inboxes of paused requests."""


class Inbox(Protocol):
    """A destination of updates: the tasks of an event loop, or another process."""

    @property
    def is_closed(self) -> bool:
        """True once it has no reader any more."""

    def put(self, news: Sequence[Delivery]) -> bool:
        """Deliver updates, all at once; return False if the inbox has no reader any more."""


@dataclass(slots=True, eq=False)
class Listener:
    """A stream, which gets its updates through an inbox that others may share."""

    inbox: Inbox
    request: Request | None = None
    num_delivered: int = 0
    """Number of deliveries, counted by the engine's thread alone."""
    num_read: int = 0
    """Number of deliveries read, counted by the stream alone."""
    is_paused: bool = False
    """True while its request is paused, since it has too many unread updates."""

    @property
    def num_unread(self) -> int:
        return self.num_delivered - self.num_read


Delivery = tuple[Listener, "Update | BaseException"]


def deliver(inbox: Inbox, news: Sequence[Delivery]) -> bool:
    """Deliver updates and errors, and count them; return False if the inbox is closed."""
    if not inbox.put(news):
        return False
    for listener, _ in news:
        listener.num_delivered += 1
    return True


class EngineThread:
    """A thread that runs an ``LLM``. It starts with the first listener, and has exclusive use."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[Request, Listener] = {}
        self._paused_listeners: set[Listener] = set()
        """Listeners whose requests are paused."""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._failures = 0
        """Number of failed steps in a row."""
        self.num_iterations = 0
        """Number of iterations of its loop, with one step each."""
        self._closed = False
        self._new_stop_error: Callable[[], RoseinferError] = partial(
            EngineStopped, "the engine was closed"
        )
        """Factory of the error that streams raise once the engine no longer runs."""
        self._has_ended = False
        """True once the thread no longer runs ``_tasks``."""

        if llm.ranks is not None:
            # Wake a thread that waits for work, so that it checks the ranks.
            llm.ranks.rank_connections.on_failure.append(partial(self._tasks.put, lambda: None))

    @property
    def closed(self) -> bool:
        """True once it serves no more requests: it was closed, or it failed."""
        return self._closed

    @property
    def busy(self) -> bool:
        """True if the engine has work or tasks are queued. Paused requests are not work."""
        return self._engine.has_work or not self._tasks.empty()

    @property
    def stop_reason(self) -> str | None:
        """Reason why it serves no more requests; None while it does."""
        return str(self._new_stop_error()) if self._closed else None

    def submit(
        self,
        listener: Listener,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: CompletionText | None,
        guide: GuideMatcher | None,
    ) -> None:
        """Submit a prompt, whose updates, or error, go to a listener."""
        self._do(lambda: self._submit(listener, prompt, params, text, guide))

    def acknowledge(self, listener: Listener, count: int = 1) -> None:
        """Count ``count`` updates as read, and resume the request if it was paused for them."""
        listener.num_read += count
        if listener.is_paused and listener.num_unread <= RESUME_UNREAD_UPDATES:
            self._do(lambda: self._resume(listener))

    def cancel(self, listener: Listener) -> None:
        """Cancel a listener's request, unless it has ended."""
        self._do(lambda: self._leave(listener))

    def stop(self) -> None:
        """Make the thread end, without waiting, so that a finalizer may call this."""
        self._closed = True
        self._tasks.put(lambda: None)

    def close(self) -> None:
        """End the thread, and wait for it. Remaining listeners get an error."""
        if self._llm.is_forked:
            return
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self.stop()
            self._thread.join()

    def _do(self, task: Callable[[], None]) -> None:
        """Run a task in the thread, between two steps."""
        if self._llm.is_forked:
            return  # the thread is in the other process, and locks may be held for ever here
        with self._starting:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="roseinfer", daemon=True)
                thread.start()
                self._thread = thread
            self._tasks.put(task)
            if self._has_ended or self._thread is None:
                self._run_tasks()

    def _run(self) -> None:
        try:
            with self._llm.exclusive_use():
                try:
                    while not self._closed:
                        self._serve()
                except BaseException as error:  # of any type: no stream may wait for ever
                    self._new_stop_error = partial(
                        EngineStopped, "the engine's thread failed", error
                    )
                self._end()
        except BadArgument as error:
            self._new_stop_error = partial(BadArgument, str(error))
            self._end()

    def _serve(self) -> None:
        """Wait for work, run a step, and deliver its updates."""
        self._run_tasks(wait=not self._engine.has_work)
        if self._llm.ranks is not None:
            self._llm.ranks.require_alive()
        deliveries: defaultdict[Inbox, list[Delivery]] = defaultdict(list)
        for update in self._step():
            if listener := self._listeners.get(update.request):
                if update.finish_reason is not None:
                    self._leave(listener)
                deliveries[listener.inbox].append((listener, update))
        for inbox, news in deliveries.items():
            alive = deliver(inbox, news)
            for listener, _ in news:
                if not alive:
                    self._leave(listener)
                # Inline, since a call of ``num_unread`` takes longer.
                elif listener.num_delivered - listener.num_read >= MAX_UNREAD_UPDATES:
                    self._pause(listener)
        for listener in [each for each in self._paused_listeners if each.inbox.is_closed]:
            self._leave(listener)
        self.num_iterations += 1

    def _step(self) -> list[Update]:
        idle = not self._engine.has_work
        try:
            updates = self._engine.step()
        except RanksFailed:
            raise  # ranks never recover
        except Exception as error:
            self._failures += 1
            if self._failures == _MAX_FAILURES:
                problem = f"the engine stopped after {self._failures} failed steps in a row"
                self._new_stop_error = partial(EngineStopped, problem, error)
                self._closed = True
            return self._engine.fail_step(error)
        if not idle:
            self._failures = 0
        return updates

    def _run_tasks(self, *, wait: bool = False) -> None:
        try:
            while True:
                self._tasks.get(block=wait, timeout=_POLL_S if self._paused_listeners else None)()
                wait = False
        except queue.Empty:
            return

    def _submit(
        self,
        listener: Listener,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: CompletionText | None,
        guide: GuideMatcher | None,
    ) -> None:
        if self._closed:
            deliver(listener.inbox, [(listener, self._new_stop_error())])
            return
        try:
            listener.request = self._engine.submit(prompt, params, text, guide)
        except BaseException as error:  # of any type: only this stream fails
            deliver(listener.inbox, [(listener, error)])
        else:
            self._listeners[listener.request] = listener

    def _pause(self, listener: Listener) -> None:
        if listener.request not in self._listeners:
            return  # it has ended
        self._engine.pause(listener.request)
        self._paused_listeners.add(listener)
        listener.is_paused = True
        # The stream may have read updates before it could see ``is_paused``.
        if listener.num_unread <= RESUME_UNREAD_UPDATES:
            self._resume(listener)

    def _resume(self, listener: Listener) -> None:
        if listener in self._paused_listeners and listener.request is not None:
            listener.is_paused = False
            self._paused_listeners.discard(listener)
            self._engine.resume(listener.request)

    def _leave(self, listener: Listener) -> None:
        self._paused_listeners.discard(listener)
        if listener.request in self._listeners:
            self._engine.cancel(listener.request)
            del self._listeners[listener.request]

    def _end(self) -> None:
        """End all streams, before requests are cancelled: an engine that failed may fail again."""
        self._closed = True
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            deliver(listener.inbox, [(listener, self._new_stop_error())])
        try:
            for request in listeners:
                self._engine.cancel(request)
        finally:
            with self._starting:
                self._has_ended = True
                self._run_tasks()
