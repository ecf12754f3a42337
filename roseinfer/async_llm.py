"""Asynchronous streams for servers: one engine in its own thread, any number of asyncio tasks."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from roseinfer.engine_thread import Delivery, EngineThread, Listener
from roseinfer.errors import ConfigError
from roseinfer.llm import LLM
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request


@dataclass(slots=True, eq=False, weakref_slot=True)
class _EventLoopInbox:
    """The inbox of all tasks of one event loop, which is woken once for all updates of a step.

    Waking the loop takes longer than all work of a step for one request.
    """

    loop: asyncio.AbstractEventLoop

    @property
    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def put(self, news: Sequence[Delivery]) -> bool:
        try:
            self.loop.call_soon_threadsafe(_put_updates, news)
        except RuntimeError:  # closed; a check before would not help, since it may close any time
            return False
        return True


@dataclass(slots=True, eq=False)
class _TaskListener(Listener):
    """A listener of an asyncio task."""

    arrived: asyncio.Queue[Delivery] = field(default_factory=asyncio.Queue)
    """Queue of deliveries with their listeners: several listeners may share it."""


def _put_updates(news: Sequence[Delivery]) -> None:
    for listener, update in news:
        assert isinstance(listener, _TaskListener)
        listener.arrived.put_nowait((listener, update))


class StreamGroup:
    """The requests of one task, whose updates arrive in one queue.

    The task must call ``cancel`` in the end, which cancels those that have not ended.
    """

    def __init__(self, llm: LLM, thread: EngineThread, inbox: _EventLoopInbox) -> None:
        self._llm = llm
        self._thread = thread
        self._inbox = inbox
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._numbers: dict[Listener, int] = {}

    def add(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> None:
        """Submit one more prompt. Prompts are numbered from 0."""
        params = SamplingParams() if params is None else params
        # In this thread, where slow work delays no other stream.
        text = self._llm.engine.new_completion_text(params)
        guide = self._llm.engine.new_guide_matcher(params)
        listener = _TaskListener(self._inbox, arrived=self._arrived)
        self._numbers[listener] = len(self._numbers)
        self._thread.submit(listener, prompt, params, text, guide)

    async def next(self, max_updates: int | None = None) -> list[tuple[int, Update]]:
        """Wait for updates, and return all available ones, each with the number of its prompt.

        At most ``max_updates`` are returned. This raises for a prompt that cannot be served.
        """
        self._llm.require_not_forked()
        news = [await self._arrived.get()]
        while not self._arrived.empty() and len(news) != max_updates:
            news.append(self._arrived.get_nowait())
        updates = []
        for listener, update in news:
            self._thread.acknowledge(listener)
            if isinstance(update, BaseException):
                raise update
            updates.append((self._numbers[listener], update))
        return updates

    def cancel(self) -> None:
        for listener in self._numbers:
            self._thread.cancel(listener)


class AsyncLLM:
    """An ``LLM`` for asyncio tasks, whose concurrent requests are batched.

    The engine's thread starts with the first stream. It alone uses the ``LLM`` until ``close``, or
    until the ``AsyncLLM`` is garbage-collected; an open stream references it.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ConfigError(f"AsyncLLM takes an LLM, not {llm!r}")
        self._llm = llm
        self._inboxes: WeakValueDictionary[asyncio.AbstractEventLoop, _EventLoopInbox]
        self._inboxes = WeakValueDictionary()
        self._thread = EngineThread(llm)  # holds no reference to this object
        weakref.finalize(self, self._thread.stop).atexit = False

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Update, None]:
        """Continue one prompt and yield its updates.

        This raises for a prompt that cannot be served. A task that leaves the loop early, or is
        cancelled, cancels the request.
        """
        group = self.stream_group()
        try:
            group.add(prompt, params)
            while True:
                ((_, update),) = await group.next(max_updates=1)
                yield update
                if update.finish_reason is not None:
                    if update.request.error is not None:
                        raise update.request.error
                    return
        finally:
            group.cancel()

    def stream_group(self) -> StreamGroup:
        """Return an empty group of streams, which one task reads."""
        self._llm.require_not_forked()
        loop = asyncio.get_running_loop()
        inbox = self._inboxes.setdefault(loop, _EventLoopInbox(loop))
        return StreamGroup(self._llm, self._thread, inbox)

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """Continue one prompt, and return its request once it has ended."""
        last = None
        async for update in self.stream(prompt, params):
            last = update
        assert last is not None
        return last.request

    @property
    def closed(self) -> bool:
        """True once it serves no more requests: it was closed, or the engine has stopped."""
        return self._thread.closed

    def close(self) -> None:
        """End the thread and all open streams."""
        self._thread.close()
