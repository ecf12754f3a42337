"""Streams for servers: one engine in a thread of its own, any number of tasks listening."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.config import SamplingParams
from roseinfer.errors import BadArgument, ConfigError, EngineStopped
from roseinfer.llm import LLM

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request


@dataclass(slots=True, eq=False)
class _Listener:
    """One stream: where its updates go, and in which event loop."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[Update | Exception]
    request: Request | None = None

    def tell(self, what: Update | Exception) -> None:
        # A loop that has closed meanwhile has nobody to tell.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, what)


class AsyncLLM:
    """Serves an ``LLM`` to tasks, batching whatever they ask for at the same time.

    The model's thread starts with the first stream. The ``LLM`` belongs to it until ``close``.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ConfigError(f"AsyncLLM serves an LLM that was built before, not {llm!r}")
        self._llm = llm
        self._engine = llm.engine
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[int, _Listener] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._why: Exception = EngineStopped("the engine was closed")
        self._ended = False
        """The thread will not look at what there is to do again."""

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Update, None]:
        """Continue one prompt and yield what every step brings for it.

        A prompt that cannot be served raises here. Whoever leaves the loop early, or is
        cancelled, cancels the request.
        """
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        asked = params or SamplingParams()
        self._do(lambda: self._submit(listener, prompt, asked))
        try:
            while True:
                what = await listener.arrived.get()
                if isinstance(what, Exception):
                    raise what
                yield what
                if what.finish_reason is not None:
                    if what.request.error is not None:
                        raise what.request.error
                    return
        finally:
            self._do(lambda: self._leave(listener))

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """Continue one prompt to its end."""
        last = None
        async for update in self.stream(prompt, params):
            last = update
        assert last is not None
        return last.request

    def close(self) -> None:
        """End the thread, and with it the streams that are still open."""
        with self._starting:
            self._closed = True
        if self._thread is not None:
            self._todo.put(lambda: None)
            self._thread.join()

    # ----------------------------------------------------------------- in the engine's thread

    def _do(self, what: Callable[[], None]) -> None:
        """Have the engine's thread do something between two steps."""
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="roseinfer", daemon=True)
                self._thread.start()
            self._todo.put(what)
            if self._ended or self._thread is None:
                self._do_all()

    def _run(self) -> None:
        try:
            with self._llm.in_use():
                self._serve()
        except BadArgument as error:
            self._closed, self._why = True, error
            self._end(error)

    def _serve(self) -> None:
        while not self._closed:
            self._do_all(wait=not self._engine.has_work)
            try:
                updates = self._engine.step()
            except Exception as error:
                # Nobody knows what the model did: no stream can go on.
                self._closed = True
                self._end(error)
                return
            for update in updates:
                listener = self._listeners.get(update.request.id)
                if listener is not None:
                    listener.tell(update)
        self._end(self._why)

    def _do_all(self, *, wait: bool = False) -> None:
        try:
            while True:
                self._todo.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _submit(
        self, listener: _Listener, prompt: str | Sequence[int], params: SamplingParams
    ) -> None:
        if self._closed:
            listener.tell(self._why)
            return
        try:
            listener.request = self._engine.submit(prompt, params)
        except Exception as error:  # whatever it is, it is this stream's and not the others'
            listener.tell(error)
        else:
            self._listeners[listener.request.id] = listener

    def _leave(self, listener: _Listener) -> None:
        if listener.request is not None:
            self._listeners.pop(listener.request.id, None)
            self._engine.cancel(listener.request)

    def _end(self, why: Exception) -> None:
        for listener in list(self._listeners.values()):
            self._leave(listener)
            listener.tell(why)
        with self._starting:
            self._ended = True
            self._do_all()
