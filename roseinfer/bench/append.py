"""``append``: the cost of an append to the KV cache on every path, on the host and the device.

Two arrangements of the same cache are timed. *Per layer*: every layer has its own block
lists and one ``append_token_batch`` a step. *Grouped*: all layers share their lists, and a step
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
    in_rounds,
    kernel_us,
    one_thread,
    synchronizer,
    time_calls,
    why_triton_cannot_be_timed,
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

# A cache and sequences in it, to be appended to by a path of one's choice.


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
"""The policy under which sequences of equal length take each path."""


@dataclass(frozen=True, slots=True)
class AppendConfig:
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
        """To move one token's key and value in one layer: each is read and written."""
        return 2 * 2 * self.heads * self.head_dim * self.dtype.itemsize


class Rig:
    """A cache in one arrangement, the sequences in it, and each layer's new tokens."""

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
            cache.copy_(torch.rand_like(cache[0]).expand_as(cache))  # zeros may move faster
        groups = config.layers // layers_per_group
        self.groups: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in range(groups)]
        self._second_holder: list[int] = []
        new = (config.layers, batch, config.heads, config.head_dim)
        keys = torch.rand(new, device=config.device, dtype=config.dtype)
        self.tokens = list(zip(range(config.layers), keys, -keys, strict=True))

    def restart(self, path: Path) -> None:
        """Make every sequence one token long: ``block_size - 1`` more go in place, by ``path``."""
        self.kv.policy = POLICIES[path]
        self._drop_second_holder()
        for group, lists in enumerate(self.groups):
            layer = group * self.kv.layers_per_group
            for block_ids in lists:
                self.kv.free_blocks(layer, block_ids)
                block_ids.clear()
            self.kv.plan_append(layer, lists)

    def share(self) -> None:
        """Give every sequence's last block a second holder: the next plan has to copy it."""
        self._drop_second_holder()
        self._second_holder = [block_ids[-1] for block_ids in self.groups[0]]
        self.kv.incref_blocks(self._second_holder)

    def _drop_second_holder(self) -> None:
        self.kv.free_blocks(0, self._second_holder)
        self._second_holder = []

    def plan(self) -> AppendPlan:
        return self.kv.plan_append(0, self.groups[0])


# What is timed of an append: writes, whole steps, plans and copies, each on one path only.


Measured = TypeVar("Measured")
_WRITES_PER_SERIES = 150
"""Writes between two synchronizations: more could fill the GPU's queue of launches."""


@contextmanager
def only(counts: PathCounts, path: Path, times: int) -> Iterator[None]:
    """Raise unless exactly ``path`` moves data in here, ``times`` times."""
    before = Counter(counts)
    yield
    grown = Counter(counts) - before
    ran = {key.value: count for key, count in grown.items() if isinstance(key, Path)}
    if ran != ({path.value: times} if times else {}):
        raise WrongPath(
            f"{path.value} was to run {times} times, and what ran is {ran or 'nothing'}: "
            "the policy that the benchmark sets for this path no longer leads to it"
        )


@dataclass(frozen=True, slots=True)
class Work:
    """A call that makes sequences longer, and what it must be counted as."""

    rig: Rig
    path: Path
    call: Callable[[], object]
    counted: int
    """A call counts ``path`` so many times."""
    repeatable: bool = False
    """A call stores nothing new, so a series of them needs no fresh blocks."""

    def series(
        self,
        measure: Callable[[Callable[[], object], int, Callable[[], None]], Measured],
        calls: int,
    ) -> Measured:
        if not self.repeatable:
            self.rig.restart(self.path)
        with only(self.rig.kv.path_counts, self.path, self.counted * calls):
            return measure(self.call, calls, self.rig.sync)

    def sampler(self, *, wait: bool) -> Callable[[], float]:
        """Return a function that times a series which one block has room for."""
        calls = max(1, _WRITES_PER_SERIES // self.counted)
        if not self.repeatable:
            calls = min(calls, self.rig.config.block_size - 1)
        return partial(self.series, partial(time_calls, wait=wait), calls)


def per_token(rig: Rig, layers_per_call: int) -> Work:
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

    return Work(rig, Path.PER_TOKEN, call, rig.batch * layers_per_call)


def layer_write(rig: Rig, path: Path) -> Work:
    """Return writes of one plan, again and again, to one layer after another.

    Layers take turns as in a step, so that no write finds its tokens and slots where the one
    before it left them. All layers together may still fit a large GPU's L2 cache.
    """
    rig.restart(path)
    plan, layers = rig.plan(), cycle(rig.tokens)
    return Work(rig, path, lambda: rig.kv.write(plan, *next(layers)), 1, repeatable=True)


def per_layer_step(rig: Rig, path: Path) -> Work:
    def call() -> None:
        for layer, key, value in rig.tokens:
            rig.kv.append_token_batch(layer, rig.groups[layer], key, value)

    return Work(rig, path, call, rig.config.layers)


def grouped_step(rig: Rig, path: Path) -> Work:
    def call() -> None:
        plan = rig.plan()
        for layer, key, value in rig.tokens:
            rig.kv.write(plan, layer, key, value)

    return Work(rig, path, call, rig.config.layers)


def plan_us(rig: Rig, path: Path, steps: int) -> float:
    """Time planning on the host, staging included; a write afterwards shows where plans lead."""
    rig.restart(path)
    latest: deque[AppendPlan] = deque(maxlen=1)
    with only(rig.kv.path_counts, path, 0):
        microseconds = time_calls(lambda: latest.append(rig.plan()), steps, rig.sync)
    with only(rig.kv.path_counts, path, 1):
        rig.kv.write(latest[0], *rig.tokens[0])
    return microseconds


def clone_us(rig: Rig, path: Path, steps: int) -> float:
    """Time planning, on the host, a step in which every sequence has to copy its block."""
    rig.restart(path)
    total = 0.0
    with only(rig.kv.path_counts, path, steps):
        for _ in range(steps):
            rig.share()
            total += time_calls(rig.plan, 1, rig.sync)
    return total / steps


def clone_work(rig: Rig, path: Path) -> Work:
    """Return the same work for the device, whose time does not include the sharing."""

    def call() -> None:
        rig.share()
        rig.plan()

    return Work(rig, path, call, 1)


_WRITES = """\
One layer's tokens written, us per call. device us: the call's kernels by the profiler, each at
its median. graph us: per call in a replayed CUDA graph of many. floor: 4 x batch x heads x
head_dim x itemsize bytes (the new keys and values, read once and written once) at the measured
copy bandwidth. times floor: device time over it, or host time where there is no device time."""
_STEPS = """\
One token for every sequence in all layers, us, until the device is done. plan us: host time of
planning a step whose tokens all go in place. per layer: append_token_batch for each layer.
grouped: planned once, then one write a layer. speedup: against the per-token loop."""
_CLONES = """\
Copy-on-write: planning a step in which every sequence must copy its block, in all layers at
once. floor: those blocks read once and written once."""
_CLONE_PATHS = (Path.CLONE_TORCH, Path.CLONE_TRITON)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WRITES_PER_GRAPH = 96
_CLONES_PER_SAMPLE = 64
"""Blocks copied in one sample, or one for every sequence where those are more."""


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Moving data once: a layer's tokens or, in a clone, every sequence's block of all layers."""

    batch: int
    path_that_ran: str
    host_us: float
    device_us: float | None
    graph_us: float | None
    floor_us: float
    times_floor: float


@dataclass(frozen=True, slots=True)
class StepRow:
    batch: int
    path_that_ran: str
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
        (path, batch): why_left_out(path, batch, device)
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
        layered, grouped = Rig(config, batch, 1), Rig(config, batch, config.layers)
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


def why_left_out(path: Path, batch: int, device: torch.device) -> str:
    """Return why ``path`` is not timed with so many sequences, or an empty text where it is."""
    asked = AppendPolicy.from_env()  # refuses a bad variable
    if not path.needs_triton:
        return ""
    if reason := why_triton_cannot_be_timed(device):
        return reason
    if not asked.triton:
        return f"{TRITON_SWITCH} is off"
    variable, least = TRITON_MIN_BATCH, asked.triton_min_batch
    if path is Path.TRITON_FULL_BATCH and asked.triton_full_batch_min_batch is not None:
        variable, least = TRITON_FULL_BATCH_MIN_BATCH, asked.triton_full_batch_min_batch
    if path is not Path.CLONE_TRITON and batch < least:
        return f"batch {batch}: {variable} asks for at least {least} tokens"
    return ""


def _measure_writes(
    layered: Rig, grouped: Rig, paths: Sequence[Path], bandwidth: float
) -> list[WriteRow]:
    config, batch = grouped.config, grouped.batch
    works = [per_token(layered, layers_per_call=1)]
    works += [layer_write(grouped, path) for path in paths]
    samplers = {("host", work.path): work.sampler(wait=False) for work in works}
    device: dict[Path, float | None] = {}
    if config.device.type == "cuda":
        for work in works:
            samplers["host", work.path]()  # compiles what is about to be captured
            calls = config.layers if work.path is Path.PER_TOKEN else _WRITES_PER_GRAPH
            device[work.path] = work.series(kernel_us, calls)
            samplers["graph", work.path] = work.series(graph_sampler, calls)
    us = in_rounds(samplers, config.rounds, f"batch {batch}: writes")
    floor = batch * config.token_bytes / bandwidth * 1e6
    return [
        _row(batch, path, us["host", path], device.get(path), us.get(("graph", path)), floor)
        for path in (Path.PER_TOKEN, *paths)
    ]


def _measure_clones(rig: Rig, paths: Sequence[Path], bandwidth: float) -> list[WriteRow]:
    config, batch = rig.config, rig.batch
    steps = max(1, min(config.block_size - 1, _CLONES_PER_SAMPLE // batch))
    samplers = {path: partial(clone_us, rig, path, steps) for path in paths}
    us = in_rounds(samplers, config.rounds, f"batch {batch}: copy-on-write")
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


def _measure_steps(layered: Rig, grouped: Rig, paths: Sequence[Path]) -> list[StepRow]:
    config, batch = grouped.config, grouped.batch
    samplers = {("per layer", Path.PER_TOKEN): per_token(layered, config.layers).sampler(wait=True)}
    for path in paths:
        samplers["per layer", path] = per_layer_step(layered, path).sampler(wait=True)
        samplers["grouped", path] = grouped_step(grouped, path).sampler(wait=True)
        samplers["plan", path] = partial(plan_us, grouped, path, config.block_size - 1)
    us = in_rounds(samplers, config.rounds, f"batch {batch}: steps")
    loop = us["per layer", Path.PER_TOKEN]
    rows = [StepRow(batch, Path.PER_TOKEN, None, loop, 1.0)]
    for path in paths:
        plan, apart, together = (us[kind, path] for kind in ("plan", "per layer", "grouped"))
        rows.append(StepRow(batch, path, plan, apart, loop / apart, together, loop / together))
    return rows
