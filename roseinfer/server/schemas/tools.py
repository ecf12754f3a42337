"""Tool calling: schemas of functions and calls, a parser of calls, and the guide for them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, WithJsonSchema

from roseinfer.guided.grammar import JSON_WHITESPACE
from roseinfer.guided.guide import Guide
from roseinfer.server.schemas.validation import StrictModel, value_error

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]


def _require_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise value_error("must be the schema of an object")
    return schema


Parameters = Annotated[
    dict[str, Any],
    AfterValidator(_require_object),
    WithJsonSchema({"type": "object", "properties": {"type": {"const": "object"}}}),
]


class Function(StrictModel):
    """Function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    """Ignored: arguments always obey the schema of the parameters."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | self.parameters


class Tool(StrictModel):
    """Tool of a chat, which is a function."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    """Name of a function to call."""

    name: Name


class NamedTool(StrictModel):
    """Tool choice of one function, which must be called."""

    type: Literal["function"]
    function: FunctionName


def _tool_choice_tag(value: Any) -> str:
    return "(object)" if isinstance(value, (dict, NamedTool)) else "(text)"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(text)")]
    | Annotated[NamedTool, Tag("(object)")],
    Discriminator(_tool_choice_tag),
]


class FunctionCall(StrictModel):
    """Function call in a previous message."""

    name: Name
    arguments: str
    """JSON, or its beginning if the call was cut off."""

    @property
    def arguments_for_template(self) -> dict[str, Any] | str:
        """Arguments as the object that templates expect; the string itself if it is no object."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return value if isinstance(value, dict) else self.arguments


class ToolCall(StrictModel):
    """Tool call in a previous message of the model, which the client sends back unchanged."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def to_template(self) -> dict[str, Any]:
        """Return the call in the format of chat templates."""
        function = {"name": self.function.name, "arguments": self.function.arguments_for_template}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)]


# Parser of generated text, which separates content from function calls as the text streams.


_TAG = "<tool_call>"
_BARE = re.compile(r'[ \n\r\t]*\{[ \n\r\t]*"name"')
_MAY_BE_BARE = re.compile(r'[ \n\r\t]*(\{[ \n\r\t]*("(n(a(m(e)?)?)?)?)?)?')
_BEGIN = re.compile(
    rf'(?:{_TAG})?\s*\{{\s*"name"\s*:\s*"(?P<name>[\w-]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(slots=True)
class ParsedDelta:
    """Content and function call in a piece of generated text."""

    content: str = ""
    name: str | None = None
    """Name of the called function, in the piece that completes it; else None."""
    arguments: str = ""


class ToolCallParser:
    """Parser of one completion, whose form is that of ``call_guide``."""

    def __init__(self) -> None:
        self._buffer = ""
        """Text that may still become the beginning of a call."""
        self._has_content = False
        self._in_call = False
        self._name: str | None = None
        self._depth = 0
        """Number of open braces and brackets in the arguments."""
        self._quoted = self._escaped = False
        self.complete = False
        """True when the arguments of a call are complete."""

    def read(self, text: str, *, last: bool) -> ParsedDelta:
        """Parse more text, and return the part that is certain: all of it at the ``last`` call."""
        parsed = ParsedDelta()
        self._buffer += text
        if not self._in_call:
            self._take_content(parsed)
        if self._in_call and self._name is None and (match := _BEGIN.match(self._buffer)):
            self._name = parsed.name = match["name"]
            self._buffer = self._buffer[match.end() :]
        if self._name is not None:
            parsed.arguments = self._arguments()
        elif last:
            parsed.content += self._buffer
            self._buffer = ""
        return parsed

    def _take_content(self, parsed: ParsedDelta) -> None:
        """Move the text that cannot be part of a call from the buffer to the content."""
        before, tag, after = self._buffer.partition(_TAG)
        if not self._has_content and _BARE.match(self._buffer):
            self._in_call = True
        elif tag:
            parsed.content = before if self._has_content or before.strip() else ""
            self._buffer, self._in_call = tag + after, True
        elif self._has_content or not _MAY_BE_BARE.fullmatch(self._buffer):
            keep = next(n for n in range(len(_TAG) - 1, -1, -1) if self._buffer.endswith(_TAG[:n]))
            certain = len(self._buffer) - keep
            if self._has_content or self._buffer[:certain].strip():
                parsed.content, self._buffer = self._buffer[:certain], self._buffer[certain:]
                self._has_content |= bool(parsed.content)

    def _arguments(self) -> str:
        """Return the next part of the arguments, up to their closing brace."""
        text, self._buffer = self._buffer, ""
        if self.complete:
            return ""
        for at, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.complete = True
                    return text[: at + 1]
        return text


# Guide of a completion that may be, or must be, a function call.
#
# A call is ``{"name": "f", "arguments": {...}}`` and nothing else; ``parameters`` may replace
# ``arguments``. If a call is optional, text may come before it, and the call is then between
# ``<tool_call>`` and ``</tool_call>``. No other text begins with ``{"name"`` or contains
# ``<tool_call>``, so the parser cannot mistake one for the other.


_S = r"[ \n\r\t]{0,4}"
_BARE_CALL = r'/[ \n\r\t]*\{[ \n\r\t]*"name"(?s:.*)/'
_OPTIONAL_CALL_GRAMMAR = rf"""start: TEXT | head call TAIL | call
head[lazy]: HEAD
HEAD: /(?s:.*)<tool_call>/ & ~{_BARE_CALL}
TEXT: /(?s:.*)/ & ~{_BARE_CALL} & ~/(?s:.*)<tool_call>(?s:.*)/
TAIL: /{_S}<\/tool_call>/
"""


def call_guide(functions: Iterable[Function], *, required: bool) -> Guide:
    """Return the guide of a completion that may call one of the functions, or must."""
    rules = ["start: call"] if required else [_OPTIONAL_CALL_GRAMMAR]
    calls = []
    for at, function in enumerate(functions):
        begin = rf'"name"{_S}:{_S}"{function.name}"{_S},{_S}"(arguments|parameters)"{_S}:{_S}'
        schema = _with_whitespace(function.arguments_schema)
        calls.append(f"call_{at}")
        rules += [
            f"call_{at}: BEGIN_{at} arguments_{at} END",
            f"BEGIN_{at}: /{_S}\\{{{_S}{begin}/",
            f"arguments_{at}: %json {json.dumps(schema)}",
        ]
    rules += [f"call: {' | '.join(calls)}", rf"END: /{_S}\}}/"]
    return Guide(grammar="\n".join(rules))


def _with_whitespace(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
