"""``/v1/chat/completions``: what an assistant says next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from roseinfer.server.shapes.bodies import OF_STREAMS, AskedForChoices, only_with
from roseinfer.server.shapes.choices import ChoicesAnswer
from roseinfer.server.shapes.formats import ChatFormat  # noqa: TC001 - pydantic reads it
from roseinfer.server.shapes.messages import Message  # noqa: TC001
from roseinfer.server.shapes.neutral import NoList  # noqa: TC001
from roseinfer.server.shapes.wrong_values import wrong
from roseinfer.server.tools.call_reader import CallReader
from roseinfer.server.tools.tool_bodies import MOST_TOOLS, NamedTool, Tool, ToolChoice
from roseinfer.server.tools.tool_guide import call_guide

if TYPE_CHECKING:
    from roseinfer.guided.guide import Guide
    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.prompts import Prompt, Prompts
    from roseinfer.server.shapes.choices import Lists
    from roseinfer.server.shapes.token_texts import TokenTexts


_LIKELIEST = only_with("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs")
_SOME: dict[str, Any] = {
    "properties": {"tools": {"type": "array", "minItems": 1}},
    "required": ["tools"],
}
_JSON = {"properties": {"type": {"enum": ["json_object", "json_schema"]}}, "required": ["type"]}
_TOOL_CHOICES: tuple[Any, ...] = (
    {
        "if": {
            "properties": {"tool_choice": {"anyOf": [{"const": "required"}, {"type": "object"}]}},
            "required": ["tool_choice"],
        },
        "then": _SOME,
    },
    {
        "if": _SOME
        | {
            "properties": {**_SOME["properties"], "response_format": _JSON},
            "required": ["tools", "response_format"],
        },
        "then": {
            "properties": {
                "tool_choice": {"anyOf": [{"enum": ["none", "required"]}, {"type": "object"}]}
            },
            "required": ["tool_choice"],
        },
    },
)


class ChatBody(AskedForChoices):
    model_config = ConfigDict(json_schema_extra={"allOf": [OF_STREAMS, _LIKELIEST, *_TOOL_CHOICES]})

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ChatFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = Field(None, validate_default=True)
    parallel_tool_calls: bool | None = None
    """One function is called at most, so either is right."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    function_call: Literal["none", "auto"] | None = None
    functions: NoList = None
    prediction: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None

    @field_validator("max_tokens")
    @classmethod
    def _as_the_newer_name_has_it(cls, value: int | None, info: ValidationInfo) -> int | None:
        newer = info.data.get("max_completion_tokens")
        if value is not None and newer is not None and newer != value:
            raise wrong(
                f"must be equal to max_completion_tokens, which is {newer}, or be left out: both "
                "limit the same tokens"
            )
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise wrong("needs logprobs to be true")
        return value

    @field_validator("tools")
    @classmethod
    def _with_names_of_their_own(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise wrong("must have a name of its own for each function")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _of_tools(cls, choice: Any, info: ValidationInfo) -> Any:
        tools = info.data.get("tools")
        names = [tool.function.name for tool in tools or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise wrong("must name one of the functions in tools")
        if choice == "required" and not names:
            raise wrong("needs tools that can be called")
        form = info.data.get("response_format")
        if names and choice in (None, "auto") and form is not None and form.type != "text":
            raise wrong(
                "must be 'none', 'required' or a function, beside tools and a response_format that "
                "is not text"
            )
        return choice

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def guided_by(self) -> str:  # type: ignore[override]
        return "tools" if self.offered else "response_format"

    def guide(self) -> Guide | None:
        choice = self.tool_choice
        functions = [tool.function for tool in self.offered]
        if isinstance(choice, NamedTool):
            functions = [each for each in functions if each.name == choice.function.name]
        if functions:
            return call_guide(functions, required=choice not in (None, "auto"))
        return self.response_format.guide() if self.response_format else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def wanted_logprobs(self, choice: int) -> dict[str, Any]:  # noqa: ARG002
        likeliest = {"top_logprobs": self.top_logprobs} if self.top_logprobs else {}
        return {"logprobs": bool(self.logprobs), **likeliest}

    async def prompts(self, prompts: Prompts) -> list[Prompt]:
        messages = [each.told() for each in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.offered]
        return await prompts.of_messages(messages, "messages", tools)


class ChatCompletion(ChoicesAnswer):
    PREFIX = "chatcmpl"
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, body: ChatBody, generation: Generation, token_texts: TokenTexts) -> None:
        super().__init__(body, generation, token_texts)
        self._wants_logprobs = bool(body.logprobs)
        self._each = 1 + (body.top_logprobs or 0)
        self._offers_tools = bool(body.offered)
        self._speaking: dict[int, _Speaker] = {}

    async def choice(self, piece: Piece) -> dict[str, Any]:
        delta = self._speaker(piece).go_on(piece)
        said: dict[str, Any] = {
            "role": "assistant",
            "content": delta["content"],
            "refusal": None,
            "annotations": [],
        }
        if "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            said |= {
                "content": said["content"] or None,
                "tool_calls": [{name: call[name] for name in ("id", "type", "function")}],
            }
        return await self._around("message", said, piece)

    async def part(self, piece: Piece) -> dict[str, Any] | None:
        delta = self._speaker(piece).go_on(piece)
        if delta or self._wants_logprobs or piece.finish_reason:
            return await self._around("delta", delta, piece)
        return None

    def _speaker(self, piece: Piece) -> _Speaker:
        if piece.choice not in self._speaking:
            self._speaking[piece.choice] = _Speaker(CallReader() if self._offers_tools else None)
        return self._speaking[piece.choice]

    async def _around(self, name: str, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            name: said,
            "logprobs": await self._logprobs(piece) if self._wants_logprobs else None,
            "finish_reason": self._speaker(piece).finish_reason(piece),
        }

    async def _logprobs(self, piece: Piece) -> dict[str, Any]:
        def told(at: slice) -> Lists:
            return self.token_texts.of_chat(
                piece.tokens[at], piece.logprobs[at], piece.likeliest[at]
            )

        return await self.lists(len(piece.tokens), self._each, told) | {"refusal": None}


class _Speaker:
    """What one choice has said by now."""

    def __init__(self, reader: CallReader | None) -> None:
        self._reader = reader
        self._id = f"call_{uuid4().hex[:24]}"
        self._begun = False

    def go_on(self, piece: Piece) -> dict[str, Any]:
        """Return what a piece adds to the message."""
        first, self._begun = not self._begun, True
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if self._reader is None:
            return delta | {"content": piece.text} if piece.text else delta
        said = self._reader.read(piece.text, last=piece.finish_reason is not None)
        if said.content:
            delta["content"] = said.content
        if said.name is not None:
            function = {"name": said.name, "arguments": said.arguments}
            call = {"index": 0, "id": self._id, "type": "function", "function": function}
            delta["tool_calls"] = [call]
        elif said.arguments:
            function = {"arguments": said.arguments}
            delta["tool_calls"] = [{"index": 0, "function": function}]
        return delta

    def finish_reason(self, piece: Piece) -> str | None:
        called = self._reader is not None and self._reader.complete
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason
