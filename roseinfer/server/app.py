"""ASGI application: routes, middleware and the page at ``/``."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Generic, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from roseinfer import __version__
from roseinfer.errors import RoseinferError
from roseinfer.server.access_log import AccessLog, log_entry_of, log_error, write_line
from roseinfer.server.api_errors import ApiError, to_api_error
from roseinfer.server.auth import AuthMiddleware
from roseinfer.server.schemas.chat import ChatBody, ChatCompletion
from roseinfer.server.schemas.completions import Completion, CompletionBody
from roseinfer.server.schemas.openapi import openapi
from roseinfer.server.schemas.responses import ResponseBody, ResponseObject
from roseinfer.server.schemas.validation import BodyType, read_body
from roseinfer.server.streaming import cancel_on_disconnect, send_events, send_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from roseinfer.server.generation import Generation
    from roseinfer.server.service import Service

# Endpoints that generate: responses are complete JSON or streams of events.


class ApiResponse(Protocol):
    """Response made from a generation: complete, or as a stream."""

    async def json_parts(self) -> list[bytes]:
        """Return the complete response as JSON, in parts."""

    def events(self) -> AsyncGenerator[bytes, None]: ...

    def error_events(self, error: Exception) -> bytes:
        """Return the last events of a stream that fails."""


class Endpoint(Generic[BodyType]):
    """Endpoint defined by its body class and the function that makes responses of generations."""

    def __init__(
        self,
        service: Service,
        kind: type[BodyType],
        answer: Callable[[BodyType, Generation], Awaitable[ApiResponse]],
    ) -> None:
        self._service = service
        self._body_type = kind
        self._new_response = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_at = time.perf_counter()
        body = read_body(self._body_type, await _read_json_body(Request(scope, receive)))
        service = self._service
        service.require_model(body.model)
        with service.admission.admit(body.num_completions):
            response = await cancel_on_disconnect(receive, self._begin(scope, body, received_at))
            if body.stream:

                def error_events(error: Exception) -> bytes:
                    log_error(scope, error)
                    return response.error_events(error)

                await send_events(receive, send, response.events(), error_events)
            else:
                await cancel_on_disconnect(receive, _send_complete(send, response))

    async def _begin(self, scope: Scope, body: BodyType, received_at: float) -> ApiResponse:
        """Encode the prompts, and return the response of their generation."""
        guide = await self._service.prepare_guide(body)
        prompts = await body.encode_prompts(self._service.prompts)
        generation = self._service.generation(body, prompts, guide, received_at)
        log_entry_of(scope).usage = generation.usage
        return await self._new_response(body, generation)


async def _send_complete(send: Send, response: ApiResponse) -> None:
    await send_json(send, await response.json_parts())


async def _read_json_body(request: Request) -> bytes:
    """Return the body; require JSON, which no cross-site page can make a browser send here."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = "the body must be JSON; send the header Content-Type: application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    return await request.body()


# The page at ``/``: generates from a typed prompt, and shows the use of the KV cache.


_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@cache
def _page_source() -> str:
    return files("roseinfer.server").joinpath("page.html").read_text(encoding="utf-8")


async def page(service: Service, _: Request) -> Response:
    settings = {
        "model": service.names[0],
        "chat": service.prompts.can_chat,
        "key": service.config.api_key is not None,
    }
    encoded = json.dumps(settings).replace("<", "\\u003c")
    return HTMLResponse(_page_source().replace("{{server}}", encoded), headers=_HEADERS)


_ROUTING_ERROR_MESSAGES = {
    404: "unknown path; GET /openapi.json lists the paths of this server",
    405: "method not allowed for this path; GET /openapi.json lists the methods",
}


def build_app(service: Service, write: Callable[[str], None] = write_line) -> Starlette:
    """Build the application of a service. ``write`` writes a line of the access log."""
    config = service.config
    app = Starlette(
        routes=_routes(service),
        middleware=[
            Middleware(AccessLog, write if config.access_log else None, service.http_counts),
            Middleware(AuthMiddleware, config),
        ],
        exception_handlers={
            ApiError: handle_api_error,
            HTTPException: handle_api_error,
            RoseinferError: handle_api_error,
        },
        lifespan=partial(_lifespan, service),
    )
    app.router.redirect_slashes = False  # a redirect would go to whatever host a client names
    return app


@asynccontextmanager
async def _lifespan(service: Service, _: Starlette) -> AsyncIterator[None]:
    await service.engine_client.open()
    yield
    await asyncio.to_thread(service.close)


def _routes(service: Service) -> list[Route]:
    get_routes = {
        "/": page,
        "/health": _health,
        "/ready": _ready,
        "/version": _version,
        "/metrics": _metrics,
        "/openapi.json": _openapi,
        "/v1/models": _models,
        "/v1/models/{name:path}": _model,
    }

    async def completion(body: CompletionBody, generation: Generation) -> Completion:
        echoed = await body.echoed_prompts(service.prompts)
        return Completion(body, generation, service.token_texts, echoed)

    async def chat(body: ChatBody, generation: Generation) -> ChatCompletion:
        return ChatCompletion(body, generation, service.token_texts)

    async def response(body: ResponseBody, generation: Generation) -> ResponseObject:
        return ResponseObject(body, generation)

    post_routes: dict[str, ASGIApp] = {
        "/v1/completions": Endpoint(service, CompletionBody, completion),
        "/v1/chat/completions": Endpoint(service, ChatBody, chat),
        "/v1/responses": Endpoint(service, ResponseBody, response),
    }
    return [  # the first match wins
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in post_routes.items()),
        *(
            Route(path, partial(handler, service), methods=["GET"])
            for path, handler in get_routes.items()
        ),
    ]


async def handle_api_error(request: Request, error: Exception) -> Response:
    api_error = to_api_error(error)
    if api_error.status >= 500:
        log_error(request.scope, error)
    if isinstance(error, HTTPException):  # Starlette's message is only the name of the status
        message = _ROUTING_ERROR_MESSAGES.get(api_error.status, str(api_error))
        if api_error.status == 404 and request.scope["path"].endswith("/"):
            message += "; none of them ends with a slash"
        api_error = ApiError(api_error.status, message, headers=api_error.headers)
    return api_error.response()


async def _health(service: Service, _: Request) -> Response:
    """Report liveness: once the engine has stopped, only a restart of the server helps."""
    return _probe_response("alive", service.stopped_reason)


async def _ready(service: Service, _: Request) -> Response:
    """Report readiness: status 200 while requests are accepted, else 503."""
    return _probe_response("ready", service.unready)


def _probe_response(name: str, why_not: str | None) -> Response:
    if why_not is None:
        return JSONResponse({name: True})
    return JSONResponse({name: False, "reason": why_not}, 503)


async def _version(_: Service, __: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _metrics(service: Service, _: Request) -> Response:
    metrics_page = service.metrics_page
    return Response(metrics_page.text(), media_type=metrics_page.media_type)


async def _openapi(service: Service, _: Request) -> Response:
    return JSONResponse(openapi(service.names, service.vocabulary))


async def _models(service: Service, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": service.models()})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.require_model(name)
    return JSONResponse(next(each for each in service.models() if each["id"] == name))
