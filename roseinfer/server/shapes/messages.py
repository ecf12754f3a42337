"""The messages of a chat, by whoever said them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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

from roseinfer.server.shapes.bodies import LIST, TEXT, TEXT_OR_LIST, Part, Said
from roseinfer.server.shapes.neutral import NoList  # noqa: TC001 - pydantic reads it
from roseinfer.server.shapes.wrong_values import wrong
from roseinfer.server.tools.tool_bodies import ToolCalls  # noqa: TC001


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
