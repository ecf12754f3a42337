"""KVBlockManager: a paged KV cache whose fast paths all end where ``append_token`` ends."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from roseinfer.config import AppendPolicy
from roseinfer.errors import BadArgument, BadRefcount
from roseinfer.kv import plan as planning
from roseinfer.kv.mover import DataMover
from roseinfer.kv.paths import Condition, Path, PathCounts
from roseinfer.kv.pool import BlockPool, KVBlockInfo
from roseinfer.kv.storage import KVStorage
from roseinfer.kv.work import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kv.plan import AppendPlan, Survey


class KVBlockManager:
    """Keys and values of many sequences in blocks of ``block_size`` tokens.

    A sequence is a plain list of block ids, owned by the caller and changed in place. Ids
    are global: ``group * max_blocks_per_layer + index``. By default every layer is a group
    of its own, so a sequence has one list per layer. With ``layers_per_group`` larger,
    that many consecutive layers share one list: ``plan_append`` decides once where tokens
    go and ``write`` is called once per layer.

    Block 0 of every group is never handed out. All calls of one manager belong on one
    CUDA stream, like those of any tensor.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        max_blocks_per_layer: int,
        device: torch.device | str,
        dtype: torch.dtype,
        policy: AppendPolicy | None = None,
        *,
        layers_per_group: int = 1,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "block_size": block_size,
            "layers_per_group": layers_per_group,
        }
        for name, size in sizes.items():
            if size < 1:
                raise BadArgument(f"{name} must be at least 1, not {size}")
        if max_blocks_per_layer < 2:
            raise BadArgument(
                f"max_blocks_per_layer={max_blocks_per_layer}: at least 2 are needed, "
                "since block 0 is scratch"
            )
        if num_layers % layers_per_group:
            raise BadArgument(
                f"{num_layers} layers do not divide into groups of {layers_per_group}"
            )
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.max_blocks_per_layer = max_blocks_per_layer
        self.layers_per_group = layers_per_group
        self.path_counts: PathCounts = PathCounts()
        self.work_counts: Counter[str] = Counter()
        """What every step costs on the host, by ``Work``."""
        self._storage = KVStorage(
            (num_layers, max_blocks_per_layer, num_heads, block_size, head_dim),
            torch.device(device),
            dtype,
        )
        self._pools = [
            BlockPool(
                layer=group * layers_per_group,
                first_id=group * max_blocks_per_layer,
                size=max_blocks_per_layer,
            )
            for group in range(num_layers // layers_per_group)
        ]
        self._mover = DataMover(
            self._storage,
            layers_per_group,
            policy or AppendPolicy.from_env(),
            self.path_counts,
            self.work_counts,
        )

    @property
    def keys(self) -> torch.Tensor:
        """All keys, ``[layers, blocks, kv_heads, block_size, head_dim]``."""
        return self._storage.keys

    @property
    def values(self) -> torch.Tensor:
        """All values, shaped like ``keys``."""
        return self._storage.values

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.dtype

    @property
    def policy(self) -> AppendPolicy:
        """Which optimisations may run. May be replaced between calls."""
        return self._mover.policy

    @policy.setter
    def policy(self, policy: AppendPolicy) -> None:
        self._mover.policy = policy

    # ------------------------------------------------------------------ the slow reference

    def append_token(
        self, layer_idx: int, block_ids: list[int], key: torch.Tensor, value: torch.Tensor
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
        last = pool.held(block_ids[-1]) if block_ids else None
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

    # ----------------------------------------------------------------------- the fast paths

    def append_token_batch(
        self,
        layer_idx: int,
        block_ids_list: Sequence[list[int] | None],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Append row ``i`` of ``[batch, heads, head_dim]`` to ``block_ids_list[i]``.

        A row whose list is None is padding: it may write to the scratch block only.
        """
        pool = self._own_pool(layer_idx, "append_token_batch")
        self._check_inputs(key, value, (len(block_ids_list), self.num_heads, self.head_dim))
        seen = self._survey(pool, block_ids_list, None)
        if not self.policy.batched:
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

    def register_prefill_layer(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> list[int]:
        """Store a whole prompt, ``[1, heads, tokens, head_dim]``, in new blocks; return them."""
        pool = self._own_pool(layer_idx, "register_prefill_layer")
        num_tokens = key.shape[2] if key.dim() == 4 else 0
        self._check_inputs(key, value, (1, self.num_heads, num_tokens, self.head_dim))
        block_ids: list[int] = []
        if num_tokens:
            plan = self._plan(pool, [block_ids], [num_tokens])
            self._mover.write(plan, layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return block_ids

    def plan_append(
        self,
        layer_idx: int,
        block_ids_list: Sequence[list[int] | None],
        num_tokens: Sequence[int] | None = None,
    ) -> AppendPlan:
        """Make room for tokens in all layers of ``layer_idx``'s group, and say where they go.

        One token per list, or ``num_tokens[i]`` for list ``i``; None instead of a list is a
        padding row, whose token goes to the scratch block. From here on the lists count
        the tokens as stored and shared blocks have been copied; what remains is one
        ``write`` per layer.
        """
        return self._plan(self._pool(layer_idx), block_ids_list, num_tokens)

    def reserve(
        self, layer_idx: int, block_ids_list: Sequence[list[int]], num_tokens: Sequence[int]
    ) -> None:
        """As ``plan_append``, for a writer that finds the slots by itself: there is no plan.

        The lists count the tokens as stored. ``truncate`` takes back what was not written.
        """
        pool = self._pool(layer_idx)
        seen = self._survey(pool, block_ids_list, num_tokens)
        plan = planning.reserve(pool, self.block_size, seen, num_tokens)
        self._note(seen, frozenset())
        self._mover.copy_shared(plan)

    def truncate(self, layer_idx: int, block_ids: list[int], length: int) -> None:
        """Keep the first ``length`` tokens of a list; blocks with none of them are freed.

        What follows them must be the list's alone: others would lose it too.
        """
        pool = self._pool(layer_idx)
        infos = self._infos(pool, block_ids)
        stored = sum(info.length for info in infos)
        if not 0 <= length <= stored:
            raise BadArgument(f"truncate to {length}, but {stored} tokens are stored")
        kept = -(-length // self.block_size)
        if length % self.block_size:
            last = infos[kept - 1]
            cut = length - (kept - 1) * self.block_size
            if cut < last.length and pool.refcounts[last.block_index] > 1:
                raise BadRefcount(
                    f"block {block_ids[kept - 1]} is shared: its tokens are others' too and "
                    "cannot be cut off"
                )
            last.length = cut
        for block_id in block_ids[kept:]:
            pool.drop(block_id - pool.first_id)
        del block_ids[kept:]

    def write(
        self, plan: AppendPlan, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write one layer's ``[tokens, heads, head_dim]`` where ``plan`` says.

        Tokens come in the order of the plan's lists, a list's tokens together.
        """
        pool = self._pool(layer_idx)
        if pool.layer != plan.layer:
            raise BadArgument(
                f"the plan is for layers {plan.layer} to {plan.layer + self.layers_per_group - 1}; "
                f"layer {layer_idx} has other block lists"
            )
        self._check_inputs(key, value, (plan.num_inputs, self.num_heads, self.head_dim))
        self._mover.write(plan, layer_idx, key, value)

    # -------------------------------------------------------------------- reading, ownership

    def gather_sequence(
        self, layer_idx: int, block_ids: Sequence[int], total_len: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``total_len`` stored tokens (default: all), ``[heads, tokens, head_dim]``."""
        pool = self._pool(layer_idx)
        infos = self._infos(pool, block_ids)
        stored = sum(info.length for info in infos)
        length = stored if total_len is None else total_len
        if not 0 <= length <= stored:
            raise BadArgument(f"total_len={length}, but {stored} tokens are stored")
        return self._storage.gather(layer_idx, [info.block_index for info in infos], length)

    def incref_blocks(self, block_ids: Sequence[int]) -> None:
        """Add a holder to every block: the list may now be used as another sequence's too."""
        held = []
        for block_id in block_ids:
            pool = self._pools[self._group_of(block_id)]
            held.append((pool, pool.held(block_id).block_index))
        for pool, index in held:
            pool.share(index)

    def free_blocks(self, layer_idx: int, block_ids: Sequence[int]) -> None:
        """Take a holder off every block; the last one frees it. The list is left as it is."""
        pool = self._pool(layer_idx)
        pool.check_release(block_ids)
        for block_id in block_ids:
            pool.drop(block_id - pool.first_id)

    def num_free_blocks(self, layer_idx: int) -> int:
        return self._pool(layer_idx).num_free

    def refcount(self, block_id: int) -> int:
        """How many lists hold the block; 0 when it is free."""
        return self._pools[self._group_of(block_id)].refcount(block_id)

    def block_info(self, block_id: int) -> KVBlockInfo:
        """A held block's live record, which changes as tokens are appended.

        A free block's has length 0, and is nobody's record to keep.
        """
        return self._pools[self._group_of(block_id)].info(block_id)

    # ------------------------------------------------------------------------------- inside

    def _pool(self, layer_idx: int) -> BlockPool:
        if not 0 <= layer_idx < self.num_layers:
            raise BadArgument(f"layer {layer_idx} of a cache with {self.num_layers} layers")
        return self._pools[layer_idx // self.layers_per_group]

    def _own_pool(self, layer_idx: int, call: str) -> BlockPool:
        if self.layers_per_group > 1:
            raise BadArgument(
                f"{call} moves one layer alone, and here {self.layers_per_group} layers share a "
                "block list: use plan_append and write"
            )
        return self._pool(layer_idx)

    def _infos(self, pool: BlockPool, block_ids: Sequence[int]) -> list[KVBlockInfo]:
        """The records of a list that must be one sequence: all blocks are full but the last."""
        infos = [pool.held(block_id) for block_id in block_ids]
        for info, block_id in zip(infos[:-1], block_ids, strict=False):
            if info.length < self.block_size:
                raise BadArgument(
                    f"block {block_id} holds {info.length} of {self.block_size} tokens and is not "
                    "the last of its list: the list is not one sequence"
                )
        return infos

    def _group_of(self, block_id: int) -> int:
        group = block_id // self.max_blocks_per_layer
        # An id outside every group is refused, with its range, by the pool it is nearest to.
        return min(max(group, 0), len(self._pools) - 1)

    def _check_inputs(self, key: torch.Tensor, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        if key.shape != shape or value.shape != shape:
            raise BadArgument(
                f"key and value must be {list(shape)}; they are {list(key.shape)} and "
                f"{list(value.shape)}"
            )
        if not (key.is_floating_point() and value.is_floating_point()):
            raise BadArgument(f"key and value must be floats; they are {key.dtype}, {value.dtype}")
        device = self._storage.device
        if key.device != device or value.device != device:
            raise BadArgument(
                f"the cache is on {device}; key is on {key.device}, value on {value.device}"
            )

    def _rows_apart(
        self, seen: Survey, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> planning.Apart | None:
        """The rows that the policy sends through ``append_token``, if there are any."""
        policy = self._mover.policy
        if policy.batched_rollover and policy.batched_copy_on_write:
            return None
        rows = frozenset(
            row
            for row, condition in seen.needs_block.items()
            if condition is not Condition.PADDING
            and not (
                policy.batched_copy_on_write
                if condition is Condition.COPY_ON_WRITE
                else policy.batched_rollover
            )
        )

        def append(row: int) -> None:
            block_ids = seen.block_lists[row]
            if block_ids is not None:
                self.append_token(layer_idx, block_ids, key[row], value[row])

        return planning.Apart(rows, append) if rows else None

    def _plan(
        self,
        pool: BlockPool,
        block_lists: Sequence[list[int] | None],
        counts: Sequence[int] | None,
    ) -> AppendPlan:
        plan = self._commit(pool, self._survey(pool, block_lists, counts), counts)
        self._mover.prepare(plan)
        return plan

    def _survey(
        self,
        pool: BlockPool,
        block_lists: Sequence[list[int] | None],
        counts: Sequence[int] | None,
    ) -> Survey:
        """What an append meets, once it is known to find all the blocks it needs."""
        seen = planning.survey(pool, self.block_size, block_lists, counts)
        pool.require(seen.blocks_needed)
        return seen

    def _commit(
        self,
        pool: BlockPool,
        seen: Survey,
        counts: Sequence[int] | None,
        apart: planning.Apart | None = None,
    ) -> AppendPlan:
        plan = planning.commit(pool, self.block_size, seen, counts, apart)
        self._note(seen, apart.rows if apart else frozenset())
        return plan

    def _note(self, seen: Survey, apart: frozenset[int]) -> None:
        """Count a plan, and what its rows met but for those that went apart."""
        self.work_counts[Work.KV_PLANS] += 1
        met = self.path_counts
        for row, condition in seen.needs_block.items():
            if row not in apart:
                met[condition] += 1
        in_place = len(seen.positions) - len(seen.needs_block)
        if in_place:
            met[Condition.IN_PLACE] += in_place
