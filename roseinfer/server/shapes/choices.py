"""What answers of completions and of chat completions have in common."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from roseinfer.server.json_parts import (
    AT_ONCE,
    BYTES_AT_ONCE,
    Json,
    Turns,
    encode_any,
    encode_finite,
    items,
    list_of,
    parts_of,
)
from roseinfer.server.refusals import refusal_of
from roseinfer.server.streaming import DONE, event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.shapes.bodies import AskedForChoices
    from roseinfer.server.shapes.token_texts import TokenTexts

    Lists = dict[str, list[Any]]


class ChoicesAnswer(ABC):
    """An answer with a list of choices, whole or in chunks."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(
        self, body: AskedForChoices, generation: Generation, token_texts: TokenTexts
    ) -> None:
        self.generation = generation
        self.token_texts = token_texts
        self._asked = body.stream_options
        self._turns = Turns()
        self._encode = encode_any
        self._head = {
            "id": f"{self.PREFIX}-{uuid4().hex}",
            "object": self.WHOLE,
            "created": int(time.time()),
            "model": body.model,
        }

    @abstractmethod
    async def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a choice of an answer that comes at once."""

    @abstractmethod
    async def part(self, piece: Piece) -> dict[str, Any] | None:
        """Return a choice of a chunk; None for a piece that needs none, since its text is not
        certain yet."""

    async def whole(self) -> list[bytes]:
        self._encode = encode_finite
        choices = [
            Json([*parts_of(await self.choice(piece), self._encode)])
            for piece in await self.generation.whole()
        ]
        whole = self._head | {"choices": choices, "usage": self._usage()}
        return [*parts_of(whole, self._encode)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        self._head["object"] = self.CHUNK
        asked = self._asked
        continuous = asked is not None and asked.continuous_usage_stats
        counted = asked is not None and asked.include_usage
        async with aclosing(self.generation.bursts()) as bursts:
            async for burst in bursts:
                so_far = self._usage() if continuous else None
                usage = {"usage": so_far} if continuous or counted else {}
                chunks = bytearray()
                for piece in burst:
                    if (part := await self.part(piece)) is not None:
                        chunks += event(self._head | {"choices": [part]} | usage)
                    if len(chunks) >= BYTES_AT_ONCE:
                        yield bytes(chunks)
                        await asyncio.sleep(0)
                        chunks.clear()
                if self.generation.over:
                    if counted:
                        chunks += event(self._head | {"choices": [], "usage": self._usage()})
                    chunks += DONE
                if chunks:
                    yield bytes(chunks)

    def failed(self, error: Exception) -> bytes:
        return event(refusal_of(error).body) + DONE

    async def lists(
        self,
        count: int,
        each: int,
        told: Callable[[slice], Lists],
        before: Mapping[str, bytes] | None = None,
    ) -> dict[str, Any]:
        """Return lists that are told of slices of ``count`` tokens, each of so many numbers.

        They are encoded if they are long, or if encoded items stand ``before`` theirs.
        """
        if before is None and count * each <= AT_ONCE:
            await self._turns.after(count * each)
            return dict(told(slice(0, count)))
        columns = await self.columns(count, each, told)
        return {name: list_of((before or {}).get(name), own) for name, own in columns.items()}

    async def columns(
        self, count: int, each: int, told: Callable[[slice], Lists]
    ) -> dict[str, bytes]:
        """Return the items of such lists as JSON. Others have turns between the slices."""
        found: dict[str, list[bytes]] = {}
        size = max(1, AT_ONCE // each)
        for begin in range(0, max(1, count), size):
            for name, values in told(slice(begin, begin + size)).items():
                found.setdefault(name, []).append(items(values, self._encode))
            await self._turns.after(min(size, count - begin) * each)
        return {name: b",".join(filter(None, slices)) for name, slices in found.items()}

    def _usage(self) -> dict[str, Any]:
        used = self.generation.usage
        return {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }
