"""What answers of completions and of chat completions have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from roseinfer.server.refusals import refusal_of
from roseinfer.server.streaming import DONE, event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.shapes.bodies import AskedForChoices
    from roseinfer.server.shapes.token_texts import TokenTexts


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
        self._head = {
            "id": f"{self.PREFIX}-{uuid4().hex}",
            "object": self.WHOLE,
            "created": int(time.time()),
            "model": body.model,
        }

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a choice of an answer that comes at once."""

    @abstractmethod
    def part(self, piece: Piece) -> dict[str, Any] | None:
        """Return a choice of a chunk; None for a piece that needs none, since its text is not
        certain yet."""

    async def whole(self) -> dict[str, Any]:
        pieces = await self.generation.whole()
        choices = [self.choice(piece) for piece in pieces]
        return self._head | {"choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        self._head["object"] = self.CHUNK
        asked = self._asked
        continuous = asked is not None and asked.continuous_usage_stats
        counted = asked is not None and asked.include_usage
        async with aclosing(self.generation.bursts()) as bursts:
            async for burst in bursts:
                so_far = self._usage() if continuous else None
                usage = {"usage": so_far} if continuous or counted else {}
                chunks = [
                    event(self._head | {"choices": [part]} | usage)
                    for piece in burst
                    if (part := self.part(piece)) is not None
                ]
                if self.generation.over:
                    if counted:
                        chunks.append(event(self._head | {"choices": [], "usage": self._usage()}))
                    chunks.append(DONE)
                if chunks:
                    yield b"".join(chunks)

    def failed(self, error: Exception) -> bytes:
        return event(refusal_of(error).body) + DONE

    def _usage(self) -> dict[str, Any]:
        used = self.generation.usage
        return {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }
