"""The queue of a simulated device, which does its work later, and steps that say when."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, Observer, optional
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch


class QueueMethods:
    """The method that takes a simulated device."""

    gather_in_flight: ClassVar[bool] = False
    """Where the cache has a queue: ``gather`` may be called while the device has not done what it
    was asked for. It waits for what it returns, or returns tensors of the device's."""

    @optional
    def use_queue(self, queue: DeviceQueue) -> None:
        """Have this simulated device do, called after ``make``, what a GPU would do.

        Either submit calls to it, or name the tensors whose operations it is to hold back. It does
        them later: when it is waited for, or when the history says so. A block's number, a length,
        a count are known at once, so ``table``, ``ledger`` and the like are asked at any time;
        ``peek`` and ``gather`` are called when the device has done all, but for
        ``gather_in_flight``. Tensors that are handed over are the device's, and are overwritten on
        its first stream, behind what was submitted there.
        """


class Event:
    """A mark behind what a stream was asked for so far; methods are named as torch's."""

    def __init__(self) -> None:
        self._reached: Callable[[], bool] | None = None
        self._reach: Callable[[], None] | None = None

    def record(self, stream: Stream) -> None:
        """Move the mark behind all that ``stream`` was asked for by now."""
        asked = stream.asked
        self._reached = lambda: stream.done >= asked
        self._reach = partial(stream.run_to, asked)

    def query(self) -> bool:
        """Return True if the device is there, as for an event that was never recorded."""
        return self._reached is None or self._reached()

    def synchronize(self) -> None:
        """Wait until the device is there."""
        if self._reach:
            self._reach()

    @property
    def wait_on_device(self) -> Callable[[], None]:
        """What another stream does to wait, for the mark as it stands now."""
        return self._reach or (lambda: None)


class Stream:
    """Calls that run in the order in which they were submitted; methods are named as torch's."""

    def __init__(self) -> None:
        self.asked = 0
        """How many calls were submitted."""
        self.done = 0
        """How many of them have run, or begun to."""
        self._calls: deque[Callable[[], object]] = deque()
        self.running = False

    def submit(self, call: Callable[[], object]) -> None:
        """Have the device make this call when it gets there."""
        self._calls.append(call)
        self.asked += 1

    def record_event(self) -> Event:
        """Return a mark behind what was submitted so far."""
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is submitted next run only when ``event`` is reached; the host does not wait."""
        self.submit(event.wait_on_device)

    def synchronize(self) -> None:
        """Wait until all has run."""
        self.run_to(self.asked)

    def query(self) -> bool:
        """Return True if all has run."""
        return not self._calls

    def run_to(self, asked: int) -> None:
        """Run the first ``asked`` of all calls that were ever submitted, as far as they have not.

        A call that waits for another stream has that one run as far as it must.
        """
        was_running, self.running = self.running, True
        try:
            while self.done < asked:
                self.done += 1
                self._calls.popleft()()
        finally:
            self.running = was_running


class DeviceQueue(Stream):
    """The stream that a cache is given, and what belongs to the same device.

    A cache submits calls, or has torch do it: while the cache is driven, operations on tensors
    that it names with ``on_device`` are held back (``capabilities/device_queue.py`` says how).
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = [self]
        self.current: Stream = self
        """The stream that torch's operations go to."""
        self._on_device: dict[int, object] = {}
        self._pinned: dict[int, object] = {}

    def new_stream(self) -> Stream:
        """Make a stream that runs beside this one, in no order but that which events give."""
        stream = Stream()
        self.streams.append(stream)
        return stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Have torch's operations go to another stream, as in ``torch.cuda.stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def on_device(self, *tensors: torch.Tensor) -> None:
        """Take the memory of these tensors for the device's."""
        self._on_device.update(map(_memory, tensors))

    def pinned(self, *tensors: torch.Tensor) -> None:
        """Take the memory of these tensors for pinned, so that copies from it may read it late."""
        self._pinned.update(map(_memory, tensors))

    @property
    def has_memory(self) -> bool:
        """True once a tensor was named that is the device's."""
        return bool(self._on_device)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor)[0] in self._on_device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor)[0] in self._pinned

    @property
    def busy(self) -> bool:
        """True while a call runs."""
        return any(stream.running for stream in self.streams)

    @property
    def in_flight(self) -> int:
        """How many calls of all streams have not run."""
        return sum(stream.asked - stream.done for stream in self.streams)

    def run(self, count: int, stream: int = 0) -> None:
        """Run the next ``count`` calls of a stream, or all that there are."""
        chosen = self.streams[stream % len(self.streams)]
        chosen.run_to(min(chosen.asked, chosen.done + count))

    def finish(self) -> None:
        """Wait until every stream has run all; which comes first, nobody may rely on."""
        first = self.asked % len(self.streams)
        for stream in [*self.streams[first:], *self.streams[:first]]:
            stream.synchronize()


def _memory(tensor: torch.Tensor) -> tuple[int, object]:
    """Return a number for the memory of a tensor, and what keeps others from getting it."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


_MOST = 8
"""Calls at a time; more follow from one step after the other."""


@operation.register("RunQueued")
class RunQueued(operation.Operation):
    """Let the device make some of the calls that it was asked for."""

    count: int
    stream: int = 0
    """Counts round: of a cache with one stream, every number is that one."""

    needs = frozenset({"use_queue"})

    def words(self) -> str:
        calls = some(self.count, "call")
        return f"the device makes the next {calls} of stream {self.stream}"

    def drive(self, cache: operation.Driven) -> None:
        cache.device.run(self.count, self.stream)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> RunQueued:
            return cls(writer.between(1, _MOST), writer.pick((0, 1)))

        if writer.oracle.lives or writer.oracle.sequences:
            yield operation.Move(111, 3, drawn)


@operation.register("Read")
class Read(operation.Operation):
    """Read what is stored, whatever the device has not done yet.

    What the cache promises to wait for by itself is read first, then the device finishes, and
    everything is looked at.
    """

    needs = frozenset({"use_queue"})
    looks = True

    def words(self) -> str:
        return "read everything"

    def drive(self, cache: operation.Driven) -> None:
        """The machine looks at the cache."""

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.live:
            yield operation.Move(120, 1, cls)


class CallsInFlight(Observer):
    """Counts the steps that begin while the device has something to do."""

    any_of = ("use_queue",)
    conditions = ("calls_in_flight",)

    def before(self, step: operation.Operation) -> Mapping[str, int]:  # noqa: ARG002
        return {} if self.run.driven.device.idle else {"calls_in_flight": 1}


DEVICE_QUEUE = Capability(
    methods=QueueMethods,
    operations=(
        RunQueued,
        Read,
    ),
    observers=(CallsInFlight,),
)
