"""``/v1/chat/completions``: what an assistant says next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from roseinfer.server.shapes.bodies import (
    LIST,
    OF_STREAMS,
    TEXT,
    TEXT_OR_LIST,
    AskedForChoices,
    NoList,
    OnlyFalse,
    Part,
    Said,
    Strict,
    only_with,
)
from roseinfer.server.shapes.choices import ChoicesAnswer

if TYPE_CHECKING:
    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.prompts import Prompt, Prompts
    from roseinfer.server.shapes.token_texts import TokenTexts


class TextPart(Part):
    type: Literal["text"]


class Message(Said):
    content: Annotated[
        Annotated[str, TEXT] | Annotated[list[TextPart], Field(min_length=1), LIST], TEXT_OR_LIST
    ]
    name: str | None = None

    def told(self) -> dict[str, str]:
        told = self.as_told(self.content)
        return told if self.name is None else told | {"name": self.name}


class TextFormat(Strict):
    type: Literal["text"]


_LIKELIEST = only_with("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs")


class ChatBody(AskedForChoices):
    model_config = ConfigDict(json_schema_extra={"allOf": [OF_STREAMS, _LIKELIEST]})

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: TextFormat | None = None
    tools: NoList = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    metadata: dict[str, str] | None = None
    store: OnlyFalse = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("no_logprobs", "it needs logprobs to be true")
        return value

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def wanted_logprobs(self, choice: int) -> dict[str, Any]:  # noqa: ARG002
        likeliest = {"top_logprobs": self.top_logprobs} if self.top_logprobs else {}
        return {"logprobs": bool(self.logprobs), **likeliest}

    async def prompts(self, prompts: Prompts) -> list[Prompt]:
        return await prompts.of_messages([each.told() for each in self.messages], "messages")


class ChatCompletion(ChoicesAnswer):
    PREFIX = "chatcmpl"
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, body: ChatBody, generation: Generation, token_texts: TokenTexts) -> None:
        super().__init__(body, generation, token_texts)
        self._wants_logprobs = bool(body.logprobs)
        self._begun: set[int] = set()

    def choice(self, piece: Piece) -> dict[str, Any]:
        said: dict[str, Any] = {
            "role": "assistant",
            "content": piece.text,
            "refusal": None,
            "annotations": [],
        }
        return self._around("message", said, piece)

    def part(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            delta = {"role": "assistant", "content": piece.text}
        return self._around("delta", delta, piece)

    def says_something(self, piece: Piece) -> bool:
        return bool(piece.text or self._wants_logprobs or piece.choice not in self._begun)

    def _around(self, name: str, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            name: said,
            "logprobs": self.token_texts.of_chat(piece) if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }
