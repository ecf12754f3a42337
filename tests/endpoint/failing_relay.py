"""A relay to a server that goes away for good, as a server does whose process ends."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Relay:
    """Passes bytes on until ``falls`` says so of how many connections are open and were made."""

    def __init__(self, port: int, falls: Callable[[int, int], bool]) -> None:
        self._to, self._falls = port, falls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.made = 0
        self.fallen = False
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def fall(self) -> None:
        """Listen no more and reset what is open."""
        with self._lock:
            self.fallen = True
            for each in (self._listener, *self._open):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self.fallen:
                client, _ = self._listener.accept()
                with self._lock:
                    self.made += 1
                    self._open.append(client)
                    falls = self._falls(len(self._open), self.made)
                if falls:
                    self.fall()
                    return
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as server:
            back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
            back.start()
            _pass_on(client, server)
            back.join()
        with self._lock:
            if not self.fallen:
                self._open.remove(client)
                client.close()


def _pass_on(source: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)
    with suppress(OSError):
        to.shutdown(socket.SHUT_RDWR)


@contextmanager
def relaying(port: int, falls: Callable[[int, int], bool]) -> Iterator[Relay]:
    relay = Relay(port, falls)
    try:
        yield relay
    finally:
        relay.fall()
