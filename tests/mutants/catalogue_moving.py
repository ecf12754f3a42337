"""Bugs in executing plans: choice of the path, staging of indices, torch operations, reads."""

from __future__ import annotations

from tests.mutants.mutant import GROUPED, PER_LAYER, Mutant

_MANAGER = "roseinfer.kv.manager"
_STORAGE = "roseinfer.kv.storage"

MUTANTS = (
    Mutant(
        "identity-by-first-and-last-row",
        "A batch that lacks middle rows is treated as complete.",
        _STORAGE,
        "choose_write_path",
        "identity = plan.rows is None and policy.identity",
        """
        identity = policy.identity and (
            plan.rows is None or (plan.rows[0], plan.rows[-1]) == (0, plan.num_inputs - 1)
        )
        """,
        rows=("31",),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "position-of-row-0-for-all",
        "The scalar paths run without a check of positions, at the first row's position.",
        _STORAGE,
        "choose_write_path",
        "scalar = identity and plan.constant_position and policy.scalar_position",
        "scalar = identity and policy.scalar_position",
        rows=("32",),
    ),
    Mutant(
        "staged-columns-swapped",
        "The torch gather swaps staged positions and rows.",
        _STORAGE,
        "AppendExecutor.write",
        "block_idx, pos, rows = columns",
        "block_idx, rows, pos = columns",
    ),
    Mutant(
        "only-keys-gathered",
        "The torch gather selects rows of the keys, and takes the first values.",
        _STORAGE,
        "AppendExecutor.write",
        "key, value = key.index_select(0, rows), value.index_select(0, rows)",
        "key, value = key.index_select(0, rows), value[: len(rows)]",
        rows=("31", "34"),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "only-keys-converted",
        "Values keep the caller's dtype: some paths convert it, others raise after the commit.",
        _STORAGE,
        "AppendExecutor.write",
        "key, value = storage.to_cache_dtype(key), storage.to_cache_dtype(value)",
        "key = storage.to_cache_dtype(key)",
        rows=("28",),
    ),
    Mutant(
        "keys-and-values-swapped",
        "The torch vector path swaps keys and values.",
        _STORAGE,
        "AppendExecutor.write",
        "storage.write_vector(layer, columns[0], columns[1], key, value)",
        "storage.write_vector(layer, columns[0], columns[1], value, key)",
        rows=("34",),
    ),
    Mutant(
        "only-the-first-layer-copied",
        "Copy-on-write in a group of layers copies the first layer's block only.",
        _STORAGE,
        "AppendExecutor.copy_shared_blocks",
        "layers = range(plan.layer, plan.layer + self._layers_per_group)",
        "layers = range(plan.layer, plan.layer + 1)",
        rows=("8",),
        targets=(GROUPED,),
    ),
    Mutant(
        "policy-never-replaced",
        "Replacing the policy of a live cache has no effect.",
        _STORAGE,
        "AppendExecutor.set_policy",
        "self.policy = policy",
        """
        self.__dict__.setdefault("policy", policy)
        """,
    ),
    Mutant(
        "gather-counted-as-vector",
        "The torch gather is counted as the torch vector path.",
        _STORAGE,
        "AppendExecutor.write",
        "self._counts[path] += 1",
        "self._counts[Path.TORCH_VECTOR if path is Path.TORCH_GATHER else path] += 1",
    ),
    Mutant(
        "threshold-off-by-one",
        "Triton is used from one token more than the policy says.",
        _STORAGE,
        "choose_write_path",
        """
        if triton and num_tokens >= policy.triton_min_batch:
            ...
        """,
        """
        if triton and num_tokens > policy.triton_min_batch:
            ...
        """,
    ),
    Mutant(
        "ring-of-one",
        "The ring has one index buffer: a plan overwrites the previous one before its write.",
        _STORAGE,
        "",
        "_NUM_RING_BUFFERS = 64",
        "_NUM_RING_BUFFERS = 1",
        targets=(GROUPED,),
    ),
    Mutant(
        "stale-plan-written",
        "A plan is written although its indices were overwritten.",
        _STORAGE,
        "IndexStaging.check",
        """
        if staged.stage_count is not None and self._stage_count - staged.stage_count >= self._slots:
            ...
        """,
        """
        if staged.stage_count is not None and self._stage_count < staged.stage_count:
            ...
        """,
    ),
    Mutant(
        "buffers-never-grow",
        "A long append overflows its index buffer.",
        _STORAGE,
        "IndexStaging._next_buffer",
        """
        if size + _ALIGNMENT_MARGIN > self._capacity:
            ...
        """,
        """
        if self._capacity < _ALIGNMENT_MARGIN:
            ...
        """,
    ),
    Mutant(
        "zero-times-the-old-content",
        "The torch vector path adds zero times the slot's old content, which may be NaN.",
        _STORAGE,
        "KVStorage.write_vector",
        "self._key_token_views[layer].index_put_((block_idx, pos), key)",
        """
        slots = self._key_token_views[layer]
        slots.index_put_((block_idx, pos), slots[block_idx, pos] * 0 + key)
        """,
        rows=("5",),
    ),
    Mutant(
        "values-copied-from-keys",
        "A block copied alone gets the shared block's keys as values.",
        _STORAGE,
        "KVStorage.copy_block",
        "self.value_layers[layer][target].copy_(self.value_layers[layer][source])",
        "self.value_layers[layer][target].copy_(self.key_layers[layer][source])",
        rows=("34",),
    ),
    Mutant(
        "values-not-copied",
        "The torch copy-on-write copies keys only.",
        _STORAGE,
        "KVStorage.clone_blocks",
        """
        for cache in (self.key_layers[layer], self.value_layers[layer]):
            ...
        """,
        """
        for cache in (self.key_layers[layer],):
            ...
        """,
        rows=("34",),
    ),
    Mutant(
        "values-of-another-layer-copied",
        "The Triton copy-on-write copies values of the first layers, not of the group's.",
        _STORAGE,
        "AppendExecutor.copy_shared_blocks",
        "caches = storage.keys[first:end], storage.values[first:end]",
        "caches = storage.keys[first:end], storage.values[: len(layers)]",
        rows=("8",),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "tail-of-the-block-returned",
        "Reading a sequence returns whole blocks, with unwritten tokens after its end.",
        _STORAGE,
        "KVStorage.gather",
        """
        keys, values = (
            cache[layer].index_select(0, index).transpose(0, 1).flatten(1, 2)[:, :length]
            for cache in (self.key_layers, self.value_layers)
        )
        """,
        """
        keys, values = (
            cache[layer].index_select(0, index).transpose(0, 1).flatten(1, 2)
            for cache in (self.key_layers, self.value_layers)
        )
        """,
        rows=("5", "29"),
    ),
    Mutant(
        "reads-past-the-stored-length",
        "Reading more tokens than are stored returns old contents of the block.",
        _MANAGER,
        "KVBlockManager.gather_sequence",
        """
        if not 0 <= length <= stored:
            ...
        """,
        """
        if length < 0:
            ...
        """,
        rows=("29",),
    ),
    Mutant(
        "short-part-read-as-the-whole",
        "A part that is shorter than a block is read as the whole sequence.",
        _MANAGER,
        "KVBlockManager.gather_sequence",
        "length = stored if total_len is None else operator.index(total_len)",
        """
        length = stored if total_len is None else operator.index(total_len)
        if 0 < length < self.block_size:
            length = stored
        """,
    ),
    Mutant(
        "columns-overlap-from-row-129",
        "Staged columns of more than 128 rows overlap.",
        _STORAGE,
        "IndexStaging._make_views",
        "pitch = length + length % 2",
        "pitch = min(length + length % 2, 128)",
    ),
    Mutant(
        "rows-from-85-on-written-as-row-0",
        "The torch gather takes the keys of the first row for all rows after the 85th.",
        _STORAGE,
        "AppendExecutor.write",
        "key, value = key.index_select(0, rows), value.index_select(0, rows)",
        """
        rows = rows.clone()
        rows[85:] = rows[0]
        key, value = key.index_select(0, rows), value.index_select(0, rows)
        """,
        targets=(PER_LAYER,),
    ),
    Mutant(
        "values-shape-unchecked",
        "Values of a wrong shape are refused, if at all, after the tables have grown.",
        _MANAGER,
        "KVBlockManager._check_inputs",
        """
        if key.shape != shape or value.shape != shape:
            ...
        """,
        """
        if key.shape != shape:
            ...
        """,
        rows=("28",),
        targets=(PER_LAYER,),
    ),
)
