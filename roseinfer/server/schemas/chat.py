"""Schema of ``/v1/chat/completions``: messages, tools, and the assistant's next message."""

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

from roseinfer.server.schemas.choices import ChatFormat, ChoicesResponse
from roseinfer.server.schemas.tools import (
    MAX_TOOLS,
    NamedTool,
    Tool,
    ToolCallParser,
    ToolCalls,
    ToolChoice,
    call_guide,
)
from roseinfer.server.schemas.validation import (
    LIST,
    STREAM_OPTIONS_RULE,
    TEXT,
    TEXT_OR_LIST,
    ChatMessage,
    ChoicesRequestBody,
    ContentPart,
    EmptyList,
    requires_field,
    value_error,
)

if TYPE_CHECKING:
    from roseinfer.guided.guide import Guide
    from roseinfer.server.generation import ChoiceDelta, Generation
    from roseinfer.server.prompts import Prompt, PromptEncoder
    from roseinfer.server.schemas.choices import Lists, TokenTexts

# Messages of a chat, by role.


class TextPart(ContentPart):
    """Text part of a message."""

    type: Literal["text"]


Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[TextPart], Field(min_length=1), LIST], TEXT_OR_LIST
]


_ROLES = "'system', 'developer', 'user', 'assistant' or 'tool'"


class InputMessage(ChatMessage):
    """Message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None

    @field_validator("role", mode="wrap")
    @classmethod
    def _check_role(cls, role: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Refuse an unknown role with a list of all roles, also those of the other classes."""
        try:
            return check(role)
        except ValidationError:
            raise value_error(f"must be {_ROLES}") from None

    def to_template(self) -> dict[str, Any]:
        message = self.to_template_message(self.content)
        return message if self.name is None else message | {"name": self.name}


_HAS_CONTENT: dict[str, Any] = {
    "properties": {"content": {"type": ["string", "array"]}},
    "required": ["content"],
}
_HAS_TOOL_CALLS: dict[str, Any] = {
    "properties": {"tool_calls": {"type": "array", "minItems": 1}},
    "required": ["tool_calls"],
}


class AssistantMessage(ChatMessage):
    """Previous message of the model: text, or function calls."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_HAS_CONTENT, _HAS_TOOL_CALLS]})

    role: Literal["assistant"]
    name: str | None = None
    tool_calls: ToolCalls | None = None
    content: Content | None = Field(None, validate_default=True)
    refusal: None = None
    annotations: EmptyList = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return content

    def to_template(self) -> dict[str, Any]:
        message: dict[str, Any] = self.to_template_message(self.content or "")
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        return message


class ToolMessage(ChatMessage):
    """Result of a function call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None

    def to_template(self) -> dict[str, Any]:
        message = self.to_template_message(self.content) | {"tool_call_id": self.tool_call_id}
        return message if self.name is None else message | {"name": self.name}


_MESSAGE_TAGS = {"assistant": "(assistant)", "tool": "(tool)"}


def _message_tag(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return _MESSAGE_TAGS.get(role, "(input)") if isinstance(role, str) else "(input)"


Message = Annotated[
    Annotated[InputMessage, Tag("(input)")]
    | Annotated[AssistantMessage, Tag("(assistant)")]
    | Annotated[ToolMessage, Tag("(tool)")],
    Discriminator(_message_tag),
]


_TOP_LOGPROBS_RULE = requires_field("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs")
_HAS_TOOLS: dict[str, Any] = {
    "properties": {"tools": {"type": "array", "minItems": 1}},
    "required": ["tools"],
}
_HAS_JSON_FORMAT = {
    "properties": {"type": {"enum": ["json_object", "json_schema"]}},
    "required": ["type"],
}
_TOOL_CHOICE_RULES: tuple[Any, ...] = (
    {
        "if": {
            "properties": {"tool_choice": {"anyOf": [{"const": "required"}, {"type": "object"}]}},
            "required": ["tool_choice"],
        },
        "then": _HAS_TOOLS,
    },
    {
        "if": _HAS_TOOLS
        | {
            "properties": {**_HAS_TOOLS["properties"], "response_format": _HAS_JSON_FORMAT},
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


class ChatBody(ChoicesRequestBody):
    """Request body of a chat completion."""

    model_config = ConfigDict(
        json_schema_extra={"allOf": [STREAM_OPTIONS_RULE, _TOP_LOGPROBS_RULE, *_TOOL_CHOICE_RULES]}
    )

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ChatFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = Field(None, validate_default=True)
    parallel_tool_calls: bool | None = None
    """Ignored: at most one function is called either way."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    function_call: Literal["none", "auto"] | None = None
    functions: EmptyList = None
    prediction: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None

    @field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_completion_tokens")
        if value is not None and other is not None and other != value:
            raise value_error(
                f"must be equal to max_completion_tokens, which is {other}, or left "
                "out: both are the same limit"
            )
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise value_error("needs logprobs to be true")
        return value

    @field_validator("tools")
    @classmethod
    def _check_unique_names(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise value_error("must have a different name for each function")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, choice: Any, info: ValidationInfo) -> Any:
        tools = info.data.get("tools")
        names = [tool.function.name for tool in tools or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise value_error("must name one of the functions in tools")
        if choice == "required" and not names:
            raise value_error("needs tools: it requires a call, and the request has none")
        text_format = info.data.get("response_format")
        if (
            names
            and choice in (None, "auto")
            and text_format is not None
            and text_format.type != "text"
        ):
            raise value_error(
                "must be 'none', 'required' or a function if the request has tools and a "
                "response_format that is not text"
            )
        return choice

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def guide_field(self) -> str:  # type: ignore[override]
        return "tools" if self.callable_tools else "response_format"

    def guide(self) -> Guide | None:
        choice = self.tool_choice
        functions = [tool.function for tool in self.callable_tools]
        if isinstance(choice, NamedTool):
            functions = [each for each in functions if each.name == choice.function.name]
        if functions:
            return call_guide(functions, required=choice not in (None, "auto"))
        return self.response_format.guide() if self.response_format else None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def logprob_params(self, choice: int) -> dict[str, Any]:  # noqa: ARG002
        top_logprobs = {"top_logprobs": self.top_logprobs} if self.top_logprobs else {}
        return {"logprobs": bool(self.logprobs), **top_logprobs}

    async def encode_prompts(self, prompts: PromptEncoder) -> list[Prompt]:
        messages = [each.to_template() for each in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.callable_tools]
        return await prompts.encode_chat(messages, "messages", tools)


class ChatCompletion(ChoicesResponse):
    """Response of a chat completion."""

    PREFIX = "chatcmpl"
    OBJECT = "chat.completion"
    CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(self, body: ChatBody, generation: Generation, token_texts: TokenTexts) -> None:
        super().__init__(body, generation, token_texts)
        self._wants_logprobs = bool(body.logprobs)
        self._logprobs_per_token = 1 + (body.top_logprobs or 0)
        self._has_tools = bool(body.callable_tools)
        self._builders: dict[int, _MessageBuilder] = {}

    async def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        fields = self._builder(delta).next_delta(delta)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": fields["content"],
            "refusal": None,
            "annotations": [],
        }
        if "tool_calls" in fields:
            (call,) = fields["tool_calls"]
            message |= {
                "content": message["content"] or None,
                "tool_calls": [{name: call[name] for name in ("id", "type", "function")}],
            }
        return await self._choice_object("message", message, delta)

    async def part(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        fields = self._builder(delta).next_delta(delta)
        if fields or self._wants_logprobs or delta.finish_reason:
            return await self._choice_object("delta", fields, delta)
        return None

    def _builder(self, delta: ChoiceDelta) -> _MessageBuilder:
        if delta.choice not in self._builders:
            self._builders[delta.choice] = _MessageBuilder(
                ToolCallParser() if self._has_tools else None
            )
        return self._builders[delta.choice]

    async def _choice_object(
        self, name: str, content: dict[str, Any], delta: ChoiceDelta
    ) -> dict[str, Any]:
        return {
            "index": delta.choice,
            name: content,
            "logprobs": await self._logprobs(delta) if self._wants_logprobs else None,
            "finish_reason": self._builder(delta).finish_reason(delta),
        }

    async def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        def logprobs_of(at: slice) -> Lists:
            return self.token_texts.chat_logprobs(
                delta.tokens[at], delta.logprobs[at], delta.top_logprobs[at]
            )

        return await self.lists(len(delta.tokens), self._logprobs_per_token, logprobs_of) | {
            "refusal": None
        }


class _MessageBuilder:
    """Builder of one choice's message, from the deltas of its text."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser = parser
        self._id = f"call_{uuid4().hex[:24]}"
        self._has_begun = False

    def next_delta(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the part of the message that a delta adds."""
        first, self._has_begun = not self._has_begun, True
        fields: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if self._parser is None:
            return fields | {"content": delta.text} if delta.text else fields
        parsed = self._parser.read(delta.text, last=delta.finish_reason is not None)
        if parsed.content:
            fields["content"] = parsed.content
        if parsed.name is not None:
            function = {"name": parsed.name, "arguments": parsed.arguments}
            call = {"index": 0, "id": self._id, "type": "function", "function": function}
            fields["tool_calls"] = [call]
        elif parsed.arguments:
            function = {"arguments": parsed.arguments}
            fields["tool_calls"] = [{"index": 0, "function": function}]
        return fields

    def finish_reason(self, delta: ChoiceDelta) -> str | None:
        complete_call = self._parser is not None and self._parser.complete
        return (
            "tool_calls" if complete_call and delta.finish_reason == "stop" else delta.finish_reason
        )
