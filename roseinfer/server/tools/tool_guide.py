"""The form of a text that may be, or must be, the call of a function.

A call is ``{"name": "f", "arguments": {...}}`` and nothing else, where ``parameters`` may stand for
``arguments``. A text that need not be one may also end with it, between ``<tool_call>`` and
``</tool_call>``. No other text begins with ``{"name"`` or has ``<tool_call>`` in it, so there is no
doubt which it is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from roseinfer.guided.grammars import JSON_SPACE
from roseinfer.guided.guide import Guide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from roseinfer.server.tools.tool_bodies import Function

_S = r"[ \n\r\t]{0,4}"
_BARE = r'/[ \n\r\t]*\{[ \n\r\t]*"name"(?s:.*)/'
_EITHER = rf"""start: TEXT | head call TAIL | call
head[lazy]: HEAD
HEAD: /(?s:.*)<tool_call>/ & ~{_BARE}
TEXT: /(?s:.*)/ & ~{_BARE} & ~/(?s:.*)<tool_call>(?s:.*)/
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
