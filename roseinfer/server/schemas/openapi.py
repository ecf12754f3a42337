"""OpenAPI document of the server, generated from the classes of its request bodies."""

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
    "/v1/completions": (CompletionBody, "Complete prompts."),
    "/v1/chat/completions": (ChatBody, "Generate the assistant's next message."),
    "/v1/responses": (ResponseBody, "Generate a text response, in OpenAI's newer format."),
}
_GETS = {
    "/v1/models": "List the names of the model.",
    "/version": "Return the version of roseinfer.",
    "/health": "Check that the engine runs.",
    "/ready": "Check that requests are accepted.",
}
_ERRORS = {
    400: "A field of the body is invalid or not supported: `param` is its name.",
    401: "The API key is missing or wrong.",
    404: "Unknown model.",
    413: "The body is too large.",
    415: "The content type is not JSON.",
    429: "The queue is full: retry after the seconds in `Retry-After`.",
    500: "The generation failed.",
    503: "The server is shutting down, or its engine has stopped.",
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
    """Return the document of a server with these model names and vocabulary size."""
    models = [(kind, "validation") for kind, _ in _POSTS.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
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
            **{path: {"get": _get(path, summary)} for path, summary in _GETS.items()},
            **{path: {"post": _post(*post)} for path, post in _POSTS.items()},
        },
        "components": {
            "schemas": defined,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    responses = {"200": {"description": "Success.", "content": _OBJECT}}
    if path in ("/health", "/ready"):
        responses["503"] = {"description": "The check failed.", "content": _OBJECT}
    elif path != "/version":
        responses["401"] = _error(401)
    return {"summary": summary, "responses": responses}


def _post(kind: type, summary: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    responses = {str(status): _error(status) for status in _ERRORS}
    responses["200"] = {
        "description": "The response, complete or as a stream.",
        "content": _OBJECT | _EVENTS,
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": responses,
        "security": [{"key": []}, {}],
    }


def _error(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    content = {"application/json": {"schema": schema}}
    return {"description": _ERRORS[status], "content": content}
