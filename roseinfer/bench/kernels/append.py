"""``append``: what an append costs on every path, on the host and on the device.

Two arrangements of the same cache are timed. *Per layer*: every layer has its own block
lists and one ``append_token_batch`` a step. *Grouped*: all layers share their lists, a step
is planned once and then written layer by layer. The baseline is a loop of ``append_token``
over every layer and sequence, its tokens split beforehand at no charge.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from roseinfer.bench.reporting import StepRow, WriteRow
from roseinfer.bench.timing import (
    Work,
    graph_sampler,
    in_rounds,
    kernel_us,
    only,
    synchronizer,
    time_calls,
)
from roseinfer.config import AppendPolicy
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.paths import Path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roseinfer.kv.plan import AppendPlan

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
_WRITES_PER_GRAPH = 96
_CLONES_PER_SAMPLE = 64
"""Blocks copied in one sample; one for every sequence where those are more."""


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


class Rig:
    """A cache in one arrangement, the sequences in it, and each layer's new tokens."""

    def __init__(self, config: AppendConfig, batch: int, layers_per_group: int) -> None:
        self.config = config
        self.batch = batch
        self.sync = synchronizer(config.device)
        self.kv = KVBlockManager(
            num_layers=config.layers,
            num_heads=config.heads,
            head_dim=config.head_dim,
            block_size=config.block_size,
            max_blocks_per_layer=2 * batch + 1,
            device=config.device,
            dtype=config.dtype,
            policy=NO_TRITON,
            layers_per_group=layers_per_group,
        )
        for cache in (self.kv.keys, self.kv.values):
            cache.copy_(torch.rand_like(cache[0]).expand_as(cache))  # zeros may move faster
        self.groups: list[list[list[int]]] = [
            [[] for _ in range(batch)] for _ in range(0, config.layers, layers_per_group)
        ]
        self._second_holder: list[int] = []
        shape = (config.layers, batch, config.heads, config.head_dim)
        keys = torch.rand(shape, device=config.device, dtype=config.dtype)
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

    def work(
        self,
        path: Path,
        policy: AppendPolicy,
        call: Callable[[], None],
        counted: int,
        launches: int,
    ) -> Work:
        """A call that makes sequences longer."""
        restart, room = partial(self.restart, policy), self.config.block_size - 1
        return Work(self.kv.path_counts, path, counted, launches, call, restart, room, self.sync)


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
    return rig.work(Path.PER_TOKEN, NO_TRITON, call, counted=tokens, launches=2 * tokens)


def layer_write(rig: Rig, path: Path, policy: AppendPolicy) -> Work:
    """Writes of one plan, again and again, to one layer after another.

    Layers take turns as in a step, so that no write finds its tokens and slots where the one
    before it left them. All layers together may still fit a large GPU's L2 cache.
    """
    rig.restart(policy)
    plan, layers = rig.plan(), cycle(rig.tokens)

    def call() -> None:
        rig.kv.write(plan, *next(layers))

    return Work(
        rig.kv.path_counts, path, 1, _launches(path), call,
        restart=lambda: None, room=rig.config.launches, sync=rig.sync,
    )  # fmt: skip


def per_layer_step(rig: Rig, path: Path, policy: AppendPolicy) -> Work:
    def call() -> None:
        for layer, key, value in rig.tokens:
            rig.kv.append_token_batch(layer, rig.groups[layer], key, value)

    layers = rig.config.layers
    return rig.work(path, policy, call, counted=layers, launches=layers * (_launches(path) + 1))


def grouped_step(rig: Rig, path: Path, policy: AppendPolicy) -> Work:
    def call() -> None:
        plan = rig.plan()
        for layer, key, value in rig.tokens:
            rig.kv.write(plan, layer, key, value)

    layers = rig.config.layers
    return rig.work(path, policy, call, counted=layers, launches=layers * _launches(path) + 1)


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
    """The same for the device, which sharing does not concern."""

    def call() -> None:
        rig.share()
        rig.plan()

    return rig.work(path, policy, call, counted=1, launches=3)


def measure_writes(
    layered: Rig, grouped: Rig, policies: Mapping[Path, AppendPolicy], bandwidth: float
) -> list[WriteRow]:
    config, batch = grouped.config, grouped.batch
    works = [per_token(layered, layers_per_call=1)]
    works += [layer_write(grouped, path, policy) for path, policy in policies.items()]
    samplers = {("host", work.path): work.sampler(config.launches, wait=False) for work in works}
    device: dict[Path, float | None] = {}
    if config.device.type == "cuda":
        for work in works:
            samplers["host", work.path]()  # compiles what is about to be captured
            passes = 1 if work.path is Path.PER_TOKEN else -(-_WRITES_PER_GRAPH // config.layers)
            device[work.path] = work.series(kernel_us, passes * config.layers)
            samplers["graph", work.path] = work.series(graph_sampler, passes * config.layers)
    times = in_rounds(samplers, config.rounds, f"batch {batch}: writes")
    floor = batch * config.token_bytes / bandwidth * 1e6
    return [
        WriteRow.of(batch, path.value, host, device.get(path), times.get(("graph", path)), floor)
        for (kind, path), host in times.items()
        if kind == "host"
    ]


def measure_clones(
    rig: Rig, policies: Mapping[Path, AppendPolicy], bandwidth: float
) -> list[WriteRow]:
    config, batch = rig.config, rig.batch
    steps = max(1, min(config.block_size - 1, _CLONES_PER_SAMPLE // batch))
    times = in_rounds(
        {path: partial(clone_us, rig, path, policy, steps) for path, policy in policies.items()},
        config.rounds,
        f"batch {batch}: copy-on-write",
    )
    device: dict[Path, float | None] = {}
    if config.device.type == "cuda":
        for path, policy in policies.items():
            device[path] = clone_work(rig, path, policy).series(kernel_us, steps)
    moved = batch * config.layers * config.block_size * config.token_bytes
    floor = moved / bandwidth * 1e6
    return [
        WriteRow.of(batch, path.value, host, device.get(path), None, floor)
        for path, host in times.items()
    ]


def measure_steps(
    layered: Rig, grouped: Rig, policies: Mapping[Path, AppendPolicy]
) -> list[StepRow]:
    config, batch = grouped.config, grouped.batch
    block = config.block_size
    loop = per_token(layered, config.layers).sampler(config.launches, wait=True)
    samplers = {("per layer", Path.PER_TOKEN): loop}
    for path, policy in policies.items():
        apart, together = per_layer_step(layered, path, policy), grouped_step(grouped, path, policy)
        samplers["per layer", path] = apart.sampler(config.launches, wait=True)
        samplers["grouped", path] = together.sampler(config.launches, wait=True)
        samplers["plan", path] = partial(plan_us, grouped, path, policy, block - 1)
        samplers["plan a block", path] = partial(plan_us, grouped, path, policy, block)
    times = in_rounds(samplers, config.rounds, f"batch {batch}: steps")
    return [
        StepRow.of(
            batch, path.value, loop=times["per layer", Path.PER_TOKEN],
            per_layer=times["per layer", path], grouped=times.get(("grouped", path)),
            plan=times.get(("plan", path)), plan_block=times.get(("plan a block", path)),
        )
        for path in (Path.PER_TOKEN, *policies)
    ]  # fmt: skip
