"""Keeps the bodies that schemathesis makes within what no schema can say.

That is how long texts become, which schemas can be followed, what names functions have, and that
two names of one limit agree.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

LONGEST = 500
"""Characters of a body. What the template adds to each message counts too."""


def filter_body(_: Any, body: Any) -> bool:
    return len(json.dumps(body, default=str, ensure_ascii=False).encode(errors="replace")) < LONGEST


def map_body(_: Any, body: Any) -> Any:
    """Have every schema be one of an object, each name be its own, and both token limits equal."""
    if isinstance(body, dict):
        if isinstance(body.get("max_tokens"), int) and body.get("max_completion_tokens"):
            body["max_completion_tokens"] = body["max_tokens"]
        _take_schemas(body)
        tools = body.get("tools")
        functions = [_of(tool, "function") for tool in tools] if isinstance(tools, list) else []
        for at, function in enumerate(functions):
            if isinstance(function.get("name"), str):
                function["name"] += str(at)
                function["name"] = function["name"][-64:]
        chosen = _of(body.get("tool_choice"), "function")
        if isinstance(chosen.get("name"), str) and functions:
            chosen["name"] = functions[0].get("name", chosen["name"])
    return body


def _of(value: Any, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _take_schemas(value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _take_schemas(each)
    elif isinstance(value, dict):
        for name, own in value.items():
            if name in ("schema", "parameters") and isinstance(own, dict):
                value[name] = {"type": "object"} if own.get("type", "object") == "object" else own
            else:
                _take_schemas(own)


schemathesis.hook(filter_body)
schemathesis.hook(map_body)
