"""How long calls take: on the host, on the device, and in rounds that share the drift.

Machines change speed while they are measured. So nothing is repeated twenty times in a row:
every round takes one sample of everything, and the median over rounds is what counts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from roseinfer.errors import RoseinferError
from roseinfer.kernels.runtime import is_interpreted, why_unusable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

Key = TypeVar("Key", bound="Hashable")

_GRAPH_REPLAYS = 10
_BANDWIDTH_REPEATS = 7


class WrongPath(RoseinferError, RuntimeError):
    """Another path ran than the one being measured."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call over all rounds."""

    median_us: float
    min_us: float


def why_triton_cannot_be_timed(device: torch.device) -> str:
    """The reason why times of kernels would mean nothing here; empty where they can be taken."""
    reason = why_unusable(device)
    if not reason and is_interpreted():
        return "Triton's interpreter is on, and its speed says nothing about the kernels"
    return reason


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch's CPU operations to one thread, for calls too small to be worth splitting.

    Otherwise each waits until all threads had a turn: on a shared machine, milliseconds for
    what takes microseconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """The function to call to wait until the device has nothing left to do."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return _no_wait


def _no_wait() -> None:
    """The host is its own device."""


def in_rounds(
    samplers: Mapping[Key, Callable[[], float]], rounds: int, what: str
) -> dict[Key, Timing]:
    """Call every sampler once a round, and once before all rounds to warm up."""
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    with tqdm(total=(rounds + 1) * len(samplers), desc=what, disable=None, leave=False) as bar:
        for turn in range(rounds + 1):
            for key, sample in samplers.items():
                microseconds = sample()
                if turn:
                    samples[key].append(microseconds)
                bar.update()
    return {key: Timing(median(taken), min(taken)) for key, taken in samples.items()}


def time_calls(
    call: Callable[[], object],
    calls: int,
    sync: Callable[[], None] = _no_wait,
    *,
    wait: bool = False,
) -> float:
    """Microseconds of host time per call; with ``wait``, until the device is done as well.

    The device is idle at the start. ``calls`` must be few enough that it never refuses
    another launch: a full queue would make the host wait and the host time the device's.
    """
    sync()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if wait:
        sync()
    elapsed = time.perf_counter() - begin
    sync()
    return elapsed / calls * 1e6


def kernel_us(call: Callable[[], object], calls: int, sync: Callable[[], None]) -> float | None:
    """Microseconds a call keeps the GPU busy, gaps left out; None if the profiler saw nothing."""
    sync()
    # Besides kernels and copies, some profilers report the host's waiting, as "Context Sync".
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            call()
        sync()
    return busy_us_per_call(
        (
            (event.name, event.time_range.elapsed_us())
            for event in profiler.events()
            if event.device_type.name == "CUDA" and not event.name.endswith(" Sync")
        ),
        calls,
    )


def busy_us_per_call(kernels: Iterable[tuple[str, float]], calls: int) -> float | None:
    """The median duration of each kernel times how often a call ran it, summed."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in kernels:
        durations[name].append(microseconds)
    if not durations:
        return None
    return sum(median(taken) * len(taken) / calls for taken in durations.values())


def graph_sampler(
    call: Callable[[], object], calls: int, sync: Callable[[], None]
) -> Callable[[], float]:
    """Capture ``calls`` calls in a CUDA graph; each sample is the time per call of its replay.

    Everything a call launches must have been launched before, so that nothing is compiled
    while the capture is on.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    def sample() -> float:
        graph.replay()  # the first replay uploads the graph
        sync()
        begin = device_mark()
        for _ in range(_GRAPH_REPLAYS):
            graph.replay()
        end = device_mark()
        sync()
        return float(begin.elapsed_time(end)) * 1e3 / (_GRAPH_REPLAYS * calls)

    return sample


def device_mark() -> torch.cuda.Event:
    """An event that notes when the device gets to it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a large copy, counting those read and those written."""
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    sync = synchronizer(device)

    def copy() -> float:
        return time_calls(lambda: target.copy_(source), 4, sync, wait=True)

    taken = in_rounds({"copy": copy}, _BANDWIDTH_REPEATS, "copy bandwidth")["copy"]
    return 2 * num_bytes / taken.median_us * 1e6
