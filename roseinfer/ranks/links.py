"""The leader's links to the other ranks, and a thread that notices when one of them has ended."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from roseinfer.errors import RanksFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from subprocess import Popen

_REPLY_S = 60.0
_GLANCE_S = 1.0
"""A step that breaks off since a rank has ended may be so much earlier than the news of that."""


class Links:
    """Sends to all other ranks alike, and takes what they answer.

    The thread knows nothing of tensors and of those who move them, so it may outlive them.
    """

    def __init__(self, links: Sequence[Connection], started: Sequence[Popen[bytes]]) -> None:
        """``links[i]`` leads to rank ``i + 1``, and ``started`` are those that are our children."""
        self._links = list(links)
        self.started = started
        self._process = os.getpid()
        self._closed = False
        self._failure: RanksFailed | None = None
        self._ended = threading.Event()
        """Set when it is known why the ranks cannot go on."""
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self.on_failure: list[Callable[[], None]] = []
        """Called when the ranks cannot go on, each in a thread of its own: some wait for long."""
        threading.Thread(target=self._watch, name="roseinfer ranks", daemon=True).start()

    def send(self, what: object) -> None:
        self.require()
        message = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        try:
            for link in self._links:
                link.send_bytes(message)
        except OSError as error:
            raise self.break_off(error) from error

    def replies(self) -> list[Any]:
        """Wait for an answer of every rank, and return them in any order."""
        try:
            return [self._replies.get(timeout=_REPLY_S) for _ in self._links]
        except Empty:
            self.require()
            raise RanksFailed(f"a rank gave no answer for {_REPLY_S:.0f} s") from None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def require(self) -> None:
        """Raise if the ranks cannot go on."""
        if self._failure is not None:
            raise RanksFailed(str(self._failure)) from self._failure.__cause__

    def break_off(self, error: BaseException) -> RanksFailed:
        """Return why the ranks cannot go on after a step that broke off.

        Nobody knows how far the others came, and what belongs to two steps would be added up.
        """
        if not self._ended.wait(_GLANCE_S):  # else that a rank has ended is why
            self._fail(RanksFailed("a step broke off", error))
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """Let the other ranks end. This waits for nothing, so that a finaliser may call it."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        for link in self._links:
            with suppress(OSError):  # it has ended already
                link.send_bytes(pickle.dumps(None))

    def _fail(self, failure: RanksFailed) -> None:
        self._failure = self._failure or failure
        self._ended.set()
        for call in self.on_failure:
            threading.Thread(target=call, name="roseinfer ranks end", daemon=True).start()

    def _watch(self) -> None:
        at = 0
        try:
            while True:
                for link in wait(self._links):
                    at = self._links.index(link)  # type: ignore[arg-type]
                    self._take(at)
        except (OSError, EOFError):
            if not self._closed:
                for process in self.started:  # they may wait for the one that is gone
                    process.kill()
                self._fail(RanksFailed(f"rank {at + 1} has ended"))
        for process in self.started:
            process.wait()

    def _take(self, at: int) -> None:
        answer = pickle.loads(self._links[at].recv_bytes())
        if isinstance(answer, BaseException):
            self._fail(RanksFailed(f"rank {at + 1} broke down: {answer}"))
        else:
            self._replies.put(answer)
