"""How long calls take: on the host, on the device, and in rounds that share the drift.

Machines change speed while they are measured. So nothing is repeated twenty times in a row:
every round takes one sample of everything, and the median over the rounds counts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from roseinfer.errors import RoseinferError
from roseinfer.kernels.runtime import is_interpreted, why_unusable
from roseinfer.progress import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

Key = TypeVar("Key", bound="Hashable")

_GRAPH_REPLAYS = 10
_FEWEST_CALLS = 12
"""In a graph, so that its begin and its end weigh little."""
_MATRIX_SIDE = {"cuda": 8192, "cpu": 512}


class WrongPath(RoseinferError, RuntimeError):
    """Another path ran than the one being measured."""


def why_triton_cannot_be_timed(device: torch.device) -> str:
    """Return why kernels cannot be timed here, or an empty text where they can."""
    reason = why_unusable(device)
    if not reason and is_interpreted():
        return "Triton's interpreter is on, and its speed says nothing about the kernels"
    return reason


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch's CPU operations to one thread, for calls too small to be worth splitting.

    Otherwise each waits until all threads had a turn: milliseconds on a shared machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return the function that waits until the device has nothing left to do."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def in_rounds(
    samplers: Mapping[Key, Callable[[], float]], rounds: int, what: str
) -> dict[Key, float]:
    """Return each sampler's median over the rounds; a first round warms up and is thrown away."""
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    for _ in counted(range(rounds + 1), what, "rounds"):
        for key, sample in samplers.items():
            samples[key].append(sample())
    return {key: median(taken[1:]) for key, taken in samples.items()}


def time_calls(
    call: Callable[[], object], calls: int, sync: Callable[[], None], *, wait: bool = False
) -> float:
    """Return microseconds of host time per call; with ``wait``, until the device is done as well.

    The device is idle at the start. ``calls`` must be few enough that the device never refuses
    another launch: a full queue would make the host wait and the host's time the device's.
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
    """Return the microseconds that a call keeps the GPU busy; None if the profiler saw nothing."""
    return busy_us_per_call(device_events(call, calls, sync), calls)


def device_events(
    call: Callable[[], object], calls: int, sync: Callable[[], None]
) -> list[tuple[str, float]]:
    """Return the kernels and copies of so many calls, by name, and the microseconds of each."""
    sync()
    # Besides kernels and copies, some profilers report the host's waiting, as "Context Sync".
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            call()
        sync()
    return [
        (event.name, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.name.endswith(" Sync")
    ]


def busy_us_per_call(kernels: Iterable[tuple[str, float]], calls: int) -> float | None:
    """Sum, over all kernels, the median duration times how often a call ran the kernel."""
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

    All that a call launches must have been launched before: nothing can compile in a capture.
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


def sampler(call: Callable[[], object], turns: int, device: torch.device) -> Callable[[], float]:
    """Return what takes a sample of the time of a call, on a GPU of many in a CUDA graph.

    Each of ``turns`` calls in a row works on other memory.
    """
    sync = synchronizer(device)
    call()  # compiles what there is to compile
    if device.type == "cuda":
        return graph_sampler(call, max(_FEWEST_CALLS, turns), sync)
    return lambda: time_calls(call, 1, sync, wait=True)


def device_mark() -> torch.cuda.Event:
    """Return an event that notes when the device gets to it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def copy_bandwidth(device: torch.device, gpu_bytes: int = 1 << 30) -> float:
    """Return the bytes per second of a copy beyond any cache, counting reads and writes."""
    num_bytes = gpu_bytes if device.type == "cuda" else 1 << 26
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    sync = synchronizer(device)

    def copy() -> float:
        return time_calls(lambda: target.copy_(source), 4, sync, wait=True)

    return 2 * num_bytes / in_rounds({"copy": copy}, 7, "copy bandwidth")["copy"] * 1e6


def matrix_operations(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiplications and additions per second of a large product of matrices."""
    side = _MATRIX_SIDE[device.type]
    left, right = (torch.randn((side, side), device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    sync = synchronizer(device)

    def multiply() -> float:
        return time_calls(lambda: torch.mm(left, right, out=out), 4, sync, wait=True)

    taken = in_rounds({"product": multiply}, 7, "speed of products")["product"]
    return 2 * side**3 / taken * 1e6
