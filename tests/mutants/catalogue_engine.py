"""Bugs in serving requests: scheduling, shared prefixes, and what a step computes."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, PREFIXED, Mutant

_PREFIXES = "roseinfer.engine.prefix_cache"
_SUPPLY = "roseinfer.engine.request"
_SCHEDULER = "roseinfer.engine.scheduler"
_ENGINE = "roseinfer.engine.engine"
_RUNNER = "roseinfer.engine.runner"
_CHOICE = "roseinfer.engine.token_choice"
_SEQUENCE = "roseinfer.kv.sequence"
_BATCH = "roseinfer.attention.triton"
_CHUNK = "roseinfer.kernels.attend_chunks"
_DECODE = "roseinfer.kernels.attend_decode"
_REFERENCE = "roseinfer.attention.reference"
_SHOWN_WITHOUT_A_MODEL = {_PREFIXES, _SUPPLY, _SEQUENCE}


def _mutant(
    name: str, wrong: str, module: str, find: str, replace: str, rows: tuple[str, ...] = ()
) -> Mutant:
    targets = (PREFIXED, ENGINE) if module in _SHOWN_WITHOUT_A_MODEL else (ENGINE,)
    return Mutant(name, wrong, module, find, replace, rows, targets)


MUTANTS = (
    _mutant(
        "block-known-by-its-own-tokens",
        "A block is found by its position and the tokens it holds, whatever came before them.",
        _PREFIXES,
        "            entry = self._entries.get((size, chain_hash(parent.hash, block)))\n"
        "            if entry is None or not entry.continues(parent, block):\n",
        "            alike = (e for e in self._entries.values() if e.end == parent.end + size)\n"
        "            entry = next((e for e in alike if e.tokens == block), None)\n"
        "            if entry is None:\n",
        ("24", "S3"),
    ),
    _mutant(
        "evicted-and-still-found",
        "A block that was evicted stays in the map and is handed out after it was reused.",
        _PREFIXES,
        "            del self._entries[each.key]\n",
        "",
        ("2",),
    ),
    _mutant(
        "evicted-under-its-user",
        "A prefix that a request was given can be evicted as if nobody used it.",
        _PREFIXES,
        "        entry.users += 1\n        if entry in self.unused:\n",
        "        if entry.users > 0 and entry in self.unused:\n",
        ("13",),
    ),
    _mutant(
        "matched-without-a-reference",
        "A request is given a prefix's blocks and no reference on them.",
        _PREFIXES,
        "        self.kv.incref_blocks([entry.block_ids[group] for group in groups])\n",
        "",
        ("13", "S1"),
    ),
    _mutant(
        "partial-block-taken-for-a-full-one",
        "The partial last block of a sequence counts as full when it is matched.",
        _PREFIXES,
        "Entry(parent, tokens, hashed, parent.end + len(tokens), block_ids)",
        "Entry(parent, tokens, hashed, parent.end + self.kv.block_size, block_ids)",
        ("7",),
    ),
    _mutant(
        "prefix-as-long-as-its-blocks",
        "A matched prefix counts as long as its blocks could hold, not as what they hold.",
        _PREFIXES,
        "        num_tokens = entries[-1].end if entries else 0\n",
        "        num_tokens = min(len(entries) * self.kv.block_size, most)\n",
        ("11", "S4"),
    ),
    _mutant(
        "offered-before-it-is-stored",
        "Blocks of a prompt can be matched before all their tokens are stored.",
        _PREFIXES,
        "and held.tip.end + size <= stored:",
        "and held.tip.end + size <= "
        "min(len(session.token_ids), len(session.block_lists[0]) * size):",
        ("20", "S2"),
    ),
    Mutant(
        "cancelled-and-kept-whole",
        "A prompt that is cancelled between two chunks leaves what it has room for to be found.",
        _SUPPLY,
        "            session.cut(self._kv, len(session.token_ids))",
        "            if 0 < session.stored < request.prompt_length:\n"
        "                session.stored = min(session.room, request.prompt_length)\n"
        "            session.cut(self._kv, len(session.token_ids))",
        rows=("S5",),
        targets=(ENGINE,),  # without a model nothing is cancelled
    ),
    _mutant(
        "anothers-block-let-go",
        "A sequence that stored the same tokens as another lets go of the other's block.",
        _PREFIXES,
        "            held.tip = entry\n",
        "            if entry not in held.inserted:\n"
        "                held.inserted.append(entry)\n"
        "            held.tip = entry\n",
        ("19", "S19"),
    ),
    _mutant(
        "registered-block-of-its-position-in-the-list",
        "The block registered for a prefix is the sequence's first one.",
        _PREFIXES,
        "        index = parent.end // self.kv.block_size\n        block_ids =",
        "        index = 0\n        block_ids =",
        ("19",),
    ),
    _mutant(
        "hits-counted-as-free",
        "The blocks of a matched prefix still count among those that can be freed.",
        _SCHEDULER,
        "        held = before - self.supply.available\n",
        "        held = 0\n",
        ("3",),
    ),
    _mutant(
        "copy-of-a-matched-tail-not-counted",
        "A partial block that was matched is taken for the request's own to write to.",
        _SUPPLY,
        "        request.found = session.stored = session.room = found\n",
        "        request.found = session.stored = found\n"
        "        session.room = len(session.block_lists[0]) * self._kv.block_size\n",
        ("25",),
    ),
    _mutant(
        "progress-kept-without-its-blocks",
        "A preempted request goes on where it was, though its blocks are gone.",
        _SEQUENCE,
        "        self.stored = self.room = 0\n",
        "        self.room = 0\n",
        ("23",),
    ),
    _mutant(
        "preempted-with-its-blocks",
        "A preempted request waits and keeps its blocks.",
        _SCHEDULER,
        "        self._supply.give_back(request)\n        request.preempted += 1\n",
        "        request.preempted += 1\n",
        ("23",),
    ),
    _mutant(
        "preempted-and-forgotten",
        "A preempted request is not put back into the queue.",
        _SCHEDULER,
        "        self.waiting.insert(next(later, len(self.waiting)), request)\n",
        "",
    ),
    _mutant(
        "ended-with-its-blocks",
        "A request that ends or is cancelled gives nothing back.",
        _SCHEDULER,
        "            self._supply.give_back(request)\n            del self.running[request.id]\n",
        "            del self.running[request.id]\n",
        ("12", "20"),
    ),
    _mutant(
        "ended-twice",
        "A request that ends gives its prefix back a second time.",
        _SUPPLY,
        "        session.rewind(self._kv)\n",
        "        if self._prefixes:\n"
        "            self._kv.free_blocks(0, session.block_lists[0])\n"
        "        session.rewind(self._kv)\n",
        ("12",),
    ),
    _mutant(
        "refused-with-its-prefix",
        "A prompt that is not admitted after all keeps what it was given of the prefix cache.",
        _SCHEDULER,
        "            self.supply.give_back(request)\n            return False\n",
        "            return False\n",
        ("13",),
    ),
    _mutant(
        "waits-for-a-copy-that-is-not-made",
        "A request waits for a block to copy a shared one to, also when nobody shares it any more.",
        _SCHEDULER,
        "self.waiting[0].waits_for = 0  # it was counted with a prefix to copy\n",
        "pass\n",
        ("3",),
    ),
    _mutant(
        "decode-without-looking-for-blocks",
        "Requests decode without a look at whether there are blocks for all of them.",
        _SCHEDULER,
        "                    if session.stored >= session.room:\n",
        "                    if session.stored > session.room:\n",
        ("26",),
    ),
    _mutant(
        "unused-prefixes-stay",
        "A step that needs blocks does not evict the prefixes that were counted as free.",
        _SUPPLY,
        "evict(max(missing, ",
        "evict(max(missing - 1, ",
        ("3",),
    ),
    _mutant(
        "parameters-of-an-earlier-batch",
        "The sampling parameters of a batch are kept when other requests make up the next.",
        _CHOICE,
        "        if self._sampling is None or self._sampling[0] != requests:\n",
        "        if self._sampling is None or len(self._sampling[0]) != len(requests):\n",
        ("S18",),
    ),
    _mutant(
        "seed-of-the-row",
        "A request's draws depend on its place in the batch.",
        _CHOICE,
        "                [request.seed for request in requests],\n",
        "                [request.seed + row for row, request in enumerate(requests)],\n",
        ("S18",),
    ),
    _mutant(
        "penalty-for-new-tokens-only",
        "The repetition penalty forgets the prompt.",
        _CHOICE,
        "tally_of(request.session.token_ids, request.prompt_length)",
        "tally_of(request.token_ids, 0)",
    ),
    _mutant(
        "positions-from-the-chunk",
        "The positions of a prompt's later chunk begin at nought.",
        _RUNNER,
        "            positions += range(session.stored, end)\n",
        "            positions += range(count if count > 1 else end)[-count:]\n",
        ("15",),
    ),
    _mutant(
        "logits-of-the-first-token",
        "A prompt's first new token is sampled behind the first token of its last chunk.",
        _RUNNER,
        "if at in in_full else len(tokens) + count - 1\n"
        "            rows_out += range(first, len(tokens) + count)\n",
        "if at in in_full else len(tokens)\n"
        "            rows_out += range(first, first + (count if at in in_full else 1))\n",
        ("15",),
    ),
    _mutant(
        "chunk-sees-what-comes-after",
        "The tokens of a chunk attend to all of it, also to what stands behind them.",
        _CHUNK,
        "seen = distance > 0\n",
        "seen = (tokens < end)[None, :] & (token >= 0)[:, None]\n",
        ("15",),
    ),
    _mutant(
        "chunk-masked-from-its-own-start",
        "The tokens of a chunk see as much of the context as if it were the prompt's first.",
        _CHUNK,
        "seen = distance > 0\n",
        "seen = distance > position\n",
        ("15",),
    ),
    _mutant(
        "chunks-attend-with-the-wrong-rows",
        "Beside requests that decode, a prompt's queries are taken from the first rows.",
        _BATCH,
        "behind = query[batch.singles :]",
        "behind = query[: len(query) - batch.singles]",
    ),
    _mutant(
        "newest-token-unseen",
        "Decode attends to what was stored before, and not to the newest token.",
        _RUNNER,
        "            lengths.append(end)\n",
        "            lengths.append(max(1, session.stored))\n",
    ),
    _mutant(
        "weights-times-nan",
        "The decode kernel reads values behind the last token: nought times NaN is NaN.",
        _DECODE,
        "v = tl.load(v_cache + places[:, None] + dims[None, :], inside, other=0.0)\n",
        "v = tl.load(v_cache + places[:, None] + dims[None, :], d_inside[None, :], other=0.0)\n",
        ("5",),
    ),
    _mutant(
        "query-heads-dealt-out",
        "Query heads are dealt out over the KV heads instead of sharing one by neighbours.",
        _DECODE,
        "    heads = kv_head * GROUP + members\n",
        "    heads = members * (Q_HEADS // GROUP) + kv_head\n",
    ),
    _mutant(
        "many-query-heads-dealt-out",
        "In decode, more than 4 query heads to a KV head are dealt out over the KV heads.",
        _DECODE,
        "    heads = kv_head * GROUP + members\n",
        "    heads = kv_head * GROUP + members\n"
        "    if GROUP > 4:\n"
        "        heads = members * (Q_HEADS // GROUP) + kv_head\n",
    ),
    _mutant(
        "many-query-heads-dealt-out-in-chunks",
        "In a prompt's chunks, more than 4 query heads to a KV head are dealt out.",
        _CHUNK,
        "    head = kv_head * GROUP + member\n",
        "    head = kv_head * GROUP + member\n"
        "    if GROUP > 4:\n"
        "        head = member * tl.num_programs(1) + kv_head\n",
    ),
    Mutant(
        "many-query-heads-dealt-out-by-the-reference",
        "In attention without kernels, more than 4 query heads to a KV head are dealt out.",
        _REFERENCE,
        "    at = torch.arange(context - tokens, context, device=query.device)[None]\n",
        "    at = torch.arange(context - tokens, context, device=query.device)[None]\n"
        "    if query.shape[1] > 4 * len(keys):\n"
        "        dealt = query.view(tokens, -1, len(keys), query.shape[2]).transpose(1, 2)\n"
        "        query = dealt.reshape(query.shape)\n",
    ),
    _mutant(
        "many-query-heads-dealt-out-in-slots",
        "In resident decode without kernels, more than 4 query heads to a KV head are dealt out.",
        _REFERENCE,
        "    unused = _hidden(distance, traits)[:, None, :, None]\n",
        "    unused = _hidden(distance, traits)[:, None, :, None]\n"
        "    if query.shape[1] > 4 * k_cache.shape[1]:\n"
        "        dealt = query.view(len(query), -1, k_cache.shape[1], query.shape[2])\n"
        "        query = dealt.transpose(1, 2).reshape(query.shape)\n",
    ),
    _mutant(
        "scores-not-scaled",
        "The decode kernel forgets the scale of the scores.",
        _DECODE,
        "q, k, v, stored[None, :], distance, top, total, sums, scale, cap,",
        "q, k, v, stored[None, :], distance, top, total, sums, 1.0, cap,",
    ),
)
