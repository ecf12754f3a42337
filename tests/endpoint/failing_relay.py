"""A relay to a server that disappears for good, as when the server's process ends."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Relay:
    """Forwards bytes until ``fails`` is true of the numbers of open and accepted connections."""

    def __init__(self, port: int, fails: Callable[[int, int], bool]) -> None:
        self._port, self._fails = port, fails
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.num_accepted = 0
        self.failed = False
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self) -> None:
        """Stop listening and reset open connections."""
        with self._lock:
            self.failed = True
            for each in (self._listener, *self._open):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self.failed:
                client, _ = self._listener.accept()
                with self._lock:
                    self.num_accepted += 1
                    self._open.append(client)
                    fails = self._fails(len(self._open), self.num_accepted)
                if fails:
                    self.fail()
                    return
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as server:
            responses = threading.Thread(target=_forward, args=(server, client), daemon=True)
            responses.start()
            _forward(client, server)
            responses.join()
        with self._lock:
            if not self.failed:
                self._open.remove(client)
                client.close()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def relaying(port: int, fails: Callable[[int, int], bool]) -> Iterator[Relay]:
    relay = Relay(port, fails)
    try:
        yield relay
    finally:
        relay.fail()
