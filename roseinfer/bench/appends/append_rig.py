"""A cache and sequences in it, to be appended to by a path of one's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.bench.timing import synchronizer
from roseinfer.config import AppendPolicy
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.paths import Path

if TYPE_CHECKING:
    from roseinfer.kv.plan import AppendPlan

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
