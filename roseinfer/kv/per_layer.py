"""The calls of a cache that move one layer alone: every layer has block lists of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, wrong_kind
from roseinfer.kv import plan as planning
from roseinfer.kv.paths import Condition, Path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.kv.paths import PathCounts
    from roseinfer.kv.plan import Apart, AppendPlan, Survey
    from roseinfer.kv.pool import BlockPool
    from roseinfer.kv.storage import DataMover, KVStorage


class PerLayerCalls:
    """Appends to one layer's block lists. They are refused where several layers share a list.

    The manager that inherits them has what they use.
    """

    num_heads: int
    head_dim: int
    block_size: int
    layers_per_group: int
    has_own_lists: bool
    path_counts: PathCounts
    _storage: KVStorage
    _mover: DataMover
    _pool: Callable[[int], BlockPool]
    _check_inputs: Callable[[Tensor, Tensor, tuple[int, ...]], None]
    plan_append: Callable[..., AppendPlan]
    _commit: Callable[..., AppendPlan]

    def append_token(
        self, layer_idx: int, block_ids: list[int], key: Tensor, value: Tensor
    ) -> None:
        """Append one token, ``[heads, head_dim]``, to one sequence's list in one layer.

        Every fast path must leave the whole cache as calls of this would.
        """
        pool = self._own_pool(layer_idx, "append_token")
        self._check_inputs(key, value, (self.num_heads, self.head_dim))
        if not isinstance(block_ids, list):
            raise BadArgument(f"a block list must be a list, not {block_ids!r}")
        storage = self._storage
        key, value = storage.as_stored(key), storage.as_stored(value)
        try:
            last = pool.held(block_ids[-1]) if block_ids else None
        except Exception as error:
            raise wrong_kind(error, "block_ids must be a list of block ids", block_ids) from None
        if last is None:
            met = Condition.FRESH
            info = pool.take(start=0, length=0)
            block_ids.append(pool.first_id + info.block_index)
        elif last.length == self.block_size:
            shared = pool.refcounts[last.block_index] > 1
            met = Condition.ROLLOVER_SHARED if shared else Condition.ROLLOVER
            info = pool.take(start=last.start + last.length, length=0)
            block_ids.append(pool.first_id + info.block_index)
        elif pool.refcounts[last.block_index] > 1:
            met = Condition.COPY_ON_WRITE
            info = pool.take(start=last.start, length=last.length)
            storage.copy_block(layer_idx, last.block_index, info.block_index)
            pool.drop(last.block_index)
            block_ids[-1] = pool.first_id + info.block_index
        else:
            met = Condition.IN_PLACE
            info = last
        storage.write_token(layer_idx, info.block_index, info.length, key, value)
        info.length += 1
        self.path_counts[met] += 1
        self.path_counts[Path.PER_TOKEN] += 1

    def append_token_batch(
        self, layer_idx: int, block_ids_list: Sequence[list[int] | None], key: Tensor, value: Tensor
    ) -> None:
        """Append row ``i`` of ``[batch, heads, head_dim]`` to ``block_ids_list[i]``.

        A row whose list is None is padding: it may write to the scratch block only.
        """
        pool = self._own_pool(layer_idx, "append_token_batch")
        try:
            rows = len(block_ids_list)
        except TypeError as error:
            wanted = "block_ids_list must be a list of block lists"
            raise wrong_kind(error, wanted, block_ids_list) from None
        self._check_inputs(key, value, (rows, self.num_heads, self.head_dim))
        seen = planning.survey(pool, block_ids_list, None)
        if not self._mover.policy.batched:
            for row, block_ids in enumerate(block_ids_list):
                if block_ids is None:
                    self.path_counts[Condition.PADDING] += 1
                    continue
                self.append_token(layer_idx, block_ids, key[row], value[row])
            return
        apart = self._rows_apart(seen, layer_idx, key, value)
        plan = self._commit(pool, seen, None, apart)
        self._mover.prepare(plan)
        self._mover.write(plan, layer_idx, key, value)

    def register_prefill_layer(self, layer_idx: int, key: Tensor, value: Tensor) -> list[int]:
        """Store a whole prompt, ``[1, heads, tokens, head_dim]``, in new blocks; return them."""
        self._own_pool(layer_idx, "register_prefill_layer")
        shape: Sequence[int] = getattr(key, "shape", ())
        num_tokens = shape[2] if len(shape) == 4 else 0
        self._check_inputs(key, value, (1, self.num_heads, num_tokens, self.head_dim))
        block_ids: list[int] = []
        if num_tokens:
            plan = self.plan_append(layer_idx, [block_ids], [num_tokens])
            self._mover.write(plan, layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return block_ids

    def _own_pool(self, layer_idx: int, call: str) -> BlockPool:
        if not self.has_own_lists:
            raise BadArgument(
                f"{call} moves one layer alone, and here {self.layers_per_group} layers share a "
                "block list: use plan_append and write"
            )
        return self._pool(layer_idx)

    def _rows_apart(self, seen: Survey, layer_idx: int, key: Tensor, value: Tensor) -> Apart | None:
        """Find the rows that the policy sends through ``append_token``."""
        policy = self._mover.policy
        if policy.batched_rollover and policy.batched_copy_on_write:
            return None
        apart = {}
        for row, met in seen.needs_block.items():
            copies = met is Condition.COPY_ON_WRITE
            batched = policy.batched_copy_on_write if copies else policy.batched_rollover
            block_ids = seen.block_lists[row]
            if block_ids is not None and not batched:
                apart[row] = partial(self.append_token, layer_idx, block_ids, key[row], value[row])
        return apart
