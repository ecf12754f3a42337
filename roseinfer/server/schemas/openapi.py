"""What the server offers, as an OpenAPI document made of the kinds of bodies that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from roseinfer import __version__
from roseinfer.server.schemas.chat import ChatBody
from roseinfer.server.schemas.completions import CompletionBody
from roseinfer.server.schemas.responses import ResponseBody

if TYPE_CHECKING:
    from collections.abc import Sequence

_POSTS = {
    "/v1/completions": (CompletionBody, "Continue prompts."),
    "/v1/chat/completions": (ChatBody, "Say what an assistant says next."),
    "/v1/responses": (ResponseBody, "The same in the newer form, for texts."),
}
_GETS = {
    "/v1/models": "The names that the model has here.",
    "/version": "The version of roseinfer.",
    "/health": "Whether the engine runs.",
    "/ready": "Whether requests are taken.",
}
_ERRORS = {
    400: "Something in the body is wrong, or not supported: `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "The queue is full: `Retry-After` says when to come again.",
    500: "The text could not be generated.",
    503: "The server is about to end, or its engine has stopped.",
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_EVENTS: dict[str, Any] = {"text/event-stream": {}}


def openapi(names: Sequence[str], vocabulary: int) -> dict[str, Any]:
    """Return the document of a server whose model has these names and so many tokens."""
    kinds = [(kind, "validation") for kind, _ in _POSTS.values()]
    _, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    defined: dict[str, Any] = {**schemas["$defs"], "Error": _ERROR}
    for kind, _ in _POSTS.values():
        defined[kind.__name__]["properties"]["model"]["enum"] = list(names)
    ids = {"type": "integer", "minimum": 0, "maximum": vocabulary - 1}
    prompts = defined["CompletionBody"]["properties"]["prompt"]["anyOf"]
    prompts[2]["items"] = prompts[3]["items"]["items"] = ids
    return {
        "openapi": "3.1.0",
        "info": {"title": "roseinfer", "version": __version__},
        "paths": {
            **{path: {"get": _get(path, what)} for path, what in _GETS.items()},
            **{path: {"post": _post(*post)} for path, post in _POSTS.items()},
        },
        "components": {
            "schemas": defined,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(path: str, what: str) -> dict[str, Any]:
    answers = {"200": {"description": "It is so.", "content": _OBJECT}}
    if path in ("/health", "/ready"):
        answers["503"] = {"description": "It is not so.", "content": _OBJECT}
    elif path != "/version":
        answers["401"] = _error(401)
    return {"summary": what, "responses": answers}


def _post(kind: type, what: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    answers = {str(status): _error(status) for status in _ERRORS}
    answers["200"] = {"description": "The answer, or a stream of it.", "content": _OBJECT | _EVENTS}
    return {
        "summary": what,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": answers,
        "security": [{"key": []}, {}],
    }


def _error(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    content = {"application/json": {"schema": schema}}
    return {"description": _ERRORS[status], "content": content}
