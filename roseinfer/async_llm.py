"""Streams for servers: one engine in a thread of its own, any number of tasks listening."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from roseinfer.config import SamplingParams
from roseinfer.engine_thread import EngineThread, Listener
from roseinfer.errors import ConfigError
from roseinfer.llm import LLM

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request


class AsyncLLM:
    """Serves an ``LLM`` to tasks, and batches what they ask for at the same time.

    The engine's thread starts with the first stream. It alone uses the ``LLM`` until ``close``, or
    until nobody has the ``AsyncLLM`` any more; a stream that is open has it.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ConfigError(f"AsyncLLM serves an LLM that was built before, not {llm!r}")
        self._llm = llm
        self._thread = EngineThread(llm)  # which knows nothing of this object, and so lets it go
        weakref.finalize(self, self._thread.stop).atexit = False

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Update, None]:
        """Continue one prompt and yield what every step brings for it.

        This raises for a prompt that cannot be served. A task that leaves the loop early, or is
        cancelled, cancels the request.
        """
        self._llm.require_own_process()
        listener = Listener(asyncio.get_running_loop(), asyncio.Queue())
        asked = SamplingParams() if params is None else params
        text = self._llm.engine.text_for(asked)  # here, where it holds up no other stream
        self._thread.submit(listener, prompt, asked, text)
        try:
            while True:
                self._llm.require_own_process()
                what = await listener.arrived.get()
                self._thread.note_taken(listener)
                if isinstance(what, BaseException):
                    raise what
                yield what
                if what.finish_reason is not None:
                    if what.request.error is not None:
                        raise what.request.error
                    return
        finally:
            self._thread.leave(listener)

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        last = None
        async for update in self.stream(prompt, params):
            last = update
        assert last is not None
        return last.request

    def close(self) -> None:
        """End the thread and the streams that are still open."""
        self._thread.close()
