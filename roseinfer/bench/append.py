"""``append``: the cost of an append to the KV cache on every path, on the host and the device.

Two arrangements of the same cache are timed. *Per layer*: every layer has its own block
lists and one ``append_token_batch`` per step. *Grouped*: all layers share block lists, and a step
is planned once and then written layer by layer. The baseline is a loop of ``append_token``
over every layer and sequence, whose tokens are split before the clock starts.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, TypeVar

import torch

from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import (
    WrongPath,
    copy_bandwidth,
    graph_sampler,
    kernel_us,
    median_over_rounds,
    one_thread,
    synchronizer,
    time_calls,
    triton_skip_reason,
)
from roseinfer.config import (
    TRITON_FULL_BATCH_MIN_BATCH,
    TRITON_MIN_BATCH,
    TRITON_SWITCH,
    AppendPolicy,
)
from roseinfer.kv.manager import KVBlockManager
from roseinfer.models.loading import resolve_device
from roseinfer.paths import Path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from roseinfer.kv.plan import AppendPlan
    from roseinfer.paths import PathCounts

# Cache and sequences for appends by a chosen path.


NO_TRITON = AppendPolicy(triton=False)
POLICIES = {
    Path.PER_TOKEN: NO_TRITON,
    Path.TORCH_SCALAR: NO_TRITON,
    Path.TORCH_VECTOR: AppendPolicy(triton=False, scalar_position=False),
    Path.TORCH_GATHER: AppendPolicy(triton=False, identity=False),
    Path.TRITON_FULL_BATCH: AppendPolicy(),
    Path.TRITON_IDENTITY_POS: AppendPolicy(scalar_position=False),
    Path.TRITON_GATHER: AppendPolicy(identity=False),
    Path.CLONE_TORCH: NO_TRITON,
    Path.CLONE_TRITON: AppendPolicy(),
}
"""Policies by the path that they select for sequences of equal length."""


@dataclass(frozen=True, slots=True)
class AppendConfig:
    """Shape of the cache, and rounds of the measurement."""

    batches: tuple[int, ...]
    layers: int
    heads: int
    head_dim: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    rounds: int

    @property
    def token_bytes(self) -> int:
        """Traffic in bytes of one token's key and value in one layer: each is read and written."""
        return 2 * 2 * self.heads * self.head_dim * self.dtype.itemsize


class AppendRig:
    """Cache in one arrangement, its sequences, and each layer's new tokens."""

    def __init__(self, config: AppendConfig, batch: int, layers_per_group: int) -> None:
        self.config = config
        self.batch = batch
        self.sync = synchronizer(config.device)
        self.kv = KVBlockManager(
            config.layers,
            config.heads,
            config.head_dim,
            config.block_size,
            2 * batch + 1,
            config.device,
            config.dtype,
            NO_TRITON,
            layers_per_group=layers_per_group,
        )
        for cache in (self.kv.keys, self.kv.values):
            cache.copy_(torch.rand_like(cache[0]).expand_as(cache))  # zeros may copy faster
        groups = config.layers // layers_per_group
        self.groups: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in range(groups)]
        self._second_holder: list[int] = []
        new = (config.layers, batch, config.heads, config.head_dim)
        keys = torch.rand(new, device=config.device, dtype=config.dtype)
        self.tokens = list(zip(range(config.layers), keys, -keys, strict=True))

    def restart(self, path: Path) -> None:
        """Cut sequences to one token: the next ``block_size - 1`` are appended by ``path``."""
        self.kv.policy = POLICIES[path]
        self._drop_second_holder()
        for group, lists in enumerate(self.groups):
            layer = group * self.kv.layers_per_group
            for block_ids in lists:
                self.kv.free_blocks(layer, block_ids)
                block_ids.clear()
            self.kv.plan_append(layer, lists)

    def share(self) -> None:
        """Add a second holder to every sequence's last block: the next plan has to copy it."""
        self._drop_second_holder()
        self._second_holder = [block_ids[-1] for block_ids in self.groups[0]]
        self.kv.incref_blocks(self._second_holder)

    def _drop_second_holder(self) -> None:
        self.kv.free_blocks(0, self._second_holder)
        self._second_holder = []

    def plan(self) -> AppendPlan:
        return self.kv.plan_append(0, self.groups[0])


# Workloads of an append: writes, whole steps, plans and copies, each on one path only.


Measured = TypeVar("Measured")
_WRITES_PER_SERIES = 150
"""Writes between two synchronisations: more could fill the GPU's launch queue."""


@contextmanager
def require_path(counts: PathCounts, path: Path, times: int) -> Iterator[None]:
    """Raise unless exactly ``path`` runs in the block, ``times`` times."""
    before = Counter(counts)
    yield
    counted = Counter(counts) - before
    ran = {key.value: count for key, count in counted.items() if isinstance(key, Path)}
    if ran != ({path.value: times} if times else {}):
        raise WrongPath(
            f"{path.value}: expected {times} runs, actual paths and runs are {ran or 'none'}; the "
            "benchmark's policy for this path no longer selects it"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Call that appends to sequences, and the path that it must take."""

    rig: AppendRig
    path: Path
    call: Callable[[], object]
    num_counted: int
    """Number of times that a call counts ``path``."""
    repeatable: bool = False
    """True if a call stores no new tokens, so that a series of calls needs no new blocks."""

    def series(
        self,
        measure: Callable[[Callable[[], object], int, Callable[[], None]], Measured],
        calls: int,
    ) -> Measured:
        if not self.repeatable:
            self.rig.restart(self.path)
        with require_path(self.rig.kv.path_counts, self.path, self.num_counted * calls):
            return measure(self.call, calls, self.rig.sync)

    def sampler(self, *, wait: bool) -> Callable[[], float]:
        """Return a function that times a series of calls whose tokens fit into one block."""
        calls = max(1, _WRITES_PER_SERIES // self.num_counted)
        if not self.repeatable:
            calls = min(calls, self.rig.config.block_size - 1)
        return partial(self.series, partial(time_calls, wait=wait), calls)


def per_token(rig: AppendRig, layers_per_call: int) -> Workload:
    layers = cycle(
        [
            [(layer, *row) for row in zip(rig.groups[layer], key, value, strict=True)]
            for layer, key, value in rig.tokens
        ]
    )

    def call() -> None:
        for _ in range(layers_per_call):
            for row in next(layers):
                rig.kv.append_token(*row)

    return Workload(rig, Path.PER_TOKEN, call, rig.batch * layers_per_call)


def layer_write(rig: AppendRig, path: Path) -> Workload:
    """Return a workload that writes one plan repeatedly, to one layer after the other.

    Layers alternate as in a step, so that no write finds its tokens and slots in a cache from the
    previous write. All layers together may still fit into a large GPU's L2 cache.
    """
    rig.restart(path)
    plan, layers = rig.plan(), cycle(rig.tokens)
    return Workload(rig, path, lambda: rig.kv.write(plan, *next(layers)), 1, repeatable=True)


def per_layer_step(rig: AppendRig, path: Path) -> Workload:
    def call() -> None:
        for layer, key, value in rig.tokens:
            rig.kv.append_token_batch(layer, rig.groups[layer], key, value)

    return Workload(rig, path, call, rig.config.layers)


def grouped_step(rig: AppendRig, path: Path) -> Workload:
    def call() -> None:
        plan = rig.plan()
        for layer, key, value in rig.tokens:
            rig.kv.write(plan, layer, key, value)

    return Workload(rig, path, call, rig.config.layers)


def plan_us(rig: AppendRig, path: Path, steps: int) -> float:
    """Time planning on the host, with staging; a write afterwards checks the plan's path."""
    rig.restart(path)
    latest: deque[AppendPlan] = deque(maxlen=1)
    with require_path(rig.kv.path_counts, path, 0):
        microseconds = time_calls(lambda: latest.append(rig.plan()), steps, rig.sync)
    with require_path(rig.kv.path_counts, path, 1):
        rig.kv.write(latest[0], *rig.tokens[0])
    return microseconds


def clone_us(rig: AppendRig, path: Path, steps: int) -> float:
    """Time planning on the host, for a step that copies a block of every sequence."""
    rig.restart(path)
    total = 0.0
    with require_path(rig.kv.path_counts, path, steps):
        for _ in range(steps):
            rig.share()
            total += time_calls(rig.plan, 1, rig.sync)
    return total / steps


def clone_work(rig: AppendRig, path: Path) -> Workload:
    """Return the workload of ``clone_us`` for device times, which do not include the sharing."""

    def call() -> None:
        rig.share()
        rig.plan()

    return Workload(rig, path, call, 1)


_WRITES = """\
Writes of one layer's tokens, us per call. device us: the call's kernels by the profiler, each at
its median. graph us: per call in a replayed CUDA graph of many calls. floor: 4 x batch x heads x
head_dim x itemsize bytes (the new keys and values, read once and written once) at the measured
copy bandwidth. floor ratio: device time over the floor, or host time without a device time."""
_STEPS = """\
One token for every sequence in all layers, us, until the device is done. plan us: host time of
planning a step without new or copied blocks. per layer: append_token_batch for each layer.
grouped: one plan, then one write per layer. speedup: over the per-token loop."""
_CLONES = """\
Copy-on-write: planning a step in which every sequence must copy its block, in all layers at
once. floor: those blocks read once and written once."""
_CLONE_PATHS = (Path.CLONE_TORCH, Path.CLONE_TRITON)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WRITES_PER_GRAPH = 96
_CLONES_PER_SAMPLE = 64
"""Blocks copied in one sample, at least; one per sequence if there are more sequences."""


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Times of a write of a layer's tokens, or of copying every sequence's block in all layers."""

    batch: int
    measured_path: str
    host_us: float
    device_us: float | None
    graph_us: float | None
    floor_us: float
    floor_ratio: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """Times of the appends of a whole step, for one batch size."""

    batch: int
    measured_path: str
    plan_us: float | None
    per_layer_us: float
    per_layer_speedup: float
    grouped_us: float | None = None
    grouped_speedup: float | None = None


@one_thread()
def run(args: argparse.Namespace) -> Report:
    device = resolve_device(args.device)
    config = AppendConfig(
        batches=tuple(args.batch),
        layers=args.layers,
        heads=args.heads,
        head_dim=args.head_dim,
        block_size=args.block_size,
        device=device,
        dtype=_DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")],
        rounds=3 if args.quick else 15,
    )
    why_not = {
        (path, batch): append_skip_reason(path, batch, device)
        for path in POLICIES
        for batch in config.batches
    }
    bandwidth = copy_bandwidth(device)
    writes: list[WriteRow] = []
    steps: list[StepRow] = []
    clones: list[WriteRow] = []
    for batch in config.batches:
        paths = [path for path in POLICIES if not why_not[path, batch]]
        batched = [path for path in paths if path not in (Path.PER_TOKEN, *_CLONE_PATHS)]
        layered, grouped = AppendRig(config, batch, 1), AppendRig(config, batch, config.layers)
        writes += _measure_writes(layered, grouped, batched, bandwidth)
        steps += _measure_steps(layered, grouped, batched)
        clones += _measure_clones(grouped, [p for p in paths if p in _CLONE_PATHS], bandwidth)
        del layered, grouped  # before the next two are built
    missing = dict.fromkeys((path, reason) for (path, _), reason in why_not.items() if reason)
    return Report(
        "append",
        args.command,
        device,
        {**asdict(config), "device": str(device), "dtype": str(config.dtype)},
        (
            Table("writes", _WRITES, writes),
            Table("steps", _STEPS, steps),
            Table("clones", _CLONES, clones),
            unavailable_table(missing),
        ),
        {"copy_bandwidth_gb_per_s": bandwidth / 1e9},
    )


def append_skip_reason(path: Path, batch: int, device: torch.device) -> str:
    """Return the reason why ``path`` is not timed for this batch; empty if it is timed."""
    policy = AppendPolicy.from_env()  # raises for invalid variables
    if not path.needs_triton:
        return ""
    if reason := triton_skip_reason(device):
        return reason
    if not policy.triton:
        return f"{TRITON_SWITCH} is off"
    variable, min_batch = TRITON_MIN_BATCH, policy.triton_min_batch
    if path is Path.TRITON_FULL_BATCH and policy.triton_full_batch_min_batch is not None:
        variable, min_batch = TRITON_FULL_BATCH_MIN_BATCH, policy.triton_full_batch_min_batch
    if path is not Path.CLONE_TRITON and batch < min_batch:
        return f"batch {batch}: {variable} requires {min_batch} tokens or more"
    return ""


def _measure_writes(
    layered: AppendRig, grouped: AppendRig, paths: Sequence[Path], bandwidth: float
) -> list[WriteRow]:
    config, batch = grouped.config, grouped.batch
    works = [per_token(layered, layers_per_call=1)]
    works += [layer_write(grouped, path) for path in paths]
    samplers = {("host", work.path): work.sampler(wait=False) for work in works}
    device: dict[Path, float | None] = {}
    if config.device.type == "cuda":
        for work in works:
            samplers["host", work.path]()  # compiles the kernels before the capture
            calls = config.layers if work.path is Path.PER_TOKEN else _WRITES_PER_GRAPH
            device[work.path] = work.series(kernel_us, calls)
            samplers["graph", work.path] = work.series(graph_sampler, calls)
    us = median_over_rounds(samplers, config.rounds, f"batch {batch}: writes")
    floor = batch * config.token_bytes / bandwidth * 1e6
    return [
        _row(batch, path, us["host", path], device.get(path), us.get(("graph", path)), floor)
        for path in (Path.PER_TOKEN, *paths)
    ]


def _measure_clones(rig: AppendRig, paths: Sequence[Path], bandwidth: float) -> list[WriteRow]:
    config, batch = rig.config, rig.batch
    steps = max(1, min(config.block_size - 1, _CLONES_PER_SAMPLE // batch))
    samplers = {path: partial(clone_us, rig, path, steps) for path in paths}
    us = median_over_rounds(samplers, config.rounds, f"batch {batch}: copy-on-write")
    floor = batch * config.layers * config.block_size * config.token_bytes / bandwidth * 1e6
    rows = []
    on_gpu = config.device.type == "cuda"
    for path, host in us.items():
        device = clone_work(rig, path).series(kernel_us, steps) if on_gpu else None
        rows.append(_row(batch, path, host, device, None, floor))
    return rows


def _row(
    batch: int, path: Path, host: float, device: float | None, graph: float | None, floor: float
) -> WriteRow:
    return WriteRow(batch, path, host, device, graph, floor, (device or host) / floor)


def _measure_steps(layered: AppendRig, grouped: AppendRig, paths: Sequence[Path]) -> list[StepRow]:
    config, batch = grouped.config, grouped.batch
    samplers = {("per layer", Path.PER_TOKEN): per_token(layered, config.layers).sampler(wait=True)}
    for path in paths:
        samplers["per layer", path] = per_layer_step(layered, path).sampler(wait=True)
        samplers["grouped", path] = grouped_step(grouped, path).sampler(wait=True)
        samplers["plan", path] = partial(plan_us, grouped, path, config.block_size - 1)
    us = median_over_rounds(samplers, config.rounds, f"batch {batch}: steps")
    loop = us["per layer", Path.PER_TOKEN]
    rows = [StepRow(batch, Path.PER_TOKEN, None, loop, 1.0)]
    for path in paths:
        plan, per_layer, in_groups = (us[kind, path] for kind in ("plan", "per layer", "grouped"))
        rows.append(
            StepRow(batch, path, plan, per_layer, loop / per_layer, in_groups, loop / in_groups)
        )
    return rows
