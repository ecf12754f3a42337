"""Streams for servers: one engine in a thread of its own, any number of tasks listening."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from roseinfer.engine_thread import EngineThread, Listener, News
from roseinfer.errors import ConfigError
from roseinfer.llm import LLM
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request


@dataclass(slots=True, eq=False, weakref_slot=True)
class _LoopInbox:
    """The inbox of all tasks of one loop, which is woken up once for all that a step brings.

    To wake it up takes longer than all that a step does for a request.
    """

    loop: asyncio.AbstractEventLoop

    @property
    def gone(self) -> bool:
        return self.loop.is_closed()

    def put(self, news: Sequence[News]) -> bool:
        try:
            self.loop.call_soon_threadsafe(_deliver, news)
        except RuntimeError:  # asking first would not help, since it may close at any moment
            return False
        return True


@dataclass(slots=True, eq=False)
class _TaskListener(Listener):
    arrived: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    """What came, each with whom it is for: several listeners may share a queue."""


def _deliver(news: Sequence[News]) -> None:
    for listener, what in news:
        assert isinstance(listener, _TaskListener)
        listener.arrived.put_nowait((listener, what))


class Together:
    """Requests of one task, for which all that steps bring comes in one queue.

    The task must ``leave`` in the end, which cancels those that have not ended.
    """

    def __init__(self, llm: LLM, thread: EngineThread, inbox: _LoopInbox) -> None:
        self._llm = llm
        self._thread = thread
        self._inbox = inbox
        self._arrived: asyncio.Queue[News] = asyncio.Queue()
        self._numbers: dict[Listener, int] = {}

    def add(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> None:
        """Have one more prompt continued. They are numbered from 0."""
        asked = SamplingParams() if params is None else params
        text = self._llm.engine.text_for(asked)  # here, where it holds up no other stream
        guide = self._llm.engine.guide_for(asked)
        listener = _TaskListener(self._inbox, arrived=self._arrived)
        self._numbers[listener] = len(self._numbers)
        self._thread.submit(listener, prompt, asked, text, guide)

    async def next(self, most: int | None = None) -> list[tuple[int, Update]]:
        """Wait for updates, and return all that have come, each with the number of its prompt.

        This raises for a prompt that cannot be served.
        """
        self._llm.require_own_process()
        news = [await self._arrived.get()]
        while not self._arrived.empty() and len(news) != most:
            news.append(self._arrived.get_nowait())
        found = []
        for listener, what in news:
            self._thread.note_taken(listener)
            if isinstance(what, BaseException):
                raise what
            found.append((self._numbers[listener], what))
        return found

    def leave(self) -> None:
        for listener in self._numbers:
            self._thread.leave(listener)


class AsyncLLM:
    """Serves an ``LLM`` to tasks, and batches what they ask for at the same time.

    The engine's thread starts with the first stream. It alone uses the ``LLM`` until ``close``, or
    until nobody has the ``AsyncLLM`` any more; a stream that is open has it.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ConfigError(f"AsyncLLM serves an LLM that was built before, not {llm!r}")
        self._llm = llm
        self._inboxes: WeakValueDictionary[asyncio.AbstractEventLoop, _LoopInbox]
        self._inboxes = WeakValueDictionary()
        self._thread = EngineThread(llm)  # which knows nothing of this object, and so lets it go
        weakref.finalize(self, self._thread.stop).atexit = False

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Update, None]:
        """Continue one prompt and yield what every step brings for it.

        This raises for a prompt that cannot be served. A task that leaves the loop early, or is
        cancelled, cancels the request.
        """
        together = self.together()
        try:
            together.add(prompt, params)
            while True:
                ((_, what),) = await together.next(most=1)
                yield what
                if what.finish_reason is not None:
                    if what.request.error is not None:
                        raise what.request.error
                    return
        finally:
            together.leave()

    def together(self) -> Together:
        """Return what prompts can be added to, to be listened to by one task."""
        self._llm.require_own_process()
        loop = asyncio.get_running_loop()
        inbox = self._inboxes.setdefault(loop, _LoopInbox(loop))
        return Together(self._llm, self._thread, inbox)

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        last = None
        async for update in self.stream(prompt, params):
            last = update
        assert last is not None
        return last.request

    @property
    def closed(self) -> bool:
        """True if nothing is served any more: it was closed, or the engine has stopped."""
        return self._thread.closed

    def close(self) -> None:
        """End the thread and the streams that are still open."""
        self._thread.close()
