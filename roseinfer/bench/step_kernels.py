"""What each kernel takes in a decode step, beside the time that the bytes it declares would take.

torch's profiler listens while some steps run, which are not those that are timed.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from roseinfer.bench.timing import device_events, synchronizer
from roseinfer.decode.graphs import StepGraphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from roseinfer.decode.step_kind import StepKind
    from roseinfer.engine.engine import Engine

CAPTION = """\
The kernels and copies of those steps, by torch's profiler in other steps of the same requests; the
longest first. us: of all calls in a step. Kernels that start early overlap and wait within their
time, so that shares of the step can be more than one together. MB: what a kernel declares to read
and write in a step, every place once. bytes us: the time of that at the measured copy bandwidth.
Kernels that are not ours declare nothing."""
HEADINGS = {
    "sequences": "sequences",
    "kernel": "kernel",
    "calls": "calls",
    "us": "us",
    "share": "share",
    "declared_mb": "MB",
    "bytes_us": "bytes us",
}
PROFILED = 20
"""Steps that the profiler listens to."""
STEPS = PROFILED + 1
"""Steps that all of this takes."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    sequences: int
    kernel: str
    calls: float
    """In a step, as the times and the bytes are."""
    us: float
    share: float
    """Of the time of a step that no profiler listened to."""
    declared_mb: float | None = None
    bytes_us: float | None = None


def measure_kernels(
    engine: Engine, sequences: int, step_us: float, bandwidth: float
) -> list[KernelRow]:
    """Run steps in which all sequences decode; ``step_us`` is what such a step takes."""
    sync = synchronizer(engine.sessions.kv.device)
    events = device_events(engine.step, PROFILED, sync)
    with launched_not_replayed(), declared_bytes() as declared:
        engine.step()
    return kernel_rows(sequences, events, declared, step_us, bandwidth)


def kernel_rows(
    sequences: int,
    events: Iterable[tuple[str, float]],
    declared: Mapping[str, int],
    step_us: float,
    bandwidth: float,
) -> list[KernelRow]:
    """Add up the events of all profiled steps by kernel."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in events:
        durations[short_name(name)].append(microseconds)
    rows = []
    for kernel, taken in durations.items():
        us, moved = sum(taken) / PROFILED, declared.get(kernel)
        row = KernelRow(sequences, kernel, len(taken) / PROFILED, us, us / step_us)
        if moved is not None:
            row = replace(row, declared_mb=moved / 1e6, bytes_us=moved / bandwidth * 1e6)
        rows.append(row)
    return sorted(rows, key=lambda row: -row.us)


def short_name(kernel: str) -> str:
    """Return a kernel's own name, without types, namespaces and arguments."""
    name = kernel.partition("<")[0].removeprefix("void ").rpartition("::")[2].partition("(")[0]
    return name.rpartition(".")[2].strip()


@contextmanager
def launched_not_replayed() -> Iterator[None]:
    """Run steps kernel by kernel instead of replaying their graphs, so that each can be seen."""

    def run(graphs: StepGraphs, count: int, kind: StepKind) -> None:
        graphs._step(count, kind)

    with patch.object(StepGraphs, "run", run):
        yield


@contextmanager
def declared_bytes() -> Iterator[dict[str, int]]:
    """Add up, by kernel, the bytes that launches of our kernels declare meanwhile."""
    from triton import knobs
    from triton.runtime.jit import KernelInterface

    found: dict[str, int] = defaultdict(int)
    real: Callable[[Any, Any], Any] = KernelInterface.__getitem__

    def noting(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = real(kernel, grid)
        declaration = getattr(kernel.fn, "moves", None)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if declaration is not None:
                given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
                found[kernel.fn.__name__] += sum(map(_settled, declaration(given).values()))
            return launch(*args, **kwargs)

        return noted

    def hear(launch: Any) -> None:
        told = launch.get()
        if "moves" in told:
            found[told["name"]] += sum(_settled(amount) for _, amount in told["moves"]())

    hook = knobs.runtime.launch_enter_hook
    hook.add(hear)
    try:
        with patch.object(KernelInterface, "__getitem__", noting):
            yield found
    finally:
        hook.remove(hear)


def _settled(amount: int | Callable[[], int]) -> int:
    """Work out an amount that depends on what tensors hold when the kernel runs."""
    return amount if isinstance(amount, int) else int(amount())
