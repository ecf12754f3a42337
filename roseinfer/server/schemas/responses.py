"""``/v1/responses``, for texts: what is asked is not stored, and no tool is called."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from roseinfer.server.refusals import refusal_of
from roseinfer.server.schemas.choices import ResponseFormat  # noqa: TC001
from roseinfer.server.schemas.validation import (
    LIST,
    TEXT,
    TEXT_OR_LIST,
    Asked,
    NoList,
    NoReasoning,
    OnlyFalse,
    Part,
    Said,
    Strict,
)
from roseinfer.server.streaming import encode_finite, event, parts_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from roseinfer.guided.guide import Guide
    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.prompts import Prompt, Prompts


class InputPart(Part):
    type: Literal["input_text", "output_text"]
    annotations: NoList = None
    logprobs: NoList = None


class InputItem(Said):
    """A message: one that is given, or an answer that is sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, TEXT] | Annotated[list[InputPart], Field(min_length=1), LIST], TEXT_OR_LIST
    ]
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextOptions(Strict):
    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: OnlyFalse = False


class ResponseBody(Asked):
    guided_by: ClassVar[str] = "text.format"

    input: Annotated[
        Annotated[str, TEXT] | Annotated[list[InputItem], Field(min_length=1), LIST], TEXT_OR_LIST
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    background: OnlyFalse = None
    tools: NoList = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    include: NoList = None
    top_logprobs: int | None = Field(None, ge=0, le=0)
    context_management: NoList = None
    conversation: None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: NoReasoning | None = None
    stream_options: ResponsesStreamOptions | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    def guide(self) -> Guide | None:
        return self.text.format.guide() if self.text and self.text.format else None

    @property
    def format(self) -> dict[str, Any]:
        """The form of the text, as answers repeat it."""
        asked = self.text.format if self.text else None
        return asked.model_dump(by_alias=True) if asked else {"type": "text"}

    async def prompts(self, prompts: Prompts) -> list[Prompt]:
        items = self.input
        if isinstance(items, str):
            said = [{"role": "user", "content": items}]
        else:
            said = [item.as_told(item.content) for item in items]
        if self.instructions:
            said.insert(0, {"role": "system", "content": self.instructions})
        return await prompts.of_messages(said, "input")


_ALWAYS: dict[str, Any] = {
    "object": "response",
    "background": False,
    "error": None,
    "frequency_penalty": 0.0,
    "max_tool_calls": None,
    "parallel_tool_calls": False,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""What every response says of what cannot be asked for here."""


class ResponseAnswer:
    def __init__(self, body: ResponseBody, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._created = int(time.time())
        self._id = f"resp_{uuid4().hex}"
        self._item_id = f"msg_{uuid4().hex}"
        self._sent = 0
        """How many events, all of which are numbered."""

    async def whole(self) -> list[bytes]:
        (text,) = await self._generation.whole()
        return [*parts_of(self._response(text), encode_finite)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        text = None
        async with aclosing(self._generation.bursts()) as bursts:
            async for burst in bursts:
                for piece in burst:
                    if text is None:
                        text = piece
                        yield self._opening(at)
                    else:
                        text.add(piece)
                    if piece.text:
                        delta = {"delta": piece.text, "logprobs": []}
                        yield self._event("response.output_text.delta", at | delta)
        assert text is not None
        yield self._closing(at, text)

    def failed(self, error: Exception) -> bytes:
        """Say it as OpenAI does, and as the Open Responses specification does."""
        found: dict[str, Any] = refusal_of(error).body["error"]
        flat = {name: found[name] for name in ("code", "message", "param")}
        return self._event("error", flat | {"error": found})

    def _opening(self, at: dict[str, Any]) -> bytes:
        begun = {"response": self._response(None)}
        item = self._item("", "in_progress") | {"content": []}
        return b"".join(
            (
                self._event("response.created", begun),
                self._event("response.in_progress", begun),
                self._event("response.output_item.added", {"output_index": 0, "item": item}),
                self._event("response.content_part.added", at | {"part": _part("")}),
            )
        )

    def _closing(self, at: dict[str, Any], text: Piece) -> bytes:
        response = self._response(text)
        said = {"text": text.text, "logprobs": []}
        item = {"output_index": 0, "item": response["output"][0]}
        return b"".join(
            (
                self._event("response.output_text.done", at | said),
                self._event("response.content_part.done", at | {"part": _part(text.text)}),
                self._event("response.output_item.done", item),
                self._event(f"response.{response['status']}", {"response": response}),
            )
        )

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        self._sent += 1
        return event({"type": name, "sequence_number": self._sent - 1} | data, name)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        kind = {"type": "message", "id": self._item_id, "status": status}
        return kind | {"role": "assistant", "content": [_part(text)]}

    def _response(self, text: Piece | None) -> dict[str, Any]:
        """Return the response, which is in progress while there is no text."""
        body, used = self._body, self._generation.usage
        status = "in_progress"
        if text is not None:
            status = "incomplete" if text.finish_reason == "length" else "completed"
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
        }
        return _ALWAYS | {
            "id": self._id,
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [] if text is None else [self._item(text.text, status)],
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "text": {"format": body.format},
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None if text is None else usage,
            "user": body.user,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
