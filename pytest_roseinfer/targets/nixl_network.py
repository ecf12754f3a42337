"""Fake NIXL agents in one process, whose reads copy memory when the harness ends them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import contextmanager
from ctypes import memmove
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(slots=True)
class Descriptors:
    """Pieces of memory of one agent."""

    agent: Agent
    starts: np.ndarray
    lengths: np.ndarray
    """Bytes of each piece."""


@dataclass(slots=True)
class Read:
    """A read in flight, or one that has ended and was not released."""

    reader: Agent
    pieces: list[tuple[int, int, int]]
    """Address to write to, address to read from, and bytes of each piece."""
    source: Agent
    notification: bytes
    state: Literal["PROC", "DONE", "ERR"] = "PROC"


class Network:
    """Agents that read each other's memory, and their notifications."""

    socket: HandshakeSocket
    """Socket of the engine that answers handshakes."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.reads: dict[int, Read] = {}
        self.numbers = itertools.count(1)

    def agent(self, name: str, _config: object) -> Agent:
        self.agents[name] = Agent(self, name)
        return self.agents[name]

    def end(self, handle: int | str, part: int, whole: int, *, succeeds: bool) -> None:
        """Copy the first ``part`` of ``whole`` equal parts of a read, and let it succeed or fail.

        The source is notified of a read that succeeds.
        """
        assert isinstance(handle, int)
        read = self.reads[handle]
        for to, source, count in read.pieces[: len(read.pieces) * part // whole]:
            read.reader.refuse_unregistered(to, count)
            read.source.refuse_unregistered(source, count)
            memmove(to, source, count)
        read.state = "DONE" if succeeds else "ERR"
        if succeeds:
            read.source.notifications[read.reader.name].append(read.notification)

    def sources(self) -> set[str]:
        """Return the names of the requests that reads in flight read."""
        reads = [read for read in self.reads.values() if read.state == "PROC"]
        return {read.notification.decode().rpartition(":")[0] for read in reads}


class Agent:
    """The part of ``nixl_agent`` that vLLM's connector calls."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.registered: list[tuple[int, int]] = []
        """First address of each registered piece of memory, and the address after its last."""
        self.lists: dict[int, Descriptors] = {}
        self.notifications: defaultdict[str, list[bytes]] = defaultdict(list)

    # Memory

    def get_reg_descs(self, ranges: Sequence[tuple[int, int, int, str]], _kind: str) -> Any:
        return [(start, start + count) for start, count, *_ in ranges]

    def register_memory(self, ranges: Sequence[tuple[int, int]], backends: object = None) -> None:  # noqa: ARG002
        self.registered += ranges

    def refuse_unregistered(self, start: int, count: int) -> None:
        """Raise an error for a piece that is not in registered memory."""
        if not any(begin <= start and start + count <= end for begin, end in self.registered):
            raise ValueError(f"{count} bytes at {start:#x} are not registered by {self.name}")

    def prep_xfer_dlist(self, agent: str, rows: np.ndarray, mem_type: str) -> int:  # noqa: ARG002
        """Prepare rows of address, bytes, device, stride and count."""
        owner = self if agent == "NIXL_INIT_AGENT" else self.network.agents[agent]
        starts = [row[0] + np.arange(row[4]) * row[3] for row in rows.astype(np.int64)]
        lengths = np.repeat(rows[:, 1], rows[:, 4].astype(np.int64))
        handle = next(self.network.numbers)
        self.lists[handle] = Descriptors(owner, np.concatenate(starts), lengths)
        return handle

    def deregister_memory(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.registered = [each for each in self.registered if each not in ranges]

    def release_dlist_handle(self, handle: int) -> None:
        del self.lists[handle]

    # Other agents

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        """Forget nothing: agents are known to the network."""

    def check_remote_metadata(self, name: str) -> bool:
        return name in self.network.agents

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.network.agents[agent].notifications[self.name].append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        news, self.notifications = self.notifications, defaultdict(list)
        return news

    # Reads

    def make_prepped_xfer(
        self, kind: str, mine: int, ids: Any, theirs: int, remote_ids: Any, notif_msg: bytes = b""
    ) -> int:
        local, remote = self.lists[mine], self.lists[theirs]
        lengths = local.lengths[ids]
        if kind != "READ" or (lengths != remote.lengths[remote_ids]).any():
            raise ValueError(f"a {kind} whose pieces have other sizes than those of its source")
        columns = local.starts[ids], remote.starts[remote_ids], lengths
        pieces = list(zip(*(column.tolist() for column in columns), strict=True))
        handle = next(self.network.numbers)
        self.network.reads[handle] = Read(self, pieces, remote.agent, notif_msg)
        return handle

    def transfer(self, handle: int) -> None:
        """Begin a read, which ``Network.end`` ends."""

    def check_xfer_state(self, handle: int) -> str:
        return self.network.reads[handle].state

    def get_xfer_telemetry(self, handle: int) -> Any:
        pieces = self.network.reads[handle].pieces
        count = sum(piece[2] for piece in pieces)
        return SimpleNamespace(
            xferDuration=1, postDuration=1, totalBytes=count, descCount=len(pieces)
        )

    def release_xfer_handle(self, handle: int) -> None:
        del self.network.reads[handle]


# Handshakes: each is a message to the other side's scheduler, and its reply.


class HandshakeSocket:
    """Socket that is answered in the same process."""

    def __init__(self, answer: Callable[[bytes], list[bytes]]) -> None:
        self.answer = answer

    def setsockopt(self, *_: object) -> None:
        """Ignore time limits."""

    def send(self, message: bytes) -> None:
        self.message = message

    def recv_multipart(self) -> list[bytes]:
        return self.answer(self.message)

    @contextmanager
    def opened(self, *_: object) -> Iterator[HandshakeSocket]:
        yield self
