"""In-process client: the engine runs in a thread of the server's process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from roseinfer.async_llm import AsyncLLM
from roseinfer.engine_client.protocol import MAX_GUIDE_CHECKS, EngineInfo, EngineStats, OutputDelta
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.async_llm import StreamGroup
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM


class InProcessClient:
    """Client of an ``LLM`` in this process."""

    separate_process = False
    restarting = False
    restarts = 0
    stalled_s = 0.0

    def __init__(self, llm: LLM) -> None:
        self.info = EngineInfo.of(llm)
        self._engine = llm.engine
        self._async_llm = AsyncLLM(llm)
        self._guides = ThreadPoolExecutor(MAX_GUIDE_CHECKS, "roseinfer-guides")

    @property
    def stats(self) -> EngineStats:
        return EngineStats.of(self._engine)

    @property
    def closed(self) -> bool:
        return self._async_llm.closed

    async def open(self) -> None:
        """Do nothing: any event loop can be used."""

    def open_group(self) -> _RequestGroup:
        return _RequestGroup(self._async_llm.stream_group())

    async def check_guide(self, guide: Guide) -> None:
        prepare, params = self._engine.new_guide_matcher, SamplingParams(guide=guide)
        await asyncio.get_running_loop().run_in_executor(self._guides, prepare, params)

    def close(self) -> None:
        self._async_llm.close()
        self._guides.shutdown()


class _RequestGroup:
    def __init__(self, stream_group: StreamGroup) -> None:
        self._stream_group = stream_group
        self._has_begun: set[int] = set()

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        self._stream_group.add(token_ids, params)

    async def next(self) -> list[tuple[int, OutputDelta]]:
        parts: dict[int, OutputDelta] = {}
        for number, update in await self._stream_group.next():
            part = parts.get(number)
            if part is None:
                part = parts[number] = OutputDelta()
            part.add(update)
            if number not in self._has_begun and part.tokens:
                self._has_begun.add(number)
                part.set_prefill_stats(update.request)
        return [*parts.items()]

    def cancel(self) -> None:
        self._stream_group.cancel()
