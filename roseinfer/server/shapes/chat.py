"""``/v1/chat/completions``: what an assistant says next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from roseinfer.server.shapes.bodies import (
    MOST_LIKELIEST,
    AskedForChoices,
    NoList,
    Strict,
    any_of,
    listed,
)
from roseinfer.server.shapes.choices import ChoicesAnswer

if TYPE_CHECKING:
    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.prompts import Prompt, Prompts
    from roseinfer.server.shapes.token_texts import TokenTexts

_MOST_MESSAGES = 2048


class TextPart(Strict):
    type: Literal["text"]
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[list[TextPart], Field(min_length=1)],
        BeforeValidator(_as_parts),
        any_of({"type": "string"}, listed(_PART, 1, _MOST_MESSAGES)),
    ]
    name: str | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ChatBody(AskedForChoices):
    messages: list[Message] = Field(min_length=1, max_length=_MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELIEST)
    response_format: TextFormat | None = None
    tools: NoList = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("no_logprobs", "it needs logprobs to be true")
        return value

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> dict[str, Any]:
        return {"logprobs": bool(self.logprobs)}

    async def prompts(self, prompts: Prompts) -> list[Prompt]:
        return await prompts.of_messages([as_said(each) for each in self.messages], "messages")


def as_said(message: Message) -> dict[str, str]:
    """Return a message as chat templates know it: developers are a newer word for the system."""
    role = "system" if message.role == "developer" else message.role
    said = {"role": role, "content": "\n".join(part.text for part in message.content)}
    return said if message.name is None else said | {"name": message.name}


class ChatCompletion(ChoicesAnswer):
    PREFIX = "chatcmpl"
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, body: ChatBody, generation: Generation, token_texts: TokenTexts) -> None:
        super().__init__(body, generation, token_texts)
        self._wants_logprobs = bool(body.logprobs)
        self._begun: set[int] = set()

    def choice(self, piece: Piece) -> dict[str, Any]:
        said = {"role": "assistant", "content": piece.text, "refusal": None}
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
