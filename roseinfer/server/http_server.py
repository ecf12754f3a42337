"""HTTP server process: listening socket, signals, and a graceful shutdown."""

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
from roseinfer.server.connections import MAX_BACKLOG, Connection, ConnectionLimits, Connections
from roseinfer.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from starlette.types import ASGIApp

    from roseinfer.config import ServerConfig
    from roseinfer.server.auth import Admission

_SHUTDOWN_GRACE_S = 5
"""Seconds for clients to read the rest of their responses once no completion runs."""
_DRAIN_POLL_S = 0.05
"""Seconds between two checks for open completions during the drain."""


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address, which no other server can take then.

    Clients that connect before the application runs wait.
    """
    with ExitStack() as stack:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MAX_BACKLOG)  # two sockets can be bound to one address, but not listen
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--host {host} --port {port}: cannot listen: {reason}") from None
        stack.pop_all()
        return listener


def with_loopback_hosts(config: ServerConfig, listener: socket.socket) -> ServerConfig:
    """Return the settings with loopback host names allowed, if the server listens on loopback only.

    Pages of other sites have none of these names, so DNS rebinding cannot reach the server.
    """
    address = str(listener.getsockname()[0])
    if config.allowed_hosts or not ipaddress.ip_address(address).is_loopback:
        return config
    return replace(config, allowed_hosts=("localhost", "127.0.0.1", "::1", address, config.host))


class DrainableService(Protocol):
    """Service that can be drained before its server ends."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def admission(self) -> Admission: ...

    def abort(self) -> None:
        """End the open completions with an error."""


class HttpServer(uvicorn.Server):
    """HTTP server that drains at the first signal, and exits at once at the second.

    While it drains it still listens: ``/ready`` fails, and further requests get an error that lets
    clients try another server.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: DrainableService,
        on_listening: Callable[[], None] = lambda: None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Prepare a server, which calls ``on_listening`` when clients can connect."""
        self._connections = Connections(limits or ConnectionLimits())
        self._service = service
        self._on_listening = on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None
        proxies = service.config.trusted_proxies
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, self._connections),  # type: ignore[arg-type]
                ws="none",
                proxy_headers=bool(proxies),  # else uvicorn trusts those of every local client
                forwarded_allow_ips=list(proxies),
                backlog=self._connections.limits.backlog,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Close expired connections once a second; uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            self._connections.close_expired(self.server_state.connections)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal; uvicorn raises those that it handles again after its end."""
        if self._service.admission.draining:
            exit_now(128 + sig)
        self.end()

    def end(self) -> None:
        """Refuse further requests, and end when the open ones have ended."""
        self._service.admission.draining = True
        if self._loop is None:  # nothing listens yet, and nothing will
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait until no completion is open, and stop listening.

        After ``drain_seconds`` the engine is closed: streams then end with an error that says so.
        """
        admission, seconds = self._service.admission, self._service.config.drain_seconds
        if admission.num_open:
            print_status(
                f"roseinfer serve: shutting down; waiting up to {seconds:g} s for "
                f"{admission.num_open} completions"
            )
        try:
            async with asyncio.timeout(seconds):
                while admission.num_open:
                    await asyncio.sleep(_DRAIN_POLL_S)
        except TimeoutError:
            await asyncio.to_thread(self._service.abort)
        self.should_exit = True
