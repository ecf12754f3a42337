"""Schema of ``/v1/responses``, for texts only: nothing is stored, and no tools are called."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from roseinfer.server.api_errors import to_api_error
from roseinfer.server.schemas.choices import ResponseFormat  # noqa: TC001
from roseinfer.server.schemas.validation import (
    LIST,
    TEXT,
    TEXT_OR_LIST,
    ChatMessage,
    ContentPart,
    EmptyList,
    NoReasoning,
    OnlyFalse,
    RequestBody,
    StrictModel,
)
from roseinfer.server.streaming import encode_finite, event, iter_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from roseinfer.guided.guide import Guide
    from roseinfer.server.generation import ChoiceDelta, Generation
    from roseinfer.server.prompts import Prompt, PromptEncoder


class InputPart(ContentPart):
    """Text part of an input message."""

    type: Literal["input_text", "output_text"]
    annotations: EmptyList = None
    logprobs: EmptyList = None


class InputItem(ChatMessage):
    """Input message: a new one, or the output of an earlier response."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, TEXT] | Annotated[list[InputPart], Field(min_length=1), LIST], TEXT_OR_LIST
    ]
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextOptions(StrictModel):
    """Options of the output text."""

    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(StrictModel):
    """Options of a stream of ``/v1/responses``."""

    include_obfuscation: OnlyFalse = False


class ResponseBody(RequestBody):
    """Request body of a response."""

    guide_field: ClassVar[str] = "text.format"

    input: Annotated[
        Annotated[str, TEXT] | Annotated[list[InputItem], Field(min_length=1), LIST], TEXT_OR_LIST
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    background: OnlyFalse = None
    tools: EmptyList = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    include: EmptyList = None
    top_logprobs: int | None = Field(None, ge=0, le=0)
    context_management: EmptyList = None
    conversation: None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: NoReasoning | None = None
    stream_options: ResponsesStreamOptions | None = None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    def guide(self) -> Guide | None:
        return self.text.format.guide() if self.text and self.text.format else None

    @property
    def format(self) -> dict[str, Any]:
        """Format of the text, as the response object repeats it."""
        text_format = self.text.format if self.text else None
        return text_format.model_dump(by_alias=True) if text_format else {"type": "text"}

    async def encode_prompts(self, prompts: PromptEncoder) -> list[Prompt]:
        items = self.input
        if isinstance(items, str):
            messages = [{"role": "user", "content": items}]
        else:
            messages = [item.to_template_message(item.content) for item in items]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return await prompts.encode_chat(messages, "input")


_CONSTANT_FIELDS: dict[str, Any] = {
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
"""Fields of every response object about options that are not supported."""


class ResponseObject:
    """Response of ``/v1/responses``, complete or as a stream of events."""

    def __init__(self, body: ResponseBody, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._created = int(time.time())
        self._id = f"resp_{uuid4().hex}"
        self._item_id = f"msg_{uuid4().hex}"
        self._sent = 0
        """Number of events sent: the next event's sequence number."""

    async def json_parts(self) -> list[bytes]:
        (text,) = await self._generation.collect_choices()
        return [*iter_json(self._response(text), encode_finite)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        text = None
        async with aclosing(self._generation.bursts()) as bursts:
            async for burst in bursts:
                for delta in burst:
                    if text is None:
                        text = delta
                        yield self._first_events(at)
                    else:
                        text.add(delta)
                    if delta.text:
                        fields = {"delta": delta.text, "logprobs": []}
                        yield self._event("response.output_text.delta", at | fields)
        assert text is not None
        yield self._final_events(at, text)

    def error_events(self, error: Exception) -> bytes:
        """Return the error in OpenAI's format, and in that of the Open Responses specification."""
        error_body: dict[str, Any] = to_api_error(error).body["error"]
        flat = {name: error_body[name] for name in ("code", "message", "param")}
        return self._event("error", flat | {"error": error_body})

    def _first_events(self, at: dict[str, Any]) -> bytes:
        created = {"response": self._response(None)}
        item = self._item("", "in_progress") | {"content": []}
        return b"".join(
            (
                self._event("response.created", created),
                self._event("response.in_progress", created),
                self._event("response.output_item.added", {"output_index": 0, "item": item}),
                self._event("response.content_part.added", at | {"part": _part("")}),
            )
        )

    def _final_events(self, at: dict[str, Any], text: ChoiceDelta) -> bytes:
        response = self._response(text)
        done = {"text": text.text, "logprobs": []}
        item = {"output_index": 0, "item": response["output"][0]}
        return b"".join(
            (
                self._event("response.output_text.done", at | done),
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

    def _response(self, text: ChoiceDelta | None) -> dict[str, Any]:
        """Return the response object, which is in progress while ``text`` is None."""
        body, counts = self._body, self._generation.usage
        status = "in_progress"
        if text is not None:
            status = "incomplete" if text.finish_reason == "length" else "completed"
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }
        return _CONSTANT_FIELDS | {
            "id": self._id,
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": incomplete_details,
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
