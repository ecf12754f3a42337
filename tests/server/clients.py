"""OpenAI's sync and async clients behind one signature."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.served import Server

Call = Callable[..., list[Any]]
"""Calls a method of a client, and returns its response, or all chunks of its stream."""


def _call_sync(server: Server, method: str, **options: Any) -> list[Any]:
    with server.client() as client:
        call = attrgetter(method)(client)
        answer = call(**_arguments(call, options))
        return [*answer] if options.get("stream") else [answer]


def _call_async(server: Server, method: str, **options: Any) -> list[Any]:
    async def call_client() -> list[Any]:
        async with server.async_client() as client:
            call = attrgetter(method)(client)
            answer = await call(**_arguments(call, options))
            return [each async for each in answer] if options.get("stream") else [answer]

    return asyncio.run(call_client())


def _arguments(call: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Split options into arguments of the method and fields of ``extra_body``."""
    others = options.keys() - signature(call).parameters.keys()
    named = {name: value for name, value in options.items() if name not in others}
    return named | ({"extra_body": {name: options[name] for name in others}} if others else {})


CLIENTS: tuple[Call, ...] = (_call_sync, _call_async)
both_clients = pytest.mark.parametrize("call_api", CLIENTS, ids=["sync", "async"])
