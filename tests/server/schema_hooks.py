"""Filter of schemathesis bodies for limits that no schema expresses.

These are the lengths of prompts, the supported JSON schemas, the names of functions, and the
equality of two names of one limit.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

MAX_BODY_CHARACTERS = 500
"""Maximum characters of a body, including what the template adds to each message."""


def filter_body(_: Any, body: Any) -> bool:
    return (
        len(json.dumps(body, default=str, ensure_ascii=False).encode(errors="replace"))
        < MAX_BODY_CHARACTERS
    )


def map_body(_: Any, body: Any) -> Any:
    """Reduce schemas to objects, make function names unique, and make both token limits equal."""
    if isinstance(body, dict):
        if isinstance(body.get("max_tokens"), int) and body.get("max_completion_tokens"):
            body["max_completion_tokens"] = body["max_tokens"]
        _simplify_schemas(body)
        tools = body.get("tools")
        functions = [_nested(tool, "function") for tool in tools] if isinstance(tools, list) else []
        for at, function in enumerate(functions):
            if isinstance(function.get("name"), str):
                function["name"] += str(at)
                function["name"] = function["name"][-64:]
        chosen = _nested(body.get("tool_choice"), "function")
        if isinstance(chosen.get("name"), str) and functions:
            chosen["name"] = functions[0].get("name", chosen["name"])
    return body


def _nested(value: Any, name: str) -> dict[str, Any]:
    nested = value.get(name) if isinstance(value, dict) else None
    return nested if isinstance(nested, dict) else {}


def _simplify_schemas(value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _simplify_schemas(each)
    elif isinstance(value, dict):
        for name, own in value.items():
            if name in ("schema", "parameters") and isinstance(own, dict):
                value[name] = {"type": "object"} if own.get("type", "object") == "object" else own
            else:
                _simplify_schemas(own)


schemathesis.hook(filter_body)
schemathesis.hook(map_body)
