"""``/v1/chat/completions``: what an assistant says next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticCustomError

from roseinfer.server.schemas.choices import ChatFormat, ChoicesAnswer
from roseinfer.server.schemas.tools import (
    MOST_TOOLS,
    CallReader,
    NamedTool,
    Tool,
    ToolCalls,
    ToolChoice,
    call_guide,
)
from roseinfer.server.schemas.validation import (
    LIST,
    OF_STREAMS,
    TEXT,
    TEXT_OR_LIST,
    AskedForChoices,
    NoList,
    Part,
    Said,
    only_with,
    wrong,
)

if TYPE_CHECKING:
    from roseinfer.guided.guide import Guide
    from roseinfer.server.generation import Generation, Piece
    from roseinfer.server.prompts import Prompt, Prompts
    from roseinfer.server.schemas.choices import Lists, TokenTexts

# The messages of a chat, by whoever said them.


class TextPart(Part):
    type: Literal["text"]


Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[TextPart], Field(min_length=1), LIST], TEXT_OR_LIST
]


_ROLES = "'system', 'developer', 'user', 'assistant' or 'tool'"


class AskingMessage(Said):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None

    @field_validator("role", mode="wrap")
    @classmethod
    def _any(cls, role: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Name all roles where it is none: messages of other roles have bodies of their own."""
        try:
            return check(role)
        except ValidationError:
            raise wrong(f"must be {_ROLES}") from None

    def told(self) -> dict[str, Any]:
        told = self.as_told(self.content)
        return told if self.name is None else told | {"name": self.name}


_SAYS: dict[str, Any] = {
    "properties": {"content": {"type": ["string", "array"]}},
    "required": ["content"],
}
_CALLS: dict[str, Any] = {
    "properties": {"tool_calls": {"type": "array", "minItems": 1}},
    "required": ["tool_calls"],
}


class AssistantMessage(Said):
    """What the model said before, or which function it called."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_SAYS, _CALLS]})

    role: Literal["assistant"]
    name: str | None = None
    tool_calls: ToolCalls | None = None
    content: Content | None = Field(None, validate_default=True)
    refusal: None = None
    annotations: NoList = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _or_a_call(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return content

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = self.as_told(self.content or "")
        if self.name is not None:
            told["name"] = self.name
        if self.tool_calls:
            told["tool_calls"] = [call.told() for call in self.tool_calls]
        return told


class ToolMessage(Said):
    """What a function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None

    def told(self) -> dict[str, Any]:
        told = self.as_told(self.content) | {"tool_call_id": self.tool_call_id}
        return told if self.name is None else told | {"name": self.name}


_OTHERS = {"assistant": "(assistant)", "tool": "(tool)"}


def _kind(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return _OTHERS.get(role, "(asking)") if isinstance(role, str) else "(asking)"


Message = Annotated[
    Annotated[AskingMessage, Tag("(asking)")]
    | Annotated[AssistantMessage, Tag("(assistant)")]
    | Annotated[ToolMessage, Tag("(tool)")],
    Discriminator(_kind),
]


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
