"""The paged KV cache, whose fast paths all leave it as ``append_token`` would."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roseinfer.config import AppendPolicy
from roseinfer.errors import BadArgument, wrong_kind
from roseinfer.kv import plan as planning
from roseinfer.kv import truncation
from roseinfer.kv.calls import GroupCalls, PerLayerCalls
from roseinfer.kv.groups import arrange, check_policy, checked_device, checked_size, given_back
from roseinfer.kv.pool import BlockPool, KVBlockInfo
from roseinfer.kv.storage import DataMover, KVStorage
from roseinfer.paths import Condition, PathCounts, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from roseinfer.kv.plan import AppendPlan, Survey


_MOST_LAYERS = 1 << 16
"""The manager keeps a few numbers for each."""


class KVBlockManager(PerLayerCalls, GroupCalls):
    """Keys and values of many sequences in blocks of ``block_size`` tokens.

    A sequence is a plain list of block ids, owned by the caller and changed in place. Ids are
    global: ``group * max_blocks_per_layer + index``. By default every layer is a group of its own,
    so a sequence has one list per layer. With ``layers_per_group`` larger, that many consecutive
    layers share one list: ``plan_append`` decides once where tokens go and ``write`` is called once
    per layer. ``PerLayerCalls`` move one layer alone, ``append_token`` among them.

    Given the ``windows`` of all layers, those of the same window share lists, up to
    ``layers_per_group`` of them, and all groups take blocks from one pool, whose ids are block
    indices. ``give_back`` takes from a list what has left its window.

    Block 0 of every group is never handed out. All calls of one manager belong on one CUDA stream.
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
        layers_per_group: int | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self.num_layers = num_layers = checked_size("num_layers", num_layers)
        if num_layers > _MOST_LAYERS:
            raise BadArgument(f"num_layers must be at most {_MOST_LAYERS}, not {num_layers}")
        self.num_heads = num_heads = checked_size("num_heads", num_heads)
        self.head_dim = head_dim = checked_size("head_dim", head_dim)
        self.block_size = block_size = checked_size("block_size", block_size)
        max_blocks_per_layer = checked_size("max_blocks_per_layer", max_blocks_per_layer)
        self.max_blocks_per_layer = max_blocks_per_layer
        if max_blocks_per_layer < 2:
            raise BadArgument(
                f"max_blocks_per_layer={max_blocks_per_layer}: at least 2 are needed, "
                "since block 0 is scratch"
            )
        self.path_counts: PathCounts = PathCounts()
        self.work_counts: Counter[str] = Counter()
        """How much work the host has done, by ``Work``."""
        arranged = arrange(num_layers, layers_per_group, windows)
        self.groups = arranged.groups
        self.layers_per_group = arranged.layers_per_group
        self.one_pool = arranged.one_pool
        """All groups take their blocks from one pool."""
        self.has_own_lists = self.layers_per_group == 1 and not self.one_pool
        """Every layer has block lists of its own."""
        self._planes, self._group_of = arranged.planes, arranged.group_of
        shape = (arranged.num_planes, max_blocks_per_layer, num_heads, block_size, head_dim)
        self._storage = KVStorage(shape, checked_device(device), dtype)
        self.keys, self.values = self._storage.keys, self._storage.values
        """All keys and all values, ``[layers, blocks, kv_heads, block_size, head_dim]``; with
        windows, the layers of any one group."""
        self.device, self.dtype = self.keys.device, dtype
        self._pools = [
            BlockPool(
                layer=group * self.layers_per_group,
                first_id=group * max_blocks_per_layer,
                size=max_blocks_per_layer,
                block_size=block_size,
                gives_back=self.one_pool,
            )
            for group in range(1 if self.one_pool else len(self.groups))
        ]
        policy = AppendPolicy.from_env() if policy is None else policy
        check_policy(policy)
        self._mover = DataMover(
            self._storage, self.layers_per_group, policy, self.path_counts, self.work_counts
        )

    @property
    def policy(self) -> AppendPolicy:
        """The policy says which optimisations may run. It may be replaced between calls."""
        return self._mover.policy

    @policy.setter
    def policy(self, policy: AppendPolicy) -> None:
        check_policy(policy)
        self._mover.use(policy)

    # ------------------------------------------------------------------------------ writing

    def plan_append(
        self,
        layer_idx: int,
        block_ids_list: Sequence[list[int] | None],
        num_tokens: Sequence[int] | None = None,
    ) -> AppendPlan:
        """Make room for tokens in all layers of ``layer_idx``'s group, and plan where they go.

        A list gets one token, or ``num_tokens[i]``; None instead of a list is a padding row, whose
        token goes to the scratch block. From here on the lists count the tokens as stored and
        shared blocks have been copied; what remains is one ``write`` per layer.
        """
        pool = self._pool(layer_idx)
        plan = self._commit(pool, planning.survey(pool, block_ids_list, num_tokens), num_tokens)
        plan.group = self._group_of[layer_idx]
        self._mover.prepare(plan)
        return plan

    def reserve(
        self, layer_idx: int, block_ids_list: Sequence[list[int]], num_tokens: Sequence[int]
    ) -> None:
        """Make room as ``plan_append`` does, for a writer that finds the slots without a plan.

        The lists count the tokens as stored. ``truncate`` takes back what was not written.
        """
        pool = self._pool(layer_idx)
        seen = planning.survey(pool, block_ids_list, num_tokens)
        self._mover.copy_shared(self._commit(pool, seen, num_tokens))

    def truncate(self, layer_idx: int, block_ids: list[int], length: int) -> None:
        """Keep the first ``length`` tokens of a list; blocks with none of them are let go.

        Where a block that others hold is cut, the list gets a copy, which what was let go may make
        room for.
        """
        self.truncate_batch(layer_idx, [block_ids], [length])

    def truncate_batch(
        self, layer_idx: int, block_ids_list: Sequence[list[int]], lengths: Sequence[int]
    ) -> None:
        """Truncate list ``i`` to ``lengths[i]`` tokens, one after the other; all lists or none."""
        pool = self._pool(layer_idx)
        try:
            stored = self._check_cuts(layer_idx, block_ids_list, lengths)
            cuts = truncation.Cuts.one_by_one(pool, block_ids_list, stored, lengths)
            cuts.require_room()
        except Exception as error:
            wanted = "block_ids must be a list of block ids, and length a whole number, for each"
            raise wrong_kind(error, wanted, block_ids_list, lengths) from None
        for plan in cuts.commit():
            self._mover.copy_shared(plan)

    def write(self, plan: AppendPlan, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Write one layer's ``[tokens, heads, head_dim]`` where ``plan`` says.

        Tokens come in the order of the plan's lists.
        """
        self._pool(layer_idx)
        try:
            planned = plan.group
        except AttributeError as error:
            wanted = "plan must be what plan_append returned"
            raise wrong_kind(error, wanted, plan) from None
        if planned != self._group_of[layer_idx]:
            layers = ", ".join(map(str, self.groups[planned].layers))
            raise BadArgument(
                f"the plan is for layers {layers}; layer {layer_idx} has other block lists"
            )
        self._check_inputs(key, value, (plan.num_inputs, self.num_heads, self.head_dim))
        self._mover.write(plan, self._planes[layer_idx], key, value)

    # -------------------------------------------------------------------- reading, ownership

    def gather_sequence(
        self, layer_idx: int, block_ids: Sequence[int], total_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read the first ``total_len`` tokens, or all stored, as ``[heads, tokens, head_dim]``.

        What was given back is left out, and does not count.
        """
        pool = self._pool(layer_idx)
        try:
            infos = self._infos(pool, self._kept(layer_idx, block_ids))
            stored = sum(info.length for info in infos)
            length = stored if total_len is None else operator.index(total_len)
        except Exception as error:
            wanted = "block_ids must be a list of block ids, and total_len a whole number or None"
            raise wrong_kind(error, wanted, block_ids, total_len) from None
        if not 0 <= length <= stored:
            raise BadArgument(f"total_len={length}, but {stored} tokens are stored")
        return self._storage.gather(
            self._planes[layer_idx], [info.block_index for info in infos], length
        )

    def incref_blocks(self, block_ids: Sequence[int]) -> None:
        """Add a holder to every block: the list may now be used as another sequence's too."""
        held = []
        try:
            for block_id in block_ids:
                pool = self._pool_of(block_id)
                held.append((pool, pool.held(block_id).block_index))
        except Exception as error:
            raise wrong_kind(error, "block_ids must be a list of block ids", block_ids) from None
        for pool, index in held:
            pool.share(index)

    def free_blocks(self, layer_idx: int, block_ids: Sequence[int]) -> None:
        """Take a holder off every block; the last one frees it. The list is left as it is."""
        pool = self._pool(layer_idx)
        try:
            block_ids = list(map(operator.index, self._kept(layer_idx, block_ids)))
        except Exception as error:
            raise wrong_kind(error, "block_ids must be a list of block ids", block_ids) from None
        pool.check_release(block_ids)
        for block_id in block_ids:
            pool.drop(block_id - pool.first_id)

    def caches(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, ``[blocks, kv_heads, block_size, head_dim]``."""
        plane = self._planes[layer_idx]
        return self._storage.key_layers[plane], self._storage.value_layers[plane]

    def first_id(self, layer_idx: int) -> int:
        """Return the id of the scratch block of a layer's pool: others count on from it."""
        return self._pool(layer_idx).first_id

    def group_of(self, layer_idx: int) -> int:
        """Return which of the ``groups`` a layer is in: a sequence has a list for each."""
        return self._group_of[layer_idx]

    def num_free_blocks(self, layer_idx: int) -> int:
        return self._pool(layer_idx).num_free

    def refcount(self, block_id: int) -> int:
        """Return how many lists hold the block: 0 when it is free."""
        return self._pool_of(block_id).refcount(block_id)

    def block_info(self, block_id: int) -> KVBlockInfo:
        """Return a held block's live record, which changes as tokens are appended.

        A free block's record has length 0 and must not be kept.
        """
        return self._pool_of(block_id).info(block_id)

    # ------------------------------------------------------------------------------- inside

    def _pool(self, layer_idx: int) -> BlockPool:
        try:
            if 0 <= layer_idx < self.num_layers:
                return self._pools[0 if self.one_pool else self._group_of[layer_idx]]
        except Exception as error:
            raise wrong_kind(error, "layer_idx must be a whole number", layer_idx) from None
        raise BadArgument(f"layer {layer_idx} of a cache with {self.num_layers} layers")

    def _check_cuts(
        self, layer_idx: int, lists: Sequence[list[int]], lengths: Sequence[int]
    ) -> list[list[KVBlockInfo]]:
        """Raise for what cannot be cut; return the records of every list's blocks."""
        pool = self._pool(layer_idx)
        stored = [self._infos(pool, self._kept(layer_idx, block_ids)) for block_ids in lists]
        group = self.groups[self._group_of[layer_idx]]
        truncation.check(pool, group, lists, stored, lengths)
        return stored

    def _kept(self, layer_idx: int, block_ids: Sequence[int]) -> Sequence[int]:
        """Return a list without what was given back."""
        if self.groups[self._group_of[layer_idx]].window is None:
            return block_ids
        return block_ids[given_back(block_ids) :]

    def _infos(self, pool: BlockPool, block_ids: Sequence[int]) -> list[KVBlockInfo]:
        """Return the records of a list; raise unless all blocks but the last are full."""
        infos = [pool.held(block_id) for block_id in block_ids]
        for info, block_id in zip(infos[:-1], block_ids, strict=False):
            if info.length < self.block_size:
                raise BadArgument(
                    f"block {block_id} holds {info.length} of {self.block_size} tokens and is not "
                    "the last of its list: the list is not one sequence"
                )
        return infos

    def _pool_of(self, block_id: int) -> BlockPool:
        try:
            group = block_id // self.max_blocks_per_layer
            # An id outside every group is refused, with its range, by the pool it is nearest to.
            return self._pools[min(max(group, 0), len(self._pools) - 1)]
        except Exception as error:
            raise wrong_kind(error, "a block id must be a whole number", block_id) from None

    def _check_inputs(self, key: Tensor, value: Tensor, shape: tuple[int, ...]) -> None:
        try:
            floats = key.is_floating_point() and value.is_floating_point()
        except (AttributeError, TypeError) as error:
            raise wrong_kind(error, "key and value must be tensors", key, value) from None
        if key.shape != shape or value.shape != shape:
            raise BadArgument(
                f"key and value must be {list(shape)}; they are {list(key.shape)} and "
                f"{list(value.shape)}"
            )
        if not floats:
            raise BadArgument(f"key and value must be floats; they are {key.dtype}, {value.dtype}")
        if key.device != self.device or value.device != self.device:
            raise BadArgument(
                f"the cache is on {self.device}; key is on {key.device}, value on {value.device}"
            )

    def _commit(
        self,
        pool: BlockPool,
        seen: Survey,
        counts: Sequence[int] | None,
        apart: planning.Apart | None = None,
    ) -> AppendPlan:
        """Commit an append, and count what its rows met. Rows apart count for themselves."""
        self.work_counts[Work.KV_PLANS] += 1
        met = self.path_counts
        for row, condition in seen.needs_block.items():
            if not apart or row not in apart:
                met[condition] += 1
        in_place = len(seen.positions) - len(seen.needs_block)
        if in_place:
            met[Condition.IN_PLACE] += in_place
        return planning.commit(pool, seen, counts, apart)


@dataclass(slots=True)
class StepAppend:
    """Appends the new tokens of one step, a layer at a time.

    ``block_lists[i][g]`` is sequence ``i``'s list in layer group ``g``, and ``counts[i]`` is how
    many tokens it gets. A group is planned when its first layer is written.
    """

    kv: KVBlockManager
    block_lists: Sequence[Sequence[list[int]]]
    counts: Sequence[int]
    one_each: bool
    """Every sequence has one token."""
    plans: dict[int, AppendPlan] = field(default_factory=dict)
    """The plan of each group, once it is made."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Append ``[tokens, kv_heads, head_dim]`` to every sequence in one layer."""
        group = self.kv.group_of(layer)
        if group not in self.plans:
            lists = [own[group] for own in self.block_lists]
            if self.one_each and self.kv.has_own_lists:  # where all policies apply
                self.kv.append_token_batch(layer, lists, key, value)
                return
            if self.kv.one_pool:
                self.plan_all()
            else:
                self.plans[group] = self.kv.plan_append(layer, lists, self.counts)
        self.kv.write(self.plans[group], layer, key, value)

    def plan_all(self) -> None:
        """Plan every group now."""
        if self.kv.one_pool:
            plans = self.kv.plan_groups(self.block_lists, self.counts)
        else:
            plans = [
                self.kv.plan_append(
                    group.layers[0], [own[at] for own in self.block_lists], self.counts
                )
                for at, group in enumerate(self.kv.groups)
            ]
        self.plans = dict(enumerate(plans))
