"""The endpoints that generate: a body comes in, and an answer goes out, whole or as a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, Protocol

from starlette.requests import Request

from roseinfer.server.access_log import note_error, noted
from roseinfer.server.json_parts import send_json
from roseinfer.server.refusals import Refused
from roseinfer.server.shapes.bodies import BodyType, read_body
from roseinfer.server.streaming import send_events, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from roseinfer.server.generation import Generation
    from roseinfer.server.service import Service


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
