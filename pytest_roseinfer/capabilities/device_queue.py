"""The queue of a simulated device, which does its work later, and steps that say when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Look,
    Observer,
    Prelude,
    Run,
    Setup,
    View,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.reading import Reads, read
from pytest_roseinfer.capabilities.writes import Append, start
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.simulated_device import DeviceQueue


class QueueMethods:
    """The method that takes a simulated device."""

    gather_in_flight: ClassVar[bool] = False
    """True if ``gather`` may be called while the queue has calls in flight, since it waits for what
    it returns, or returns tensors of the device's."""

    @optional
    def use_queue(self, queue: DeviceQueue) -> None:
        """Use this simulated device for the work of a GPU; it is called right after ``make``.

        Either submit calls to it, or name the tensors whose operations it is to hold back.
        """


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
    conditions: ClassVar = {
        "calls_in_flight": "A step begins while the device has calls to make. Required of a cache "
        "that defines ``use_queue``."
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.early: Reads = {}
        """Reads of this step that the cache had to wait for."""

    def driving(self, step: operation.Operation, said: Sequence[operation.Said]) -> None:  # noqa: ARG002
        reads = step.looks and self.run.adapter.gather_in_flight
        routes = ["gather"] if reads and "gather" in self.run.can else []
        self.early = read(self.run, lambda _: routes, " with calls in flight")

    def before(self, step: operation.Operation) -> Mapping[str, int]:  # noqa: ARG002
        return {} if self.run.driven.device.idle else {"calls_in_flight": 1}


def _take_queue(run: Run) -> None:
    from pytest_roseinfer.capabilities.simulated_device import QueuedDevice

    run.driven.device = QueuedDevice(run.adapter, Read())


def _show_early_reads(run: Run, look: Look) -> Mapping[str, Any]:
    observer = run.observer(CallsInFlight)
    return {"reads": observer.early} if observer and look.reads else {}


def free_in_flight(writer: operation.Writer) -> None:
    """Open with a sequence that is freed while the device writes to it, or with none."""
    written = writer.pick((0, 1, 2))
    if written and "free" in writer.adapter.abilities:
        (seq,) = writer.fresh(1)
        for _ in range(written):
            writer.take(Append((seq,), writer.layout()))
        writer.take(Free(seq))
        start(writer, writer.pick((1, writer.oracle.block_size)))


DEVICE_QUEUE = Capability(
    methods=QueueMethods,
    preludes=(Prelude(("use_queue",), 20, free_in_flight),),
    setups=(Setup(("use_queue",), _take_queue),),
    views=(View(("use_queue",), _show_early_reads),),
    operations=(
        RunQueued,
        Read,
    ),
    observers=(CallsInFlight,),
)
