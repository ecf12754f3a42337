"""Streams for servers: one engine in a thread of its own, any number of tasks listening."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.config import SamplingParams
from roseinfer.errors import BadArgument, ConfigError, EngineStopped
from roseinfer.llm import LLM

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request
    from roseinfer.errors import RoseinferError
    from roseinfer.text.request_text import RequestText


_MOST_FAILURES = 3
"""After so many failed steps in a row the engine stops: the requests are not to blame."""


@dataclass(slots=True, eq=False)
class _Listener:
    """A stream, which waits for its updates in an event loop."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[Update | BaseException]
    request: Request | None = None

    def tell(self, what: Update | BaseException) -> bool:
        """Hand something over, and return False if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, what)
        except RuntimeError:  # asking first would not help, since it may close at any moment
            return False
        return True


class AsyncLLM:
    """Serves an ``LLM`` to tasks, and batches what they ask for at the same time.

    The engine's thread starts with the first stream. It alone uses the ``LLM`` until ``close``.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ConfigError(f"AsyncLLM serves an LLM that was built before, not {llm!r}")
        self._llm = llm
        self._engine = llm.engine
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[Request, _Listener] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._why: Callable[[], RoseinferError] = partial(EngineStopped, "the engine was closed")
        """Makes the error that a stream raises when the engine no longer runs."""
        self._ended = False
        """True when the thread will not look into ``_todo`` again."""

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Update, None]:
        """Continue one prompt and yield what every step brings for it.

        This raises for a prompt that cannot be served. A task that leaves the loop early, or is
        cancelled, cancels the request.
        """
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        asked = params or SamplingParams()
        text = self._engine.text_for(asked)  # here, where preparing it holds up no other stream
        self._do(lambda: self._submit(listener, prompt, asked, text))
        try:
            while True:
                what = await listener.arrived.get()
                if isinstance(what, BaseException):
                    raise what
                yield what
                if what.finish_reason is not None:
                    if what.request.error is not None:
                        raise what.request.error
                    return
        finally:
            self._do(lambda: self._leave(listener))

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        last = None
        async for update in self.stream(prompt, params):
            last = update
        assert last is not None
        return last.request

    def close(self) -> None:
        """End the thread and the streams that are still open."""
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self._todo.put(lambda: None)
            self._thread.join()

    def _do(self, what: Callable[[], None]) -> None:
        """Have the engine's thread do something between two steps."""
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
                    self._serve()
                except BaseException as error:  # whatever it is, no stream may wait for ever
                    self._why = partial(EngineStopped, "the engine's thread broke down", error)
                self._end()
        except BadArgument as error:
            self._why = partial(BadArgument, str(error))
            self._end()

    def _serve(self) -> None:
        failures = 0
        while not self._closed:
            self._do_all(wait=not self._engine.has_work)
            idle = not self._engine.has_work
            try:
                updates = self._engine.step()
                failures = failures if idle else 0
            except Exception as error:
                failures += 1
                updates = self._engine.fail_step(error)
                if failures == _MOST_FAILURES:
                    what = f"the engine stopped, since {failures} steps in a row failed"
                    self._why = partial(EngineStopped, what, error)
                    self._closed = True
            for update in updates:
                if listener := self._listeners.get(update.request):
                    if update.finish_reason is not None:
                        self._leave(listener)
                    if not listener.tell(update):
                        self._leave(listener)

    def _do_all(self, *, wait: bool = False) -> None:
        try:
            while True:
                self._todo.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _submit(
        self,
        listener: _Listener,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: RequestText | None,
    ) -> None:
        if self._closed:
            listener.tell(self._why())
            return
        try:
            listener.request = self._engine.submit(prompt, params, text)
        except BaseException as error:  # whatever it is, only this stream fails
            listener.tell(error)
        else:
            self._listeners[listener.request] = listener

    def _leave(self, listener: _Listener) -> None:
        if listener.request in self._listeners:
            self._engine.cancel(listener.request)
            del self._listeners[listener.request]

    def _end(self) -> None:
        """End all streams. They are told first: an engine that broke down may do so again."""
        self._closed = True
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.tell(self._why())
        try:
            for request in listeners:
                self._engine.cancel(request)
        finally:
            with self._starting:
                self._ended = True
                self._do_all()
