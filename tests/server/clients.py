"""OpenAI's two clients, asked in one way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.served import Server

Asking = Callable[..., list[Any]]
"""Calls a method of a client, and returns its answer, or all that its stream sends."""


def _sync(server: Server, method: str, **asked: Any) -> list[Any]:
    with server.client() as client:
        call = attrgetter(method)(client)
        answer = call(**_named(call, asked))
        return [*answer] if asked.get("stream") else [answer]


def _async(server: Server, method: str, **asked: Any) -> list[Any]:
    async def ask() -> list[Any]:
        async with server.async_client() as client:
            call = attrgetter(method)(client)
            answer = await call(**_named(call, asked))
            return [each async for each in answer] if asked.get("stream") else [answer]

    return asyncio.run(ask())


def _named(call: Callable[..., Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return how a method is told of options. Those that it has no name for go into the body."""
    others = asked.keys() - signature(call).parameters.keys()
    own = {name: value for name, value in asked.items() if name not in others}
    return own | ({"extra_body": {name: asked[name] for name in others}} if others else {})


CLIENTS: tuple[Asking, ...] = (_sync, _async)
by_both_clients = pytest.mark.parametrize("asking", CLIENTS, ids=["sync", "async"])
