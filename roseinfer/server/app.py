"""The ASGI application: its routes, and what stands before them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roseinfer import __version__
from roseinfer.errors import RoseinferError
from roseinfer.server.access_log import AccessLog, note_error, write_line
from roseinfer.server.endpoints import Endpoint
from roseinfer.server.gatekeeper import Gatekeeper
from roseinfer.server.page import page
from roseinfer.server.refusals import Refused, refusal_of
from roseinfer.server.shapes.chat import ChatBody, ChatCompletion
from roseinfer.server.shapes.completions import Completion, CompletionBody
from roseinfer.server.shapes.openapi import openapi
from roseinfer.server.shapes.responses import ResponseAnswer, ResponseBody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from roseinfer.server.generation import Generation
    from roseinfer.server.service import Service


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
