"""Carries out plans: picks the path that moves the data, stages its indices, moves it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.errors import TritonUnavailable
from roseinfer.kernels.runtime import why_unusable
from roseinfer.kv.paths import Condition, Path, choose_write_path
from roseinfer.kv.staging import IndexStaging

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    import torch

    from roseinfer.config import AppendPolicy
    from roseinfer.kv.paths import PathCounts
    from roseinfer.kv.plan import AppendPlan
    from roseinfer.kv.storage import KVStorage


class DataMover:
    """Moves the data of append plans between inputs and storage, and counts how."""

    def __init__(
        self,
        storage: KVStorage,
        layers_per_group: int,
        policy: AppendPolicy,
        path_counts: PathCounts,
        work_counts: Counter[str],
    ) -> None:
        self._storage = storage
        self._layers_per_group = layers_per_group
        self._counts = path_counts
        self._staging = IndexStaging(storage.device, work_counts)
        self._kernels: dict[Path, Callable[..., None]] = {}
        self.policy = policy

    @property
    def policy(self) -> AppendPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: AppendPolicy) -> None:
        self._policy = policy
        if policy.triton and not self._kernels:
            reason = why_unusable(self._storage.device)
            if reason:
                _warn_once(reason)
            else:
                self._kernels = _load_kernels()

    def prepare(self, plan: AppendPlan) -> None:
        """Do what comes before any layer's write: copy shared blocks, stage the indices."""
        self.copy_shared(plan)
        if not plan.blocks:
            return
        plan.path = self._write_path(plan)
        columns = [plan.blocks]
        if plan.path.needs_positions:
            columns.append(plan.positions)
        if plan.path.needs_rows:
            columns.append(plan.rows if plan.rows is not None else list(range(plan.num_tokens)))
        plan.staged = self._staging.stage(columns)

    def write(self, plan: AppendPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write one layer of a prepared plan."""
        if plan.staged is None:
            return
        plan.staged.check_usable(self._staging)
        storage, path, columns = self._storage, plan.path, plan.staged.columns
        key, value = storage.as_stored(key), storage.as_stored(value)
        self._counts[path] += 1
        if path is Path.TORCH_SCALAR:
            storage.write_scalar(layer, columns[0], plan.positions[0], key, value)
        elif path is Path.TORCH_VECTOR:
            storage.write_vector(layer, columns[0], columns[1], key, value)
        elif path is Path.TORCH_GATHER:
            block_idx, pos, rows = columns
            key, value = key.index_select(0, rows), value.index_select(0, rows)
            storage.write_vector(layer, block_idx, pos, key, value)
        else:
            where = (columns[0], plan.positions[0]) if path is Path.TRITON_FULL_BATCH else columns
            k_cache, v_cache = storage.key_layers[layer], storage.value_layers[layer]
            self._kernels[path](k_cache, v_cache, key, value, *where)

    def _write_path(self, plan: AppendPlan) -> Path:
        choose = partial(
            choose_write_path,
            self.policy,
            num_tokens=plan.num_tokens,
            identity=plan.rows is None,
            constant_position=plan.constant_position,
        )
        path = choose(triton=self.policy.triton)
        if path.needs_triton and not self._kernels:
            self._counts[Condition.TRITON_UNAVAILABLE] += 1
            return choose(triton=False)
        return path

    def copy_shared(self, plan: AppendPlan) -> None:
        """Carry out the copies of copy-on-write."""
        if not plan.copy_to:
            return
        storage = self._storage
        layers = range(plan.layer, plan.layer + self._layers_per_group)
        if not self.policy.batched_copy_on_write:
            for source, target in zip(plan.copy_from, plan.copy_to, strict=True):
                for layer in layers:
                    storage.copy_block(layer, source, target)
            return
        source_idx, target_idx = self._staging.stage([plan.copy_from, plan.copy_to]).columns
        if self.policy.triton and self._kernels:
            self._counts[Path.CLONE_TRITON] += 1
            caches = storage.group(layers)
            self._kernels[Path.CLONE_TRITON](*caches, *caches, source_idx, target_idx)
            return
        if self.policy.triton:
            self._counts[Condition.TRITON_UNAVAILABLE] += 1
        self._counts[Path.CLONE_TORCH] += 1
        storage.clone_blocks(layers, source_idx, target_idx)


def _load_kernels() -> dict[Path, Callable[..., None]]:
    """The unchecked launcher of each path that has a kernel. This imports Triton."""
    from roseinfer.kernels import append, clone

    return {
        Path.TRITON_FULL_BATCH: append.launch_full_batch,
        Path.TRITON_IDENTITY_POS: append.launch_identity_pos,
        Path.TRITON_GATHER: append.launch_gather,
        Path.CLONE_TRITON: clone.launch_clone,
    }


_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    """Say, once per reason and process, that torch operations write in Triton's place."""
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"Triton KV append is on but cannot run: {reason}. Torch operations write instead; "
        "AppendPolicy(triton=False) says that is meant.",
        TritonUnavailable,
        stacklevel=2,
    )
