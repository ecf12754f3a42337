"""The process that listens: a socket, signals, and an end in which texts that run may finish."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import uvicorn

from roseinfer.engine_client.standard_streams import exit_now
from roseinfer.errors import ConfigError
from roseinfer.progress import say
from roseinfer.server.connections import MOST_BACKLOG, Connection, Connections, Limits

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from starlette.types import ASGIApp

    from roseinfer.config import ServerConfig
    from roseinfer.server.auth import Admission

_LAST_WORDS_S = 5
"""So long a client may take to read what is left for it when no text runs any more."""
_LOOK_S = 0.05
"""How often one looks whether that is so."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address, so that no other server can have it.

    Who connects before there is anything to serve waits.
    """
    with ExitStack() as stack:
        try:
            kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            found = stack.enter_context(socket.socket(kind, socket.SOCK_STREAM))
            if os.name == "posix":
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(MOST_BACKLOG)  # two that only have an address may have the same
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"--host {host} --port {port} cannot be listened on: {why}") from None
        stack.pop_all()
        return found


def with_hosts(config: ServerConfig, listener: socket.socket) -> ServerConfig:
    """Return the settings with the host names that requests may name, where only loopback listens.

    No page of another site has these names, so no browser can be led here by one.
    """
    address = str(listener.getsockname()[0])
    if config.allowed_hosts or not ipaddress.ip_address(address).is_loopback:
        return config
    return replace(config, allowed_hosts=("localhost", "127.0.0.1", "::1", address, config.host))


class Served(Protocol):
    """What is behind an application that listens."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def admission(self) -> Admission: ...

    def cut(self) -> None:
        """End the texts that are left with an error."""


class HttpServer(uvicorn.Server):
    """Told to end once, it drains; told twice, it ends at once.

    While it drains it listens, so that who asks is told that it ends: a probe by ``/ready``, and
    a client by a refusal with which it may go elsewhere.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Served,
        listening: Callable[[], None] = lambda: None,
        limits: Limits | None = None,
    ) -> None:
        """``listening`` is called when clients can connect."""
        self._connections = Connections(limits or Limits())
        self._service = service
        self._listening = listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        proxies = service.config.trusted_proxies
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, self._connections),  # type: ignore[arg-type]
                ws="none",
                proxy_headers=bool(proxies),  # else uvicorn believes whoever is on this machine
                forwarded_allow_ips=list(proxies),
                backlog=self._connections.limits.backlog,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._listening()

    async def on_tick(self, counter: int) -> bool:
        """Look at connections once a second. uvicorn calls this ten times in one."""
        if counter % 10 == 0:
            self._connections.look(self.server_state.connections)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Take a signal. Those that uvicorn takes itself it raises again when it has ended."""
        if self._service.admission.draining:
            exit_now(128 + sig)
        self.end()

    def end(self) -> None:
        """Take no more requests, and end when those there are have ended."""
        self._service.admission.draining = True
        if self._loop is None:  # nothing listens yet, and nothing will
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for the texts, and stop listening when none is left.

        When the time is up the engine is closed: streams then end with an error that says so.
        """
        admission, seconds = self._service.admission, self._service.config.drain_seconds
        if admission.open:
            say(
                f"roseinfer serve: ending, once {admission.open} texts are done or {seconds:g} s "
                "are over"
            )
        try:
            async with asyncio.timeout(seconds):
                while admission.open:
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            await asyncio.to_thread(self._service.cut)
        self.should_exit = True
