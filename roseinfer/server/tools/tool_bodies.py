"""Functions, calls of them and what they returned, as bodies of chats have them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, WithJsonSchema

from roseinfer.server.shapes.bodies import Strict
from roseinfer.server.shapes.wrong_values import wrong

MOST_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]


def _require_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise wrong("must be the schema of an object")
    return schema


Parameters = Annotated[
    dict[str, Any],
    AfterValidator(_require_object),
    WithJsonSchema({"type": "object", "properties": {"type": {"const": "object"}}}),
]


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    """Arguments are held to the parameters either way."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | self.parameters


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NameOfFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NameOfFunction


def _kind(value: Any) -> str:
    return "(object)" if isinstance(value, (dict, NamedTool)) else "(text)"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(text)")]
    | Annotated[NamedTool, Tag("(object)")],
    Discriminator(_kind),
]


class CalledFunction(Strict):
    name: Name
    arguments: str
    """JSON, or its beginning where the call was cut off."""

    @property
    def arguments_as_told(self) -> dict[str, Any] | str:
        """The arguments, by which templates mean an object; the text as it is if it is none."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class ToolCall(Strict):
    """A call that the model made before, and that is sent back as it came."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def told(self) -> dict[str, Any]:
        """Return it as chat templates know it."""
        function = {"name": self.function.name, "arguments": self.function.arguments_as_told}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)]
