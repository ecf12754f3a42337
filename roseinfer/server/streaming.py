"""Responses as JSON or server-sent events, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from json import JSONEncoder
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence

    from starlette.types import Receive, Send

if TYPE_CHECKING:
    Encode = Callable[[Any], str]


# JSON responses, encoded and sent in parts: other tasks of the event loop run in between.


encode_any = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
encode_finite = JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""Encoder like ``encode_any``, which raises for NaN and infinity: JSON does not have them."""
LOGPROBS_PER_TURN = 256
"""Logprobs encoded before the task yields to the event loop: 1 or 2 ms."""
BYTES_PER_TURN = 1 << 16
"""Bytes sent before the task yields to the event loop."""


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """Value that is already encoded, in parts."""

    parts: Sequence[bytes]


def encode_items(values: list[Any], encode: Encode) -> bytes:
    """Return the items of a list as JSON, without the brackets around them."""
    return encode(values)[1:-1].encode()


def join_items(*encoded: bytes | None) -> EncodedJson:
    """Return the list of encoded items; None and empty ones are left out."""
    parts = [b"["]
    for each in encoded:
        if each:
            parts += (b",", each) if len(parts) > 1 else (each,)
    return EncodedJson([*parts, b"]"])


def iter_json(value: Any, encode: Encode) -> Iterator[bytes]:
    """Yield the JSON of a value, which may contain values that are already encoded."""
    if isinstance(value, EncodedJson):
        yield from value.parts
        return
    try:
        yield encode(value).encode()
    except TypeError:
        if isinstance(value, dict):
            ends, named = b"{}", [(f"{encode(name)}:".encode(), value[name]) for name in value]
        elif isinstance(value, list):
            ends, named = b"[]", [(b"", each) for each in value]
        else:
            raise
    else:
        return
    lead = ends[:1]
    for name, each in named:
        yield lead + name
        yield from iter_json(each, encode)
        lead = b","
    yield ends[1:]


class LoopYielder:
    """Yields to the event loop after every ``LOGPROBS_PER_TURN`` logprobs."""

    def __init__(self) -> None:
        self._since = 0

    async def after(self, logprobs: int) -> None:
        self._since += logprobs
        if self._since >= LOGPROBS_PER_TURN:
            self._since = 0
            await asyncio.sleep(0)


async def send_json(send: Send, parts: Iterable[bytes]) -> None:
    """Send a JSON response with status 200."""
    parts = [*parts]
    size = str(sum(map(len, parts))).encode()
    headers = [(b"content-length", size), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    buffer = bytearray()
    for part in parts:
        buffer += part
        if len(buffer) >= BYTES_PER_TURN:
            await send({"type": "http.response.body", "body": bytes(buffer), "more_body": True})
            await asyncio.sleep(0)
            buffer.clear()
    await send({"type": "http.response.body", "body": bytes(buffer), "more_body": False})


DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""Headers of a stream. The last one disables buffering in nginx."""
Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """Client disconnected before the end of its response."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    lead = f"event: {name}\ndata: " if name else "data: "
    return b"".join((lead.encode(), *iter_json(data, encode_any), b"\n\n"))


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of the work, or cancel it when the client disconnects."""
    task = asyncio.current_task()
    assert task is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected and not task.uncancel():
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


async def send_events(
    receive: Receive,
    send: Send,
    events: AsyncGenerator[bytes, None],
    error_events: Callable[[Exception], bytes],
) -> None:
    """Send a stream of events; a later error ends it with ``error_events``.

    Nothing is sent before the first event, so that an error before it can still set the status.
    """

    async def sending() -> None:
        started = False
        async with aclosing(events):
            try:
                async for data in events:
                    if not started:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                        )
                        started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not started:
                    raise
                last = error_events(error)
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    await cancel_on_disconnect(receive, sending())
