"""What the two processes tell each other: messages, each of them pickled with its length before."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from roseinfer.engine_process.any_process import Figures
    from roseinfer.guided.guide import Guide
    from roseinfer.sampling_params import SamplingParams

_HEAD = Struct("<Q")


@dataclass(frozen=True, slots=True)
class Add:
    """Have a prompt continued, as text number so and so."""

    number: int
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Leave:
    """Cancel texts."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class Taken:
    """So many updates of each text were read, beside those that were told before."""

    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class CheckGuide:
    """Say whether a guide can be followed, in the answer of that number."""

    number: int
    guide: Guide


Order = Add | Leave | Taken | CheckGuide
"""What the server tells the engine; a message has a list of them."""


class Pulse(NamedTuple):
    """How the engine's thread gets on."""

    rounds: int
    """Rounds of its loop, each with a step."""
    busy: bool
    """True if it has something to do. Texts that are paused, or wait for their guide, are not."""
    stopped: str | None
    """Reason why it serves nothing any more; None while it runs."""


class Report(NamedTuple):
    """What the engine tells the server."""

    parts: list[tuple[Any, ...]]
    """Each the number of a text, and a part of it that is packed."""
    figures: Figures | None
    """None where they have not changed."""
    pulse: Pulse
    answers: list[tuple[int, BaseException | None]]


def framed(what: object) -> bytes:
    data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def receive(link: socket.socket) -> Any:
    """Wait for a message, and raise ``EOFError`` where the other side has ended."""
    (size,) = _HEAD.unpack(_exactly(link, _HEAD.size))
    return pickle.loads(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


@dataclass(slots=True)
class Frames:
    """Messages out of bytes that come in any pieces."""

    _data: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are whole now."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            message = pickle.loads(self._data[_HEAD.size : end])
            del self._data[:end]
            yield message
