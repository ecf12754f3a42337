"""The ASGI application: its routes, and what stands before them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Generic, Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from roseinfer import __version__
from roseinfer.errors import RoseinferError
from roseinfer.server.access_log import AccessLog, note_error, noted, write_line
from roseinfer.server.auth import Gatekeeper
from roseinfer.server.refusals import Refused, refusal_of
from roseinfer.server.schemas.chat import ChatBody, ChatCompletion
from roseinfer.server.schemas.completions import Completion, CompletionBody
from roseinfer.server.schemas.openapi import openapi
from roseinfer.server.schemas.responses import ResponseAnswer, ResponseBody
from roseinfer.server.schemas.validation import BodyType, read_body
from roseinfer.server.streaming import send_events, send_json, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from roseinfer.server.generation import Generation
    from roseinfer.server.service import Service

# The endpoints that generate: a body comes in, and an answer goes out, whole or as a stream.


class Answer(Protocol):
    """What is told of a generation."""

    async def whole(self) -> list[bytes]:
        """Return all of it as JSON, in parts."""

    def events(self) -> AsyncGenerator[bytes, None]: ...

    def failed(self, error: Exception) -> bytes:
        """Return the last events of a stream that breaks off."""


class Endpoint(Generic[BodyType]):
    """An endpoint, by the kind of its body and what makes answers of generations."""

    def __init__(
        self,
        service: Service,
        kind: type[BodyType],
        answer: Callable[[BodyType, Generation], Awaitable[Answer]],
    ) -> None:
        self._service = service
        self._kind = kind
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        body = read_body(self._kind, await _json_of(Request(scope, receive)))
        service = self._service
        service.require_model(body.model)
        with service.admission.admit(body.num_texts):
            answer = await unless_gone(receive, self._begin(scope, body, began))
            if body.stream:

                def failed(error: Exception) -> bytes:
                    note_error(scope, error)
                    return answer.failed(error)

                await send_events(receive, send, answer.events(), failed)
            else:
                await unless_gone(receive, _send_whole(send, answer))

    async def _begin(self, scope: Scope, body: BodyType, began: float) -> Answer:
        """Read the prompts, and return what will be told of their texts."""
        guide = await self._service.guide_of(body)
        prompts = await body.prompts(self._service.prompts)
        generation = self._service.generation(body, prompts, guide, began)
        noted(scope).usage = generation.usage
        return await self._answer(body, generation)


async def _send_whole(send: Send, answer: Answer) -> None:
    await send_json(send, await answer.whole())


async def _json_of(request: Request) -> bytes:
    """Return the body. A page of another site can have a browser send anything but JSON here."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        why = "the body must be JSON, and say so: content-type: application/json"
        raise Refused(415, why, code="unsupported_media_type")
    return await request.body()


# The page at ``/``: one types a prompt, and watches tokens come and the cache fill.


_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@cache
def _source() -> str:
    return files("roseinfer.server").joinpath("page.html").read_text(encoding="utf-8")


async def page(service: Service, _: Request) -> Response:
    known = {
        "model": service.names[0],
        "chat": service.prompts.can_chat,
        "key": service.config.api_key is not None,
    }
    said = json.dumps(known).replace("<", "\\u003c")
    return HTMLResponse(_source().replace("{{server}}", said), headers=_HEADERS)


_WHY = {
    404: "there is nothing at this path: GET /openapi.json says what there is",
    405: "this path takes another method",
}


def application(service: Service, write: Callable[[str], None] = write_line) -> Starlette:
    """Return what a server runs. ``write`` takes the lines of the access log."""
    config = service.config
    app = Starlette(
        routes=_routes(service),
        middleware=[
            Middleware(AccessLog, write if config.access_log else None, service.http_counts),
            Middleware(Gatekeeper, config),
        ],
        exception_handlers={Refused: refuse, HTTPException: refuse, RoseinferError: refuse},
        lifespan=partial(_serving, service),
    )
    app.router.redirect_slashes = False  # a redirect would go to whatever host a client names
    return app


@asynccontextmanager
async def _serving(service: Service, _: Starlette) -> AsyncIterator[None]:
    await service.served.open()
    yield
    await asyncio.to_thread(service.close)


def _routes(service: Service) -> list[Route]:
    looks = {
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
        echoed = await body.echoed(service.prompts)
        return Completion(body, generation, service.token_texts, echoed)

    async def chat(body: ChatBody, generation: Generation) -> ChatCompletion:
        return ChatCompletion(body, generation, service.token_texts)

    async def response(body: ResponseBody, generation: Generation) -> ResponseAnswer:
        return ResponseAnswer(body, generation)

    asks: dict[str, ASGIApp] = {
        "/v1/completions": Endpoint(service, CompletionBody, completion),
        "/v1/chat/completions": Endpoint(service, ChatBody, chat),
        "/v1/responses": Endpoint(service, ResponseBody, response),
    }
    return [  # the first that fits is taken
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in asks.items()),
        *(Route(path, partial(look, service), methods=["GET"]) for path, look in looks.items()),
    ]


async def refuse(request: Request, error: Exception) -> Response:
    refused = refusal_of(error)
    if refused.status >= 500:
        note_error(request.scope, error)
    if isinstance(error, HTTPException):  # Starlette's words are those of the status alone
        why = _WHY.get(refused.status, str(refused))
        if refused.status == 404 and request.scope["path"].endswith("/"):
            why += ", and no path ends with a slash"
        refused = Refused(refused.status, why, headers=refused.headers)
    return refused.response()


async def _health(service: Service, _: Request) -> Response:
    """Say whether the engine runs: where it has stopped, only a new server helps."""
    return _state("alive", service.dead)


async def _ready(service: Service, _: Request) -> Response:
    """Say whether requests are taken."""
    return _state("ready", service.unready)


def _state(name: str, why_not: str | None) -> Response:
    if why_not is None:
        return JSONResponse({name: True})
    return JSONResponse({name: False, "reason": why_not}, 503)


async def _version(_: Service, __: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _metrics(service: Service, _: Request) -> Response:
    return Response(service.metrics_page.text(), media_type=CONTENT_TYPE_LATEST)


async def _openapi(service: Service, _: Request) -> Response:
    return JSONResponse(openapi(service.names, service.vocabulary))


async def _models(service: Service, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": service.models()})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.require_model(name)
    return JSONResponse(next(each for each in service.models() if each["id"] == name))
