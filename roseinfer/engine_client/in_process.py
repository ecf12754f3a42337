"""An engine in the server's own process, in a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from roseinfer.async_llm import AsyncLLM
from roseinfer.engine_client.protocol import GUIDES_AT_ONCE, Facts, Figures, Part
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.async_llm import Together
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM


class InProcess:
    """Serves an ``LLM`` of this process."""

    apart = False
    restarting = False
    restarts = 0
    stalled_s = 0.0

    def __init__(self, llm: LLM) -> None:
        self.facts = Facts.of(llm)
        self._engine = llm.engine
        self._served = AsyncLLM(llm)
        self._guides = ThreadPoolExecutor(GUIDES_AT_ONCE, "roseinfer-guides")

    @property
    def figures(self) -> Figures:
        return Figures.of(self._engine)

    @property
    def closed(self) -> bool:
        return self._served.closed

    async def open(self) -> None:
        """Do nothing: every loop can listen."""

    def texts(self) -> _Texts:
        return _Texts(self._served.together())

    async def check_guide(self, guide: Guide) -> None:
        prepare, params = self._engine.guide_for, SamplingParams(guide=guide)
        await asyncio.get_running_loop().run_in_executor(self._guides, prepare, params)

    def close(self) -> None:
        self._served.close()
        self._guides.shutdown()


class _Texts:
    def __init__(self, together: Together) -> None:
        self._together = together
        self._begun: set[int] = set()

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        self._together.add(token_ids, params)

    async def next(self) -> list[tuple[int, Part]]:
        parts: dict[int, Part] = {}
        for number, update in await self._together.next():
            part = parts.get(number)
            if part is None:
                part = parts[number] = Part()
            part.add(update)
            if number not in self._begun and part.tokens:
                self._begun.add(number)
                part.begin(update.request)
        return [*parts.items()]

    def leave(self) -> None:
        self._together.leave()
