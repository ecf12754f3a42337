"""Timing of calls on host and device, in rounds, so that drift affects all calls equally.

Machines change speed during a measurement. So no call is repeated twenty times in a row: each
round takes one sample of every call, and the result is the median over the rounds.
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
from roseinfer.kernels.runtime import is_interpreted, unusable_reason
from roseinfer.terminal import track_items

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

Key = TypeVar("Key", bound="Hashable")

_GRAPH_REPLAYS = 10
_FEWEST_CALLS = 12
"""Calls in a CUDA graph, at least, so that the overhead of its begin and end is small."""
_MATRIX_SIDE = {"cuda": 8192, "cpu": 512}


class WrongPath(RoseinferError, RuntimeError):
    """Error of a measurement that ran another path than the expected one."""


def triton_skip_reason(device: torch.device) -> str:
    """Return the reason why Triton kernels cannot be timed on a device; empty if they can."""
    reason = unusable_reason(device)
    if not reason and is_interpreted():
        return "Triton's interpreter is on; its times are not those of the kernels"
    return reason


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch's CPU operations to one thread, for calls too small to be worth splitting.

    With more, each call waits for all threads to be scheduled: milliseconds on a shared machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device is idle."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def median_over_rounds(
    samplers: Mapping[Key, Callable[[], float]], rounds: int, label: str
) -> dict[Key, float]:
    """Return each sampler's median over the rounds, after a first round as a warm-up."""
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    for _ in track_items(range(rounds + 1), label, "rounds"):
        for key, sample in samplers.items():
            samples[key].append(sample())
    return {key: median(times[1:]) for key, times in samples.items()}


def time_calls(
    call: Callable[[], object], calls: int, sync: Callable[[], None], *, wait: bool = False
) -> float:
    """Return microseconds of host time per call; with ``wait``, until the device is idle as well.

    The device is idle at the start. ``calls`` must be few enough that the launch queue never fills
    up: with a full queue the host waits, and its time is that of the device.
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
    """Return microseconds of GPU time per call; None if the profiler recorded no kernels."""
    return busy_us_per_call(device_events(call, calls, sync), calls)


def device_events(
    call: Callable[[], object], calls: int, sync: Callable[[], None]
) -> list[tuple[str, float]]:
    """Return the name and the microseconds of each kernel and copy in ``calls`` calls."""
    sync()
    # Some profilers also report waits of the host, as "Context Sync".
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
    """Sum, over all kernels, the median duration times the kernel's launches per call."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in kernels:
        durations[name].append(microseconds)
    if not durations:
        return None
    return sum(median(times) * len(times) / calls for times in durations.values())


def graph_sampler(
    call: Callable[[], object], calls: int, sync: Callable[[], None]
) -> Callable[[], float]:
    """Capture ``calls`` calls in a CUDA graph; each sample is the time per call of its replay.

    All kernels of a call must have been launched before: none can be compiled in a capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    def sample() -> float:
        graph.replay()  # the first replay uploads the graph
        sync()
        begin = record_device_event()
        for _ in range(_GRAPH_REPLAYS):
            graph.replay()
        end = record_device_event()
        sync()
        return float(begin.elapsed_time(end)) * 1e3 / (_GRAPH_REPLAYS * calls)

    return sample


def sampler(call: Callable[[], object], turns: int, device: torch.device) -> Callable[[], float]:
    """Return a function that samples the time of a call: on a GPU, of many in a CUDA graph.

    Each of ``turns`` consecutive calls uses other memory.
    """
    sync = synchronizer(device)
    call()  # compiles its kernels
    if device.type == "cuda":
        return graph_sampler(call, max(_FEWEST_CALLS, turns), sync)
    return lambda: time_calls(call, 1, sync, wait=True)


def record_device_event() -> torch.cuda.Event:
    """Record an event with the device's time, and return it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def copy_bandwidth(device: torch.device, gpu_bytes: int = 1 << 30) -> float:
    """Return the bytes per second of a copy larger than any cache, counting reads and writes."""
    num_bytes = gpu_bytes if device.type == "cuda" else 1 << 26
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    sync = synchronizer(device)

    def copy() -> float:
        return time_calls(lambda: target.copy_(source), 4, sync, wait=True)

    return 2 * num_bytes / median_over_rounds({"copy": copy}, 7, "copy bandwidth")["copy"] * 1e6


def gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiplications and additions per second of a large GEMM."""
    side = _MATRIX_SIDE[device.type]
    a, b = (torch.randn((side, side), device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    sync = synchronizer(device)

    def multiply() -> float:
        return time_calls(lambda: torch.mm(a, b, out=out), 4, sync, wait=True)

    microseconds = median_over_rounds({"GEMM": multiply}, 7, "GEMM speed")["GEMM"]
    return 2 * side**3 / microseconds * 1e6
