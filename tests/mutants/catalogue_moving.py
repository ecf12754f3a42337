"""Bugs in carrying plans out: choosing the path, staging indices, torch operations, reading."""

from __future__ import annotations

from tests.mutants.mutant import GROUPED, PER_LAYER, Mutant

_MANAGER = "roseinfer.kv.manager"
_STORAGE = "roseinfer.kv.storage"

MUTANTS = (
    Mutant(
        "identity-by-first-and-last-row",
        "A batch that lacks rows in the middle is taken for the whole.",
        _STORAGE,
        "    identity = plan.rows is None and policy.identity\n",
        "    identity = policy.identity and (\n"
        "        plan.rows is None or (plan.rows[0], plan.rows[-1]) == (0, plan.num_inputs - 1)\n"
        "    )\n",
        rows=("31",),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "position-of-row-0-for-all",
        "The scalar paths run whenever they may, with the first row's position.",
        _STORAGE,
        "    scalar = identity and plan.constant_position and policy.scalar_position\n",
        "    scalar = identity and policy.scalar_position\n",
        rows=("32",),
    ),
    Mutant(
        "staged-columns-swapped",
        "The torch gather reads positions where rows are staged, and rows where positions are.",
        _STORAGE,
        "            block_idx, pos, rows = columns\n",
        "            block_idx, rows, pos = columns\n",
    ),
    Mutant(
        "only-keys-gathered",
        "The torch gather picks the rows of the keys and takes the first values.",
        _STORAGE,
        "key.index_select(0, rows), value.index_select(0, rows)",
        "key.index_select(0, rows), value[: len(rows)]",
        rows=("31", "34"),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "only-keys-converted",
        "Values keep the caller's dtype: some paths convert, others raise after the commit.",
        _STORAGE,
        "        key, value = storage.as_stored(key), storage.as_stored(value)\n",
        "        key = storage.as_stored(key)\n",
        rows=("28",),
    ),
    Mutant(
        "keys-and-values-swapped",
        "The torch vector path writes keys to the values and values to the keys.",
        _STORAGE,
        "storage.write_vector(layer, columns[0], columns[1], key, value)",
        "storage.write_vector(layer, columns[0], columns[1], value, key)",
        rows=("34",),
    ),
    Mutant(
        "only-the-first-layer-copied",
        "Copy-on-write in a group of layers copies the first layer's block alone.",
        _STORAGE,
        "range(plan.layer, plan.layer + self._layers_per_group)",
        "range(plan.layer, plan.layer + 1)",
        rows=("8",),
        targets=(GROUPED,),
    ),
    Mutant(
        "policy-fixed-at-first",
        "Replacing the policy of a live cache has no effect.",
        _STORAGE,
        "        self.policy = policy\n",
        '        self.__dict__.setdefault("policy", policy)\n',
    ),
    Mutant(
        "gather-counted-as-vector",
        "The torch gather is counted under the torch vector path's name.",
        _STORAGE,
        "        self._counts[path] += 1\n",
        "        self._counts[Path.TORCH_VECTOR if path is Path.TORCH_GATHER else path] += 1\n",
    ),
    Mutant(
        "threshold-off-by-one",
        "Triton takes over one token later than the policy says.",
        _STORAGE,
        "    if triton and num_tokens >= policy.triton_min_batch:\n",
        "    if triton and num_tokens > policy.triton_min_batch:\n",
    ),
    Mutant(
        "ring-of-one",
        "The ring of index buffers has one: the next plan overwrites a plan not yet written.",
        _STORAGE,
        "_SLOTS = 64\n",
        "_SLOTS = 1\n",
        targets=(GROUPED,),
    ),
    Mutant(
        "stale-plan-written",
        "A plan whose indices were overwritten is written all the same, to other slots.",
        _STORAGE,
        "        if staged.ticket is not None and self._tickets - staged.ticket >= self._slots:\n",
        "        if staged.ticket is not None and self._tickets < staged.ticket:\n",
    ),
    Mutant(
        "buffers-never-grow",
        "A long append overflows its index buffer.",
        _STORAGE,
        "        if size + _SPARE > self._capacity:\n",
        "        if self._capacity < _SPARE:\n",
    ),
    Mutant(
        "zero-times-what-was-there",
        "The torch vector path adds the new token to nought times what the slot held: NaN.",
        _STORAGE,
        "        self._key_slots[layer].index_put_((block_idx, pos), key)\n",
        "        slots = self._key_slots[layer]\n"
        "        slots.index_put_((block_idx, pos), slots[block_idx, pos] * 0 + key)\n",
        rows=("5",),
    ),
    Mutant(
        "values-copied-from-keys",
        "A block copied alone gets the shared block's keys as its values.",
        _STORAGE,
        "copy_(self.value_layers[layer][source])",
        "copy_(self.key_layers[layer][source])",
        rows=("34",),
    ),
    Mutant(
        "values-not-copied",
        "The torch copy-on-write copies keys and no values.",
        _STORAGE,
        "            for cache in (self.key_layers[layer], self.value_layers[layer]):\n",
        "            for cache in (self.key_layers[layer],):\n",
        rows=("34",),
    ),
    Mutant(
        "values-of-another-layer-copied",
        "The Triton copy-on-write finds the values of the first layers, not of the group's.",
        _STORAGE,
        "storage.values[first:end]",
        "storage.values[: len(layers)]",
        rows=("8",),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "tail-of-the-block-returned",
        "Reading a sequence returns whole blocks: past its end comes what was never written.",
        _STORAGE,
        ".flatten(1, 2)[:, :length]",
        ".flatten(1, 2)",
        rows=("5", "29"),
    ),
    Mutant(
        "stale-tail-on-request",
        "Asking for more tokens than are stored returns what the block held before.",
        _MANAGER,
        '        if not 0 <= length <= stored:\n            raise BadArgument(f"total_len',
        '        if length < 0:\n            raise BadArgument(f"total_len',
        rows=("29",),
    ),
    Mutant(
        "values-shape-unchecked",
        "Values of a wrong shape are noticed, if at all, when the lists have grown.",
        _MANAGER,
        "        if key.shape != shape or value.shape != shape:\n",
        "        if key.shape != shape:\n",
        rows=("28",),
        targets=(PER_LAYER,),
    ),
)
