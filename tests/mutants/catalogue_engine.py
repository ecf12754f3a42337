"""Bugs in serving requests: scheduling, shared prefixes, and what a step computes."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, PREFIXED, Mutant

_PREFIXES = "roseinfer.engine.prefix_cache"
_SUPPLY = "roseinfer.engine.request"
_SCHEDULER = "roseinfer.engine.scheduler"
_ENGINE = "roseinfer.engine.engine"
_RUNNER = "roseinfer.engine.runner"
_CHOICE = "roseinfer.engine.runner"
_SEQUENCE = "roseinfer.kv.sequence"
_BATCH = "roseinfer.attention.triton"
_CHUNK = "roseinfer.kernels.triton.prefill_attention"
_DECODE = "roseinfer.kernels.triton.decode_attention"
_REFERENCE = "roseinfer.attention.reference"
_SHOWN_WITHOUT_A_MODEL = {_PREFIXES, _SUPPLY, _SEQUENCE}


def _mutant(
    name: str,
    wrong: str,
    module: str,
    function: str,
    find: str,
    replace: str,
    rows: tuple[str, ...] = (),
) -> Mutant:
    targets = (PREFIXED, ENGINE) if module in _SHOWN_WITHOUT_A_MODEL else (ENGINE,)
    return Mutant(name, wrong, module, function, find, replace, rows, targets)


MUTANTS = (
    _mutant(
        "block-known-by-its-own-tokens",
        "A block is found by its position and the tokens it holds, whatever came before them.",
        _PREFIXES,
        "PrefixCache._full_blocks",
        """
        entry = self._entries.get((size, chain_hash(parent.hash, block)))
        if entry is None or not entry.continues(parent, block):
            break
        """,
        """
        alike = (e for e in self._entries.values() if e.end == parent.end + size)
        entry = next((e for e in alike if e.tokens == block), None)
        if entry is None:
            break
        """,
        ("24", "S3"),
    ),
    _mutant(
        "evicted-and-still-found",
        "A block that was evicted stays in the map and is handed out after it was reused.",
        _PREFIXES,
        "PrefixCache._remove_subtree",
        "del self._entries[each.key]",
        "",
        ("2",),
    ),
    _mutant(
        "evicted-under-its-user",
        "A prefix that a request was given can be evicted as if nobody used it.",
        _PREFIXES,
        "PrefixCache._acquire",
        """
        entry.num_holders += 1
        if entry in self.unused:
            del self.unused[entry]
            self.num_evictable_blocks -= self._num_blocks(entry)
        """,
        """
        if entry.num_holders > 0 and entry in self.unused:
            del self.unused[entry]
            self.num_evictable_blocks -= self._num_blocks(entry)
        """,
        ("13",),
    ),
    _mutant(
        "matched-without-a-reference",
        "A request is given a prefix's blocks and no reference on them.",
        _PREFIXES,
        "PrefixCache._acquire",
        "self.kv.incref_blocks([entry.block_ids[group] for group in groups])",
        "",
        ("13", "S1"),
    ),
    _mutant(
        "partial-block-taken-for-a-full-one",
        "The partial last block of a sequence counts as full when it is matched.",
        _PREFIXES,
        "PrefixCache._add",
        "entry = PrefixEntry(parent, tokens, hashed, parent.end + len(tokens), block_ids)",
        "entry = PrefixEntry(parent, tokens, hashed, parent.end + self.kv.block_size, block_ids)",
        ("7",),
    ),
    _mutant(
        "prefix-as-long-as-its-blocks",
        "A matched prefix counts as long as its blocks could hold, not as what they hold.",
        _PREFIXES,
        "PrefixCache.match",
        "num_tokens = entries[-1].end if entries else 0",
        "num_tokens = min(len(entries) * self.kv.block_size, most)",
        ("11", "S4"),
    ),
    _mutant(
        "offered-before-it-is-stored",
        "Blocks of a prompt can be matched before all their tokens are stored.",
        _PREFIXES,
        "PrefixCache.insert",
        """
        while held.tip is not None and held.tip.cached and held.tip.end + size <= stored:
            ...
        """,
        """
        while (
            held.tip is not None
            and held.tip.cached
            and held.tip.end + size
            <= min(len(session.token_ids), len(session.block_lists[0]) * size)
        ):
            ...
        """,
        ("20", "S2"),
    ),
    Mutant(
        "cancelled-and-kept-whole",
        "A prompt that is cancelled between two chunks leaves what it has room for to be found.",
        _SUPPLY,
        "RequestBlockAllocator.give_back",
        "session.cut(self._kv, len(session.token_ids))",
        """
        if 0 < session.stored < request.prompt_length:
            session.stored = min(session.room, request.prompt_length)
        session.cut(self._kv, len(session.token_ids))
        """,
        rows=("S5",),
        targets=(ENGINE,),  # without a model nothing is cancelled
    ),
    _mutant(
        "anothers-block-let-go",
        "A sequence that stored the same tokens as another lets go of the other's block.",
        _PREFIXES,
        "PrefixCache.insert",
        """
        if entry is None:
            entry = self._add(tip, block, hashed, session)
            entry.num_holders = 1
            held.inserted.append(entry)
        elif not entry.continues(tip, block):
            return
        else:
            self._fill_missing_blocks(entry, session, held)
        """,
        """
        if entry is None:
            entry = self._add(tip, block, hashed, session)
            entry.num_holders = 1
            held.inserted.append(entry)
        elif not entry.continues(tip, block):
            return
        else:
            self._fill_missing_blocks(entry, session, held)
        if entry not in held.inserted:
            held.inserted.append(entry)
        """,
        ("19", "S19"),
    ),
    _mutant(
        "registered-block-of-its-position-in-the-list",
        "The block registered for a prefix is the sequence's first one.",
        _PREFIXES,
        "PrefixCache._add",
        "index = parent.end // self.kv.block_size",
        "index = 0",
        ("19",),
    ),
    _mutant(
        "hits-counted-as-free",
        "The blocks of a matched prefix still count among those that can be freed.",
        _SCHEDULER,
        "PrefillBudget._admit",
        "held = before - self.block_allocator.available",
        "held = 0",
        ("3",),
    ),
    _mutant(
        "copy-of-a-matched-tail-not-counted",
        "A partial block that was matched is taken for the request's own to write to.",
        _SUPPLY,
        "RequestBlockAllocator.start",
        "request.num_cached_tokens = session.stored = session.room = found",
        """
        request.found = session.stored = found
        session.room = len(session.block_lists[0]) * self._kv.block_size
        """,
        ("25",),
    ),
    _mutant(
        "progress-kept-without-its-blocks",
        "A preempted request goes on where it was, though its blocks are gone.",
        _SEQUENCE,
        "CachedSequence.free_all_blocks",
        "self.stored = self.room = 0",
        "self.room = 0",
        ("23",),
    ),
    _mutant(
        "preempted-with-its-blocks",
        "A preempted request waits and keeps its blocks.",
        _SCHEDULER,
        "Scheduler._preempt",
        "self._block_allocator.release_blocks(request)",
        "",
        ("23",),
    ),
    _mutant(
        "preempted-and-forgotten",
        "A preempted request is not put back into the queue.",
        _SCHEDULER,
        "Scheduler._wait",
        "self.waiting.insert(next(later, len(self.waiting)), request)",
        "",
    ),
    _mutant(
        "ended-with-its-blocks",
        "A request that ends or is cancelled gives nothing back.",
        _SCHEDULER,
        "Scheduler.remove",
        "self._block_allocator.release_blocks(request)",
        "",
        ("12", "20"),
    ),
    _mutant(
        "ended-twice",
        "A request that ends gives its prefix back a second time.",
        _SUPPLY,
        "RequestBlockAllocator.give_back",
        "in_windows = [block for at, _ in self._windows for block in session.block_lists[at]]",
        """
        in_windows = [block for at, _ in self._windows for block in session.block_lists[at]]
        if self._prefixes:
            self._kv.free_blocks(0, session.block_lists[0])
        """,
        ("12",),
    ),
    _mutant(
        "refused-with-its-prefix",
        "A prompt that is not admitted after all keeps what it was given of the prefix cache.",
        _SCHEDULER,
        "PrefillBudget._admit",
        "self.block_allocator.release_blocks(request)",
        "",
        ("13",),
    ),
    _mutant(
        "waits-for-a-copy-that-is-not-made",
        "A request waits for a block to copy a shared one to, also when nobody shares it any more.",
        _SCHEDULER,
        "Scheduler.next_step",
        "self.waiting[0].min_available_blocks = 0",
        "pass",
        ("3",),
    ),
    _mutant(
        "decode-without-looking-for-blocks",
        "Requests decode without a look at whether there are blocks for all of them.",
        _SCHEDULER,
        "Scheduler._schedule_decodes",
        """
        if session.stored >= session.room:
            ...
        """,
        """
        if session.stored > session.room:
            ...
        """,
        ("26",),
    ),
    _mutant(
        "unused-prefixes-stay",
        "A step that needs blocks does not evict the prefixes that were counted as free.",
        _SUPPLY,
        "RequestBlockAllocator.ensure",
        """
        self._prefixes.evict(
            max(missing, self._prefixes.num_evictable_blocks // _EVICTION_DIVISOR)
        )
        """,
        """
        self._prefixes.evict(
            max(missing - 1, self._prefixes.num_evictable_blocks // _EVICTION_DIVISOR)
        )
        """,
        ("3",),
    ),
    _mutant(
        "parameters-of-an-earlier-batch",
        "The sampling parameters of a batch are kept when other requests make up the next.",
        _CHOICE,
        "TokenSampler._sampling_batch",
        """
        if self._sampling is None or self._sampling[0] != requests:
            ...
        """,
        """
        if self._sampling is None or len(self._sampling[0]) != len(requests):
            ...
        """,
        ("S18",),
    ),
    _mutant(
        "seed-of-the-row",
        "A request's draws depend on its place in the batch.",
        _CHOICE,
        "TokenSampler._sampling_batch",
        """
        batch = SamplingBatch.of(
            [request.params for request in requests],
            [request.seed for request in requests],
            device,
        )
        """,
        """
        batch = SamplingBatch.of(
            [request.params for request in requests],
            [request.seed + row for row, request in enumerate(requests)],
            device,
        )
        """,
        ("S18",),
    ),
    _mutant(
        "penalty-for-new-tokens-only",
        "The repetition penalty forgets the prompt.",
        _CHOICE,
        "TokenSampler._tally",
        "own = count_prompt_and_output(request.sequence.token_ids, request.prompt_length)",
        "own = count_prompt_and_output(request.token_ids, 0)",
    ),
    _mutant(
        "positions-from-the-chunk",
        "The positions of a prompt's later chunk begin at nought.",
        _RUNNER,
        "SequenceRunner.extend",
        "positions += range(session.stored, end)",
        "positions += range(count if count > 1 else end)[-count:]",
        ("15",),
    ),
    _mutant(
        "logits-of-the-first-token",
        "A prompt's first new token is sampled behind the first token of its last chunk.",
        _RUNNER,
        "SequenceRunner.extend",
        """
        first = len(tokens) if at in in_full else len(tokens) + count - 1
        rows_out += range(first, len(tokens) + count)
        """,
        """
        first = len(tokens) if at in in_full else len(tokens)
        rows_out += range(first, first + (count if at in in_full else 1))
        """,
        ("15",),
    ),
    _mutant(
        "chunk-sees-what-comes-after",
        "The tokens of a chunk attend to all of it, also to what stands behind them.",
        _CHUNK,
        "_chunk_kernel",
        "seen = distance > 0",
        "seen = (tokens < end)[None, :] & (token >= 0)[:, None]",
        ("15",),
    ),
    _mutant(
        "chunk-masked-from-its-own-start",
        "The tokens of a chunk see as much of the context as if it were the prompt's first.",
        _CHUNK,
        "_chunk_kernel",
        "seen = distance > 0",
        "seen = distance > position",
        ("15",),
    ),
    _mutant(
        "chunks-attend-with-the-wrong-rows",
        "Beside requests that decode, a prompt's queries are taken from the first rows.",
        _BATCH,
        "TritonAttention.attend",
        "behind = query[batch.num_decodes :]",
        "behind = query[: len(query) - batch.num_decodes]",
    ),
    _mutant(
        "newest-token-unseen",
        "Decode attends to what was stored before, and not to the newest token.",
        _RUNNER,
        "SequenceRunner.extend",
        "lengths.append(end)",
        "lengths.append(max(1, session.stored))",
    ),
    _mutant(
        "weights-times-nan",
        "The decode kernel reads values behind the last token: nought times NaN is NaN.",
        _DECODE,
        "_decode_kernel",
        "v = tl.load(v_cache + places[:, None] + dims[None, :], inside, other=0.0)",
        "v = tl.load(v_cache + places[:, None] + dims[None, :], d_inside[None, :], other=0.0)",
        ("5",),
    ),
    _mutant(
        "query-heads-dealt-out",
        "Query heads are dealt out over the KV heads instead of sharing one by neighbours.",
        _DECODE,
        "_decode_kernel",
        "heads = kv_head * GROUP + members",
        "heads = members * (Q_HEADS // GROUP) + kv_head",
    ),
    _mutant(
        "many-query-heads-dealt-out",
        "In decode, more than 4 query heads to a KV head are dealt out over the KV heads.",
        _DECODE,
        "_decode_kernel",
        "heads = kv_head * GROUP + members",
        """
        heads = kv_head * GROUP + members
        if GROUP > 4:
            heads = members * (Q_HEADS // GROUP) + kv_head
        """,
    ),
    _mutant(
        "many-query-heads-dealt-out-in-chunks",
        "In a prompt's chunks, more than 4 query heads to a KV head are dealt out.",
        _CHUNK,
        "_chunk_kernel",
        "head = kv_head * GROUP + member",
        """
        head = kv_head * GROUP + member
        if GROUP > 4:
            head = member * tl.num_programs(1) + kv_head
        """,
    ),
    Mutant(
        "many-query-heads-dealt-out-by-the-reference",
        "In attention without kernels, more than 4 query heads to a KV head are dealt out.",
        _REFERENCE,
        "attend",
        "at = torch.arange(context - tokens, context, device=query.device)[None]",
        """
        at = torch.arange(context - tokens, context, device=query.device)[None]
        if query.shape[1] > 4 * len(keys):
            dealt = query.view(tokens, -1, len(keys), query.shape[2]).transpose(1, 2)
            query = dealt.reshape(query.shape)
        """,
    ),
    _mutant(
        "many-query-heads-dealt-out-in-slots",
        "In resident decode without kernels, more than 4 query heads to a KV head are dealt out.",
        _REFERENCE,
        "append_and_attend_reference",
        "unused = _attention_mask(distance, traits)[:, None, :, None]",
        """
        unused = _attention_mask(distance, traits)[:, None, :, None]
        if query.shape[1] > 4 * k_cache.shape[1]:
            dealt = query.view(len(query), -1, k_cache.shape[1], query.shape[2])
            query = dealt.transpose(1, 2).reshape(query.shape)
        """,
    ),
    _mutant(
        "scores-not-scaled",
        "The decode kernel forgets the scale of the scores.",
        _DECODE,
        "_decode_kernel",
        """
        top, total, sums = update_softmax(
            q, k, v, stored[None, :], distance, top, total, sums, scale, cap, slopes, heads, real,
            True, CAPPED, SLOPED,
        )
        """,
        """
        top, total, sums = update_softmax(
            q, k, v, stored[None, :], distance, top, total, sums, 1.0, cap, slopes, heads, real,
            True, CAPPED, SLOPED,
        )
        """,
    ),
)
