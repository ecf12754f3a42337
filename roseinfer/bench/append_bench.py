"""``append``: the cost of an append to the KV cache on every path, on the host and the device.

Two arrangements of the same cache are timed. *Per layer*: every layer has its own block
lists and one ``append_token_batch`` a step. *Grouped*: all layers share their lists, a step
is planned once and then written layer by layer. The baseline is a loop of ``append_token``
over every layer and sequence, its tokens split beforehand at no charge.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, TypeVar

import torch

from roseinfer.bench import append_planning
from roseinfer.bench.arguments import add_outputs, whole
from roseinfer.bench.reporting import Report, Table, UnavailableRow
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
from roseinfer.config import TRITON_SWITCH, AppendPolicy
from roseinfer.errors import ConfigError
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.paths import Path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    _Policies = dict[Path, AppendPolicy]

    from roseinfer.kv.paths import PathCounts
    from roseinfer.kv.plan import AppendPlan

    Policies = Mapping[Path, AppendPolicy]

Measured = TypeVar("Measured")

_WRITES = """\
One layer's tokens written, us per call. floor: 4 x batch x heads x head_dim x itemsize bytes
(the new keys and values, read once and written once) at the measured copy bandwidth. times
floor: device time over it, or host time where there is no device time."""
_STEPS = """\
One token for every sequence in all layers, us, until the device is done. plan us: host time of
planning a step whose tokens all go in place; plan mean us: over a whole block, rollover
included. per layer: append_token_batch for each layer. grouped: planned once, then one write a
layer. speedup: against the per-token loop."""
_CLONES = """\
Copy-on-write: planning a step in which every sequence must copy its block, in all layers at
once. floor: those blocks read once and written once."""
_TARGETS = "Targets on an H200, 64 sequences, 12 layers of 12 heads of 64, bf16."

NO_TRITON = AppendPolicy(triton=False)
WRITES: dict[Path, AppendPolicy] = {
    Path.TORCH_SCALAR: NO_TRITON,
    Path.TORCH_VECTOR: AppendPolicy(triton=False, scalar_position=False),
    Path.TORCH_GATHER: AppendPolicy(triton=False, identity=False),
    Path.TRITON_FULL_BATCH: AppendPolicy(),
    Path.TRITON_IDENTITY_POS: AppendPolicy(scalar_position=False),
    Path.TRITON_GATHER: AppendPolicy(identity=False),
}
"""The policy under which sequences of equal length take each path."""
CLONES: dict[Path, AppendPolicy] = {
    Path.CLONE_TORCH: NO_TRITON,
    Path.CLONE_TRITON: AppendPolicy(),
}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WRITES_PER_GRAPH = 96
_CLONES_PER_SAMPLE = 64
"""Blocks copied in one sample; one for every sequence where those are more."""
_LIMITS: dict[str, tuple[str, float]] = {
    "planning a step, us": ("<=", 25),
    "layer write on the host, us": ("<=", 12),
    "layer write on the device, us": ("<=", 2.0),
    "step, per layer, times per-token loop": (">=", 40),
    "step, grouped, times per-token loop": (">=", 40),
}
_LIMITS_BATCH = 64
_LIMITS_SHAPE = ("cuda", torch.bfloat16, 12, 12, 64)
_LIMITS_PATHS = ("triton_full_batch", "triton_identity_pos")
"""An engine's steps take these: sequences are at one position, or each at its own."""


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
    launches: int
    """Most launches between two synchronizations, lest the queue fill; one call at least."""
    copy_bytes: int
    """Size of the copy that bandwidth is measured with."""

    @property
    def token_bytes(self) -> int:
        """To move one token's key and value in one layer: each is read and written."""
        return 2 * 2 * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Moving data once: a layer's tokens or, in a clone, every sequence's block of all layers."""

    batch: int
    path_that_ran: str
    host_us: float
    host_min_us: float
    device_us: float | None
    """A call's kernels, each at its median duration by the profiler, summed."""
    graph_us: float | None
    """Time per call inside a replayed CUDA graph of many calls."""
    floor_us: float
    times_floor: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """One token for every sequence in all layers. Planning is host time, steps end to end."""

    batch: int
    path_that_ran: str
    plan_us: float | None
    plan_min_us: float | None
    plan_mean_us: float | None
    """Over the tokens of a whole block: once in it, all sequences roll over to a new block."""
    per_layer_us: float
    per_layer_min_us: float
    per_layer_speedup: float
    grouped_us: float | None = None
    grouped_min_us: float | None = None
    grouped_speedup: float | None = None


@dataclass(frozen=True, slots=True)
class TargetRow:
    target: str
    path_that_ran: str
    wanted: str
    measured: float | None
    verdict: str


# ------------------------------------------------------------------------------- the command


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("append", help="what an append to the KV cache costs, by path")
    option = parser.add_argument
    option("--batch", type=whole(1), nargs="+", default=[1, 8, 64, 256], help="sequences")
    option("--layers", type=whole(1), default=12)
    option("--heads", type=whole(1), default=12, help="KV heads")
    option("--head-dim", type=whole(1), default=64)
    option("--block-size", type=whole(2), default=64)
    option("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    option("--dtype", choices=_DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    option("--scaling", action="store_true", help="also measure what planning depends on")
    option("--quick", action="store_true", help="few repeats: to see that it works")
    add_outputs(parser, plot=False)
    parser.set_defaults(run=_measure)


def _runnable(device: torch.device) -> tuple[_Policies, _Policies, list[UnavailableRow]]:
    """The writes and the clones that can be timed on ``device``, and why others cannot."""
    switched_off = "" if AppendPolicy.from_env().triton else f"{TRITON_SWITCH} is off"
    reason = why_triton_cannot_be_timed(device) or switched_off
    can_write, can_clone = (
        {path: policy for path, policy in all_of.items() if not (reason and path.needs_triton)}
        for all_of in (WRITES, CLONES)
    )
    missing = {*WRITES, *CLONES} - {*can_write, *can_clone}
    rows = [UnavailableRow(path.value, reason) for path in Path if path in missing]
    return can_write, can_clone, rows


@one_thread()
def _measure(args: argparse.Namespace) -> Report:
    config = _config(args)
    writes: list[WriteRow] = []
    steps: list[StepRow] = []
    clones: list[WriteRow] = []
    can_write, can_clone, unavailable = _runnable(config.device)
    bandwidth = copy_bandwidth(config.device, config.copy_bytes)
    for batch in config.batches:
        layered, grouped = Rig(config, batch, 1), Rig(config, batch, config.layers)
        writes += _measure_writes(layered, grouped, can_write, bandwidth)
        steps += _measure_steps(layered, grouped, can_write)
        clones += _measure_clones(grouped, can_clone, bandwidth)
        del layered, grouped  # before the next two are built
    return Report(
        "append",
        args.command,
        config.device,
        {**asdict(config), "device": str(config.device), "dtype": str(config.dtype)},
        (
            Table("writes", _WRITES, writes),
            Table("steps", _STEPS, steps),
            Table("clones", _CLONES, clones),
            Table("unavailable", "Paths that cannot run here.", unavailable),
            *(append_planning.tables(quick=args.quick) if args.scaling else ()),
            Table("targets", _TARGETS, append_targets(config, writes, steps)),
        ),
        {"copy_bandwidth_gb_per_s": bandwidth / 1e9},
    )


def _config(args: argparse.Namespace) -> AppendConfig:
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU: use --device cpu")
    device = torch.empty(0, device=name).device  # with its index
    dtype = _DTYPES[args.dtype or ("bf16" if name == "cuda" else "fp32")]
    shape = (args.layers, args.heads, args.head_dim, args.block_size)
    effort = (3, 24, 1 << 24) if args.quick else (15, 200, 1 << 30)
    return AppendConfig(tuple(args.batch), *shape, device, dtype, *effort)


def append_targets(
    config: AppendConfig, writes: Sequence[WriteRow], steps: Sequence[StepRow]
) -> list[TargetRow]:
    """One verdict for each limit, if the run measured what the limits speak of."""
    measured = (config.device.type, config.dtype, config.layers, config.heads, config.head_dim)
    if measured != _LIMITS_SHAPE:
        return []
    step_of = {(step.batch, step.path_that_ran): step for step in steps}
    rows = []
    for write in writes:
        path = write.path_that_ran
        if write.batch != _LIMITS_BATCH or path not in _LIMITS_PATHS:
            continue
        step = step_of[write.batch, path]
        numbers = (step.plan_us, write.host_us, write.device_us)
        speedups = (step.per_layer_speedup, step.grouped_speedup)
        for (target, limit), value in zip(_LIMITS.items(), numbers + speedups, strict=True):
            sense, bound = limit
            verdict = _verdict(sense, bound, value)
            rows.append(TargetRow(target, path, f"{sense} {bound:g}", value, verdict))
    return rows


def _verdict(sense: str, bound: float, value: float | None) -> str:
    """Never a guess for what has no number."""
    if value is None:
        return "not measured"
    return "met" if (value <= bound if sense == "<=" else value >= bound) else "missed"


# ---------------------------------------------------------------------------- what is measured


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


class Rig:
    """A cache in one arrangement, the sequences in it, and each layer's new tokens."""

    def __init__(self, config: AppendConfig, batch: int, layers_per_group: int) -> None:
        self.config = config
        self.batch = batch
        self.sync = synchronizer(config.device)
        shape = (config.layers, config.heads, config.head_dim, config.block_size, 2 * batch + 1)
        memory = (config.device, config.dtype, NO_TRITON)
        self.kv = KVBlockManager(*shape, *memory, layers_per_group=layers_per_group)
        for cache in (self.kv.keys, self.kv.values):
            cache.copy_(torch.rand_like(cache[0]).expand_as(cache))  # zeros may move faster
        groups = range(0, config.layers, layers_per_group)
        self.groups: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in groups]
        self._second_holder: list[int] = []
        new = (config.layers, batch, config.heads, config.head_dim)
        keys = torch.rand(new, device=config.device, dtype=config.dtype)
        layers = range(config.layers)
        self.tokens = list(zip(layers, keys.unbind(0), (-keys).unbind(0), strict=True))

    def restart(self, policy: AppendPolicy) -> None:
        """Make every sequence one token long: ``block_size - 1`` more go in place."""
        self.kv.policy = policy
        self.kv.free_blocks(0, self._second_holder)
        self._second_holder = []
        for group, lists in enumerate(self.groups):
            layer = group * self.kv.layers_per_group
            for block_ids in lists:
                self.kv.free_blocks(layer, block_ids)
                block_ids.clear()
            self.kv.plan_append(layer, lists)

    def share(self) -> None:
        """Give every sequence's last block a second holder: the next plan has to copy it."""
        self.kv.free_blocks(0, self._second_holder)
        self._second_holder = [block_ids[-1] for block_ids in self.groups[0]]
        self.kv.incref_blocks(self._second_holder)

    def plan(self) -> AppendPlan:
        return self.kv.plan_append(0, self.groups[0])


@dataclass(frozen=True, slots=True)
class Work:
    """A call that makes sequences longer, and what it must be counted as."""

    rig: Rig
    path: Path
    policy: AppendPolicy
    call: Callable[[], object]
    counted: int
    """A call counts ``path`` so many times."""
    launches: int
    """Kernels and copies per call, about."""
    endless: bool = False
    """Such calls store nothing new, and need no fresh blocks."""

    def series(
        self,
        measure: Callable[[Callable[[], object], int, Callable[[], None]], Measured],
        calls: int,
    ) -> Measured:
        if not self.endless:
            self.rig.restart(self.policy)
        with only(self.rig.kv.path_counts, self.path, self.counted * calls):
            return measure(self.call, calls, self.rig.sync)

    def sampler(self, *, wait: bool) -> Callable[[], float]:
        """No more calls in a series than one block has room for."""
        config = self.rig.config
        room = config.launches if self.endless else config.block_size - 1
        calls = max(1, min(room, config.launches // self.launches))
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

    tokens = rig.batch * layers_per_call
    return Work(rig, Path.PER_TOKEN, NO_TRITON, call, tokens, 2 * tokens)


def layer_write(rig: Rig, path: Path, policy: AppendPolicy) -> Work:
    """Writes of one plan, again and again, to one layer after another.

    Layers take turns as in a step, so that no write finds its tokens and slots where the one
    before it left them. All layers together may still fit a large GPU's L2 cache.
    """
    rig.restart(policy)
    plan, layers = rig.plan(), cycle(rig.tokens)

    def call() -> None:
        rig.kv.write(plan, *next(layers))

    return Work(rig, path, policy, call, 1, _launches(path), endless=True)


def per_layer_step(rig: Rig, path: Path, policy: AppendPolicy) -> Work:
    def call() -> None:
        for layer, key, value in rig.tokens:
            rig.kv.append_token_batch(layer, rig.groups[layer], key, value)

    layers = rig.config.layers
    return Work(rig, path, policy, call, layers, layers * (_launches(path) + 1))


def grouped_step(rig: Rig, path: Path, policy: AppendPolicy) -> Work:
    def call() -> None:
        plan = rig.plan()
        for layer, key, value in rig.tokens:
            rig.kv.write(plan, layer, key, value)

    layers = rig.config.layers
    return Work(rig, path, policy, call, layers, layers * _launches(path) + 1)


def _launches(path: Path) -> int:
    if path.needs_triton:
        return 1
    return 4 if path.needs_rows else 2


def plan_us(rig: Rig, path: Path, policy: AppendPolicy, steps: int) -> float:
    """Host time of planning, staging included; a write afterwards shows where plans lead."""
    rig.restart(policy)
    latest: deque[AppendPlan] = deque(maxlen=1)
    with only(rig.kv.path_counts, path, 0):
        microseconds = time_calls(lambda: latest.append(rig.plan()), steps, rig.sync)
    with only(rig.kv.path_counts, path, 1):
        rig.kv.write(latest[0], *rig.tokens[0])
    return microseconds


def clone_us(rig: Rig, path: Path, policy: AppendPolicy, steps: int) -> float:
    """Host time of planning a step in which every sequence has to copy its block."""
    rig.restart(policy)
    total = 0.0
    with only(rig.kv.path_counts, path, steps):
        for _ in range(steps):
            rig.share()
            total += time_calls(rig.plan, 1, rig.sync)
    return total / steps


def clone_work(rig: Rig, path: Path, policy: AppendPolicy) -> Work:
    """The same work for the device, whose time does not include the sharing."""

    def call() -> None:
        rig.share()
        rig.plan()

    return Work(rig, path, policy, call, counted=1, launches=3)


def _measure_writes(
    layered: Rig, grouped: Rig, policies: Policies, bandwidth: float
) -> list[WriteRow]:
    config, batch = grouped.config, grouped.batch
    works = [per_token(layered, layers_per_call=1)]
    works += [layer_write(grouped, path, policy) for path, policy in policies.items()]
    samplers = {("host", work.path): work.sampler(wait=False) for work in works}
    device: dict[Path, float | None] = {}
    if config.device.type == "cuda":
        for work in works:
            samplers["host", work.path]()  # compiles what is about to be captured
            passes = 1 if work.path is Path.PER_TOKEN else -(-_WRITES_PER_GRAPH // config.layers)
            device[work.path] = work.series(kernel_us, passes * config.layers)
            samplers["graph", work.path] = work.series(graph_sampler, passes * config.layers)
    times = in_rounds(samplers, config.rounds, f"batch {batch}: writes")
    floor = batch * config.token_bytes / bandwidth * 1e6
    rows = []
    for path in (work.path for work in works):
        host, graph, kernels = times["host", path], times.get(("graph", path)), device.get(path)
        over = (kernels or host.median_us) / floor
        in_graph = graph.median_us if graph else None
        rows.append(
            WriteRow(batch, path, host.median_us, host.min_us, kernels, in_graph, floor, over)
        )
    return rows


def _measure_clones(rig: Rig, policies: Policies, bandwidth: float) -> list[WriteRow]:
    config, batch = rig.config, rig.batch
    steps = max(1, min(config.block_size - 1, _CLONES_PER_SAMPLE // batch))
    samplers = {
        path: partial(clone_us, rig, path, policy, steps) for path, policy in policies.items()
    }
    times = in_rounds(samplers, config.rounds, f"batch {batch}: copy-on-write")
    floor = batch * config.layers * config.block_size * config.token_bytes / bandwidth * 1e6
    rows = []
    for path, host in times.items():
        kernels = None
        if config.device.type == "cuda":
            kernels = clone_work(rig, path, policies[path]).series(kernel_us, steps)
        over = (kernels or host.median_us) / floor
        rows.append(WriteRow(batch, path, host.median_us, host.min_us, kernels, None, floor, over))
    return rows


def _measure_steps(layered: Rig, grouped: Rig, policies: Policies) -> list[StepRow]:
    config, batch = grouped.config, grouped.batch
    samplers = {("per layer", Path.PER_TOKEN): per_token(layered, config.layers).sampler(wait=True)}
    for path, policy in policies.items():
        samplers["per layer", path] = per_layer_step(layered, path, policy).sampler(wait=True)
        samplers["grouped", path] = grouped_step(grouped, path, policy).sampler(wait=True)
        for kind, steps in (("plan", config.block_size - 1), ("plan a block", config.block_size)):
            samplers[kind, path] = partial(plan_us, grouped, path, policy, steps)
    times = in_rounds(samplers, config.rounds, f"batch {batch}: steps")
    loop = times["per layer", Path.PER_TOKEN]
    rows = [StepRow(batch, Path.PER_TOKEN, None, None, None, loop.median_us, loop.min_us, 1.0)]
    for path in policies:
        plan, block, apart, together = (
            times[kind, path] for kind in ("plan", "plan a block", "per layer", "grouped")
        )
        rows.append(
            StepRow(
                *(batch, path, plan.median_us, plan.min_us, block.median_us),
                *(apart.median_us, apart.min_us, loop.median_us / apart.median_us),
                *(together.median_us, together.min_us, loop.median_us / together.median_us),
            )
        )
    return rows
