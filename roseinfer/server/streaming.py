"""Server-sent events, and work that ends when the client goes away."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from roseinfer.server.json_parts import encode_any, parts_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from starlette.types import Receive, Send

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""The last asks nginx not to wait for more."""
Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Return one event as it is sent."""
    lead = f"event: {name}\ndata: " if name else "data: "
    return b"".join((lead.encode(), *parts_of(data, encode_any), b"\n\n"))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what comes of the work, which is cancelled when the client goes away."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            raise ClientGone from None
        raise
    finally:
        watching.cancel()


async def send_events(
    receive: Receive,
    send: Send,
    events: AsyncGenerator[bytes, None],
    failed: Callable[[Exception], bytes],
) -> None:
    """Send a stream. An error that comes after its first event becomes its last, by ``failed``.

    Nothing is sent before the first event, so that an error before it still gets a status.
    """

    async def sending() -> None:
        begun = False
        async with aclosing(events):
            try:
                async for data in events:
                    if not begun:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                        )
                        begun = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not begun:
                    raise
                last = failed(error)
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    await unless_gone(receive, sending())
