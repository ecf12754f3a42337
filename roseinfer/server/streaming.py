"""Server-sent events, and work that ends when the client goes away."""

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


# JSON of answers, which is made and sent in parts: others have the loop's turn between them.


encode_any = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
encode_finite = JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""The same, but it raises for a number that JSON does not have."""
AT_ONCE = 256
"""Log-probabilities that are written between two turns of the loop: 1 or 2 ms."""
BYTES_AT_ONCE = 1 << 16
"""Bytes that are sent between two turns of the loop."""


@dataclass(frozen=True, slots=True)
class Json:
    """A value that is encoded already, in parts."""

    parts: Sequence[bytes]


def items(values: list[Any], encode: Encode) -> bytes:
    """Return the items of a list as JSON, without the brackets around them."""
    return encode(values)[1:-1].encode()


def list_of(*encoded: bytes | None) -> Json:
    """Return a list of such items."""
    parts = [b"["]
    for each in encoded:
        if each:
            parts += (b",", each) if len(parts) > 1 else (each,)
    return Json([*parts, b"]"])


def parts_of(value: Any, encode: Encode) -> Iterator[bytes]:
    """Yield the JSON of a value, in which may be values that are encoded already."""
    if isinstance(value, Json):
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
        yield from parts_of(each, encode)
        lead = b","
    yield ends[1:]


class Turns:
    """Counts log-probabilities, and lets others have the loop's turn after some of them."""

    def __init__(self) -> None:
        self._since = 0

    async def after(self, logprobs: int) -> None:
        self._since += logprobs
        if self._since >= AT_ONCE:
            self._since = 0
            await asyncio.sleep(0)


async def send_json(send: Send, parts: Iterable[bytes]) -> None:
    """Send an answer with status 200."""
    parts = [*parts]
    size = str(sum(map(len, parts))).encode()
    headers = [(b"content-length", size), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    held = bytearray()
    for part in parts:
        held += part
        if len(held) >= BYTES_AT_ONCE:
            await send({"type": "http.response.body", "body": bytes(held), "more_body": True})
            await asyncio.sleep(0)
            held.clear()
    await send({"type": "http.response.body", "body": bytes(held), "more_body": False})


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
