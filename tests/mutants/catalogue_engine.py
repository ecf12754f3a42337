"""Bugs in serving requests: scheduling, prefix reuse, and the computation of a step."""

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
_SHOWN_WITHOUT_A_MODEL = {_PREFIXES, _SUPPLY}


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
        "block-matched-without-its-prefix",
        "A block is found by its position and its own tokens, whatever its prefix.",
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
        "An evicted block stays in the map, and is found after it was reused.",
        _PREFIXES,
        "PrefixCache._remove_subtree",
        "del self._entries[each.key]",
        "",
        ("2",),
    ),
    _mutant(
        "evicted-while-in-use",
        "A prefix can be evicted while a request uses it.",
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
        "A request gets a prefix's blocks without a reference on them.",
        _PREFIXES,
        "PrefixCache._acquire",
        "self.kv.incref_blocks([entry.block_ids[group] for group in groups])",
        "",
        ("13", "S1"),
    ),
    _mutant(
        "partial-block-matched-as-full",
        "The partial last block of a sequence is matched as a full one.",
        _PREFIXES,
        "PrefixCache._add",
        "entry = PrefixEntry(parent, tokens, hashed, parent.end + len(tokens), block_ids)",
        "entry = PrefixEntry(parent, tokens, hashed, parent.end + self.kv.block_size, block_ids)",
        ("7",),
    ),
    _mutant(
        "prefix-as-long-as-its-blocks",
        "A matched prefix has the length of its blocks' capacity, not of their tokens.",
        _PREFIXES,
        "PrefixCache.match",
        "num_tokens = entries[-1].end if entries else 0",
        "num_tokens = min(len(entries) * self.kv.block_size, max_tokens)",
        ("11", "S4"),
    ),
    _mutant(
        "matched-before-it-is-stored",
        "Blocks of a prompt can be matched before all their tokens are stored.",
        _PREFIXES,
        "PrefixCache.insert",
        """
        while (
            held_prefix.tip is not None
            and held_prefix.tip.cached
            and held_prefix.tip.end + size <= stored
        ):
            ...
        """,
        """
        while (
            held_prefix.tip is not None
            and held_prefix.tip.cached
            and held_prefix.tip.end + size
            <= min(len(sequence.token_ids), len(sequence.block_lists[0]) * size)
        ):
            ...
        """,
        ("20", "S2"),
    ),
    Mutant(
        "cancelled-prompt-cached-whole",
        "A prompt cancelled between chunks is cached with tokens that were not stored.",
        _SUPPLY,
        "RequestBlockAllocator.give_back",
        "session.cut(self._kv, len(session.token_ids))",
        """
        if 0 < session.num_stored < request.prompt_length:
            session.num_stored = min(session.token_capacity, request.prompt_length)
        session.cut(self._kv, len(session.token_ids))
        """,
        rows=("S5",),
        targets=(ENGINE,),  # without a model nothing is cancelled
    ),
    _mutant(
        "reference-of-another-dropped",
        "A sequence that stored the same tokens as another drops the other's reference.",
        _PREFIXES,
        "PrefixCache.insert",
        """
        if entry is None:
            entry = self._add(tip, block, hashed, session)
            entry.num_holders = 1
            held_prefix.inserted.append(entry)
        elif not entry.continues(tip, block):
            return
        else:
            self._fill_missing_blocks(entry, session, held_prefix)
            computed_again = True
        """,
        """
        if entry is None:
            entry = self._add(tip, block, hashed, session)
            entry.num_holders = 1
            held_prefix.inserted.append(entry)
        elif not entry.continues(tip, block):
            return
        else:
            self._fill_missing_blocks(entry, session, held_prefix)
            computed_again = True
        if entry not in held_prefix.inserted:
            held_prefix.inserted.append(entry)
        """,
        ("19", "S19"),
    ),
    _mutant(
        "first-block-registered-for-all",
        "Every prefix is registered with the sequence's first block.",
        _PREFIXES,
        "PrefixCache._add",
        "index = parent.end // self.kv.block_size",
        "index = 0",
        ("19",),
    ),
    _mutant(
        "hits-counted-as-free",
        "Blocks of a matched prefix still count as evictable.",
        _SCHEDULER,
        "PrefillBudget._admit",
        "num_held = before - self.block_allocator.available",
        "num_held = 0",
        ("3",),
    ),
    _mutant(
        "copy-of-a-matched-tail-not-counted",
        "A matched partial block is written to as the request's own, without a copy.",
        _SUPPLY,
        "RequestBlockAllocator.start",
        "request.num_cached_tokens = session.stored = session.room = found",
        """
        request.num_cached_tokens = session.stored = found
        session.room = len(session.block_lists[0]) * self._kv.block_size
        """,
        ("25",),
    ),
    _mutant(
        "progress-kept-after-preemption",
        "A preempted request continues at its old position, though its blocks are gone.",
        _SEQUENCE,
        "CachedSequence.free_all_blocks",
        "self.stored = self.room = 0",
        "self.room = 0",
        ("23",),
    ),
    _mutant(
        "preempted-with-its-blocks",
        "A preempted request keeps its blocks while it waits.",
        _SCHEDULER,
        "Scheduler._preempt",
        "self._block_allocator.release_blocks(request)",
        "",
        ("23",),
    ),
    _mutant(
        "preempted-and-not-requeued",
        "A preempted request is not put back into the queue.",
        _SCHEDULER,
        "Scheduler._wait",
        "self.waiting.insert(next(later, len(self.waiting)), request)",
        "",
    ),
    _mutant(
        "ended-without-freeing",
        "A request that ends or is cancelled frees no blocks.",
        _SCHEDULER,
        "Scheduler.remove",
        "self._block_allocator.release_blocks(request)",
        "",
        ("12", "20"),
    ),
    _mutant(
        "prefix-freed-twice",
        "A request that ends frees its prefix twice.",
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
        "refused-without-freeing-its-prefix",
        "A prompt that is not admitted keeps its blocks of the prefix cache.",
        _SCHEDULER,
        "PrefillBudget._admit",
        "self.block_allocator.release_blocks(request)",
        "",
        ("13",),
    ),
    _mutant(
        "waits-for-an-unneeded-copy",
        "A request waits for the block of a copy that is not needed any more.",
        _SCHEDULER,
        "Scheduler.next_step",
        "self.waiting[0].min_available_blocks = 0",
        "pass",
        ("3",),
    ),
    _mutant(
        "decode-without-a-capacity-check",
        "Requests decode without a check that there are blocks for all of them.",
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
        "evicts-one-block-too-few",
        "A step that needs blocks evicts one block too few.",
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
        "Sampling parameters of a batch are reused for another batch of the same size.",
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
        "A request's random numbers depend on its row in the batch.",
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
        "The repetition penalty ignores the prompt.",
        _CHOICE,
        "TokenSampler._tally",
        "own = count_prompt_and_output(request.sequence.token_ids, request.prompt_length)",
        "own = count_prompt_and_output(request.token_ids, 0)",
    ),
    _mutant(
        "positions-from-the-chunk",
        "Positions of a later chunk of a prompt begin at 0.",
        _RUNNER,
        "SequenceRunner._batch_of",
        "positions += range(end - count, end)",
        "positions += range(count if count > 1 else end)[-count:]",
        ("15",),
    ),
    _mutant(
        "logits-of-the-first-token",
        "A prompt's first new token is sampled from logits of its last chunk's first token.",
        _RUNNER,
        "SequenceRunner._batch_of",
        "rows_out += range(row - (count if span.all_logits else 1), row)",
        "rows_out += range(row - count, row - count + (count if span.all_logits else 1))",
        ("15",),
    ),
    _mutant(
        "chunk-attends-to-later-tokens",
        "Tokens of a chunk attend to the whole chunk, including later tokens.",
        _CHUNK,
        "_chunk_kernel",
        "seen = distance > 0",
        "seen = (tokens < end)[None, :] & (token >= 0)[:, None]",
        ("15",),
    ),
    _mutant(
        "chunk-masked-as-a-first-chunk",
        "Tokens of a chunk are masked as if the chunk began at position 0.",
        _CHUNK,
        "_chunk_kernel",
        "seen = distance > 0",
        "seen = distance > position",
        ("15",),
    ),
    _mutant(
        "chunks-attend-with-the-wrong-rows",
        "In a step with decoding requests, a prompt's queries are read from the first rows.",
        _BATCH,
        "TritonAttention.attend",
        "prefill_query = query[batch.num_decodes :]",
        "prefill_query = query[: len(query) - batch.num_decodes]",
    ),
    _mutant(
        "newest-token-not-attended",
        "Decode attends to earlier tokens, and not to the newest one.",
        _RUNNER,
        "SequenceRunner._batch_of",
        "batch = StepBatch(self.kv, lists, counts, lengths, num_decodes)",
        """
        seen = [max(1, each.sequence.num_stored) for each in spans]
        batch = StepBatch(self.kv, lists, counts, seen, num_decodes)
        """,
    ),
    _mutant(
        "values-after-the-end-loaded",
        "The decode kernel loads values after the last token: zero times NaN is NaN.",
        _DECODE,
        "_decode_kernel",
        "v = tl.load(v_cache + places[:, None] + dims[None, :], inside, other=0.0)",
        "v = tl.load(v_cache + places[:, None] + dims[None, :], d_inside[None, :], other=0.0)",
        ("5",),
    ),
    _mutant(
        "query-heads-interleaved",
        "Query heads are assigned to KV heads in turn, not in groups of neighbours.",
        _DECODE,
        "_decode_kernel",
        "heads = kv_head * GROUP + members",
        "heads = members * (Q_HEADS // GROUP) + kv_head",
    ),
    _mutant(
        "many-query-heads-interleaved",
        "In decode, more than 4 query heads per KV head are assigned in turn.",
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
        "many-query-heads-interleaved-in-chunks",
        "In chunks of prompts, more than 4 query heads per KV head are assigned in turn.",
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
        "many-query-heads-interleaved-by-the-reference",
        "In attention without kernels, more than 4 query heads per KV head are in turn.",
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
        "many-query-heads-interleaved-in-slots",
        "In resident decode without kernels, more than 4 query heads per KV head are in turn.",
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
        "The decode kernel does not scale the scores.",
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
