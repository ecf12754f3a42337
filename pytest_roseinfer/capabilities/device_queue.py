"""Queues of a simulated device that works asynchronously, and steps that advance it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    Run,
    Setup,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.operation import MAX_SEQUENCES
from pytest_roseinfer.capabilities.reading import Reads, read
from pytest_roseinfer.capabilities.swapping import FinishSwapIn, FinishSwapOut, SwapIn, SwapOut
from pytest_roseinfer.capabilities.writes import Append, begin_sequence
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.simulated_device import DeviceQueue


class QueueMethods:
    """Adapter method for a simulated device."""

    gather_in_flight: ClassVar[bool] = False
    """True if ``gather`` may be called while the queue has calls in flight, since it waits for its
    result, or returns tensors on the device."""

    @optional
    def use_queue(self, queue: DeviceQueue) -> None:
        """Run the work of a GPU on this simulated device; called right after ``make``.

        Either submit calls to it, or pass the tensors whose operations it is to defer.
        """


_MOST = 8
"""Most calls that one step makes."""
_STREAMS = (0, 1, 2)
"""Numbers of streams to draw: work of the cache, copies out of it, and copies back."""


@operation.register("RunQueued")
class RunQueued(operation.Operation):
    """Have the device make some of the calls in its queue."""

    count: int
    stream: int = 0
    """Number of the stream, modulo the number of streams."""

    needs = frozenset({"use_queue"})

    def describe(self) -> str:
        calls = format_count(self.count, "call")
        return f"the device makes the next {calls} of stream {self.stream}"

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.device.run(self.count, self.stream)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> RunQueued:
            return cls(writer.between(1, _MOST), writer.pick(_STREAMS))

        if writer.oracle.lives or writer.oracle.sequences:
            yield operation.DrawOption(111, 3, draw_step)


@operation.register("Read")
class Read(operation.Operation):
    """Read all stored tokens while calls may be in flight.

    A cache that declares ``gather_in_flight`` is read by ``gather`` first; then the device
    finishes, and the whole cache is compared with the oracle.
    """

    needs = frozenset({"use_queue"})
    waits_for_device = True

    def describe(self) -> str:
        return "read everything"

    def drive(self, cache: operation.CacheUnderTest) -> None:
        """Do nothing: the snapshot after the step reads the cache."""

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if writer.live:
            yield operation.DrawOption(120, 1, cls)


class CallsInFlight(Observer):
    """Counter of the steps that begin while the device has calls in flight."""

    any_of = ("use_queue",)
    conditions: ClassVar = {
        "calls_in_flight": "A step begins while the device has calls in flight. Required of a "
        "cache that defines ``use_queue``."
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.early: Reads = {}
        """Tokens read in this step while calls were in flight, which the cache had to wait for."""

    def before_call(
        self,
        step: operation.Operation,
        text_slices: Sequence[operation.TextSlice],  # noqa: ARG002
    ) -> None:
        reads = step.waits_for_device and self.run.adapter.gather_in_flight
        routes = ["gather"] if reads and "gather" in self.run.features else []
        self.early = read(self.run, lambda _: routes, " with calls in flight")

    def before(self, step: operation.Operation) -> Mapping[str, int]:  # noqa: ARG002
        return {} if self.run.cache_under_test.device.idle else {"calls_in_flight": 1}


def _take_queue(run: Run) -> None:
    from pytest_roseinfer.capabilities.simulated_device import QueuedDevice

    run.cache_under_test.device = QueuedDevice(run.adapter, Read())


def _show_early_reads(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    observer = run.observer(CallsInFlight)
    return {"reads": observer.early} if observer and look.reads else {}


def free_in_flight(writer: operation.Writer) -> None:
    """Open with a sequence that is freed while writes to it are in flight; or add no steps."""
    written = writer.pick((0, 1, 2))
    if written and "free" in writer.adapter.abilities:
        operation.add_while_fitting(writer, _free_in_flight(writer, written))
        begin_sequence(writer, writer.pick((1, writer.oracle.block_size)))


def _free_in_flight(writer: operation.Writer, written: int) -> Iterator[operation.Operation]:
    (seq,) = writer.fresh(1)
    for _ in range(written):
        yield Append((seq,), writer.layout())
    yield Free(seq)


def swap_in_flight(writer: operation.Writer) -> None:
    """Open with a sequence that is being swapped in while others take its memory; or add no steps.

    It is freed, so that a write takes its blocks, or another one is swapped out, which takes its
    swap space. Either may overtake the copy.
    """
    if not {"use_queue", *SwapOut.needs, *Free.needs} <= writer.adapter.abilities:
        return
    if taken := writer.pick(("", "blocks", "swap space")):
        operation.add_while_fitting(writer, _swap_in_flight(writer, taken))


def _swap_in_flight(writer: operation.Writer, taken: str) -> Iterator[operation.Operation]:
    first, second = writer.fresh(2)
    for _ in range(writer.pick((1, writer.oracle.block_size))):
        yield Append((first, second), writer.layout())
    yield SwapOut(first)
    yield FinishSwapOut(first)
    yield SwapIn(first)
    if taken == "blocks":
        yield Free(first)
        yield Append(writer.fresh(min(MAX_SEQUENCES - 1, writer.oracle.pages_free())))
    else:
        yield SwapOut(second)
    yield RunQueued(_MOST, writer.pick(_STREAMS))
    if taken == "swap space":
        yield FinishSwapIn(first)
    yield Read()


DEVICE_QUEUE = Capability(
    methods=QueueMethods,
    preludes=(
        Prelude(("use_queue",), 20, free_in_flight),
        Prelude(("use_queue",), 21, swap_in_flight),
    ),
    setups=(Setup(("use_queue",), _take_queue),),
    views=(View(("use_queue",), _show_early_reads),),
    operations=(
        RunQueued,
        Read,
    ),
    observers=(CallsInFlight,),
)
