"""Functions, calls of them and what they returned, as bodies of chats have them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, WithJsonSchema

from roseinfer.guided.grammar import JSON_SPACE
from roseinfer.guided.guide import Guide
from roseinfer.server.schemas.validation import Strict, wrong

if TYPE_CHECKING:
    from collections.abc import Iterable

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


# Tells what a text says from the function that it calls, while the text is written.


_TAG = "<tool_call>"
_BARE = re.compile(r'[ \n\r\t]*\{[ \n\r\t]*"name"')
_MAY_BE_BARE = re.compile(r'[ \n\r\t]*(\{[ \n\r\t]*("(n(a(m(e)?)?)?)?)?)?')
_BEGIN = re.compile(
    rf'(?:{_TAG})?\s*\{{\s*"name"\s*:\s*"(?P<name>[\w-]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(slots=True)
class Said:
    """What a piece of a text came to."""

    content: str = ""
    name: str | None = None
    """The function that is called, in the piece that says so."""
    arguments: str = ""


class CallReader:
    """Reads one text, of the form that ``tool_guide`` gives it."""

    def __init__(self) -> None:
        self._held = ""
        """What may still become the beginning of a call."""
        self._said_something = False
        self._in_call = False
        self._name: str | None = None
        self._depth = 0
        """How many braces and brackets of the arguments are open."""
        self._quoted = self._escaped = False
        self.complete = False
        """True when all arguments of a call are there."""

    def read(self, text: str, *, last: bool) -> Said:
        """Take more text, and return what is certain. The ``last`` leaves nothing open."""
        said = Said()
        self._held += text
        if not self._in_call:
            self._say(said)
        if self._in_call and self._name is None and (begun := _BEGIN.match(self._held)):
            self._name = said.name = begun["name"]
            self._held = self._held[begun.end() :]
        if self._name is not None:
            said.arguments = self._arguments()
        elif last:
            said.content += self._held
            self._held = ""
        return said

    def _say(self, said: Said) -> None:
        """Let go of what is no call."""
        before, tag, behind = self._held.partition(_TAG)
        if not self._said_something and _BARE.match(self._held):
            self._in_call = True
        elif tag:
            said.content = before if self._said_something or before.strip() else ""
            self._held, self._in_call = tag + behind, True
        elif self._said_something or not _MAY_BE_BARE.fullmatch(self._held):
            keep = next(n for n in range(len(_TAG) - 1, -1, -1) if self._held.endswith(_TAG[:n]))
            certain = len(self._held) - keep
            if self._said_something or self._held[:certain].strip():
                said.content, self._held = self._held[:certain], self._held[certain:]
                self._said_something |= bool(said.content)

    def _arguments(self) -> str:
        """Return more of the arguments, up to the brace that ends them."""
        text, self._held = self._held, ""
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


# The form of a text that may be, or must be, the call of a function.
#
# A call is ``{"name": "f", "arguments": {...}}`` and nothing else, where ``parameters`` may stand
# for ``arguments``. A text that need not be one may also end with it, between ``<tool_call>`` and
# ``</tool_call>``. No other text begins with ``{"name"`` or has ``<tool_call>`` in it, so there is
# no doubt which it is.


_S = r"[ \n\r\t]{0,4}"
_BARE_CALL = r'/[ \n\r\t]*\{[ \n\r\t]*"name"(?s:.*)/'
_EITHER = rf"""start: TEXT | head call TAIL | call
head[lazy]: HEAD
HEAD: /(?s:.*)<tool_call>/ & ~{_BARE_CALL}
TEXT: /(?s:.*)/ & ~{_BARE_CALL} & ~/(?s:.*)<tool_call>(?s:.*)/
TAIL: /{_S}<\/tool_call>/
"""


def call_guide(functions: Iterable[Function], *, required: bool) -> Guide:
    """Return the form of a text that may call one of these functions, or must."""
    rules = ["start: call"] if required else [_EITHER]
    calls = []
    for at, function in enumerate(functions):
        begin = rf'"name"{_S}:{_S}"{function.name}"{_S},{_S}"(arguments|parameters)"{_S}:{_S}'
        schema = _spaced(function.schema_of_arguments)
        calls.append(f"call_{at}")
        rules += [
            f"call_{at}: BEGIN_{at} arguments_{at} END",
            f"BEGIN_{at}: /{_S}\\{{{_S}{begin}/",
            f"arguments_{at}: %json {json.dumps(schema)}",
        ]
    rules += [f"call: {' | '.join(calls)}", rf"END: /{_S}\}}/"]
    return Guide(grammar="\n".join(rules))


def _spaced(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
