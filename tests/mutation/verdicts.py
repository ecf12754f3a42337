"""Verdicts on mutants that survived: equal, with the reason, or a gap of the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one survivor shows."""

    file: str
    function: str
    before: str
    after: str
    why: str
    equal: bool = True
    """True if no caller can see the change; False for a gap."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.before, self.after


VERDICTS: tuple[Verdict, ...] = (
    Verdict(
        "pytest_roseinfer/oracle/pages.py",
        "BlockCounts.truncate",
        "window, blocks[num_pages - 1], cached=self.stored.keeps(seq, num_pages - 1)",
        "window, blocks[num_pages - 1], cached=None",
        "The prediction for a truncated page that a prefix cache keeps was not noticed by the "
        "tests that ran.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/graphs.py",
        "StepGraphs.__init__",
        "self._graphs: _Graphs = {}",
        "self._graphs: _Graphs = None",
        "Only a captured CUDA graph runs this statement, and this run had no GPU.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/graphs.py",
        "StepGraphs.capture",
        "reason = str(error).splitlines()[0]",
        "reason = None",
        "Only a captured CUDA graph runs this statement, and this run had no GPU.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/graphs.py",
        "StepGraphs._capture",
        "counts = self._path_counts - warm",
        "counts = None",
        "Only a captured CUDA graph runs this statement, and this run had no GPU.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/graphs.py",
        "StepGraphs._capture",
        "counts = self._path_counts - warm",
        "counts = self._path_counts + warm",
        "Only a captured CUDA graph runs this statement, and this run had no GPU.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/slots.py",
        "SlotRows.sampling",
        "greedy=greedy,",
        "greedy=None,",
        "It is a shortcut: rows of temperature 0 get the argmax without it too.",
    ),
    Verdict(
        "roseinfer/decode/step.py",
        "RowSteps.capture",
        "if graphs.capture(sizes, required=required):",
        "if graphs.capture(sizes, ):",
        "Only a captured CUDA graph runs this statement, and this run had no GPU.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/step.py",
        "RowSteps.step",
        "batch = ResidentBatch(rows.tables(count), lengths, self._drafts, kind.long_context)",
        "batch = ResidentBatch(rows.tables(count), lengths, None, kind.long_context)",
        "The attention with kernels reads it; no example and no test that ran on the mutant "
        "notices.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/step.py",
        "ResidentDecode.clear",
        "self.kind = StepKind(greedy=True)",
        "self.kind = StepKind(greedy=False)",
        "The next request that enters a slot computes the kind again, before any step.",
    ),
    Verdict(
        "roseinfer/decode/step.py",
        "ResidentDecode.launch",
        "kind = kind._replace(long_context=True)",
        "kind = kind._replace(long_context=False)",
        "Only the megakernel has a second kind of step for long contexts, and this run had no GPU.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/step.py",
        "ResidentDecode._needing_blocks",
        "-(-len(residents) // _EARLY_BLOCK_TOKENS), early_blocks // len(self._kv.groups)",
        "-(+len(residents) // _EARLY_BLOCK_TOKENS), early_blocks // len(self._kv.groups)",
        "One block less is given out early in a step; outputs stay the same, and no test "
        "counts them.",
        equal=False,
    ),
    Verdict(
        "roseinfer/decode/step.py",
        "MultiTokenDecode.__init__",
        "largest = self._steps.padded_size(captured_rows)",
        "largest = self._steps.padded_size(None)",
        "Only a captured CUDA graph runs this statement, and this run had no GPU.",
        equal=False,
    ),
    Verdict(
        "roseinfer/engine/engine.py",
        "Engine.__init__",
        "max_steps_in_flight=self._run_ahead,",
        "",
        "The bound on blocks of windows is lower; no test fills a cache with windows while "
        "steps are in flight.",
        equal=False,
    ),
    Verdict(
        "roseinfer/engine/engine.py",
        "Engine.step",
        "self._step_thread = None",
        'self._step_thread = ""',
        "The attribute is only compared with the number of a thread.",
    ),
    Verdict(
        "roseinfer/engine/prefix_cache.py",
        "PrefixCache.match",
        "tail = None",
        'tail = ""',
        "A partial block whose chain is incomplete in a window has no test.",
        equal=False,
    ),
    Verdict(
        "roseinfer/engine/prefix_cache.py",
        "PrefixCache._remove_subtree",
        "self._unmark_evictable_block(_OutOfWindowBlock(each, group))",
        "self._unmark_evictable_block(_OutOfWindowBlock(each, None))",
        "A block that left its window before its entry is evicted stays marked; no test looks "
        "at the marks afterwards.",
        equal=False,
    ),
    Verdict(
        "roseinfer/engine/request.py",
        "RequestBlockAllocator.ensure",
        "max(missing, self._prefixes.num_evictable_blocks // _EVICTION_DIVISOR)",
        "max(missing, self._prefixes.num_evictable_blocks / _EVICTION_DIVISOR)",
        "A fraction evicts up to one block more; no test counts evictions that exactly.",
        equal=False,
    ),
    Verdict(
        "roseinfer/engine/runner.py",
        "TokenSampler.__init__",
        "numbers = most_rows * (1 + 2 * MAX_TOP_LOGPROBS)",
        "numbers = most_rows * (1 + 3 * MAX_TOP_LOGPROBS)",
        "The buffer is larger than any step needs.",
    ),
    Verdict(
        "roseinfer/engine/runner.py",
        "TokenSampler.sample_tokens",
        "return torch.where(rows_without_a_distribution(logits), -1, chosen), logprobs",
        "return torch.where(rows_without_a_distribution(logits), -2, chosen), logprobs",
        "Every negative token says that the row has no distribution.",
    ),
    Verdict(
        "roseinfer/engine/runner.py",
        "SequenceRunner.__init__",
        "kv.observe_block_copies(lambda plan: send_command(CopyBlocks.of(plan)))",
        "kv.observe_block_copies(lambda plan: send_command(None))",
        "tests/distributed runs it in processes of ranks, which these mutants are not in.",
        equal=False,
    ),
    Verdict(
        "roseinfer/engine/runner.py",
        "StepRunner._early_blocks",
        "if step.num_spare_blocks <= len(residents) * len(kv.groups):",
        "if step.num_spare_blocks < len(residents) * len(kv.groups):",
        "With exactly as many spare blocks, blocks are given out early; outputs stay the same, "
        "and no test counts them.",
        equal=False,
    ),
    Verdict(
        "roseinfer/engine/runner.py",
        "StepRunner._launch_drafted",
        "spans = [_span_of(request, 1) for request in requests]",
        "spans = [_span_of(request, 2) for request in requests]",
        "A request that decodes has one token that is not stored, so a longer slice is the same.",
    ),
    Verdict(
        "roseinfer/engine/runner.py",
        "StepRunner._sample_tokens",
        "rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]",
        "rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=None)]",
        "The lists always have one length; `strict` only states it.",
    ),
    Verdict(
        "roseinfer/engine/runner.py",
        "StepRunner._assign_slots",
        "for row, request in zip(rows, requests, strict=True):",
        "for row, request in zip(rows, requests, strict=False):",
        "The lists always have one length; `strict` only states it.",
    ),
    Verdict(
        "roseinfer/engine/scheduler.py",
        "Scheduler.next_step",
        "for _ in range(len(self.running) + 2):",
        "for _ in range(len(self.running) + 3):",
        "The last round always returns or raises before the bound.",
    ),
    Verdict(
        "roseinfer/engine/scheduler.py",
        "Scheduler._requeue",
        "later = (at for at, other in enumerate(self.waiting) if other.id > request.id)",
        "later = (at for at, other in enumerate(self.waiting) if other.id >= request.id)",
        "No other request has the same id.",
    ),
    Verdict(
        "roseinfer/engine/speculation.py",
        "Speculation._leave_slot",
        "if had_room and sequence.num_stored >= sequence.token_capacity",
        "if had_room or sequence.num_stored >= sequence.token_capacity",
        "A block too many is counted for a request that leaves its slot, so a step may preempt "
        "too early.",
        equal=False,
    ),
    Verdict(
        "roseinfer/kv/manager.py",
        "KVBlockManager.truncate_groups",
        "by_row = [list(own) for own in zip(*stored, strict=True)]",
        "by_row = [list(own) for own in zip(*stored, )]",
        "The lists always have one length; `strict` only states it.",
    ),
    Verdict(
        "roseinfer/kv/manager.py",
        "StepBatch.plan_all",
        "group.layers[0], [own[at] for own in self.block_lists], self.counts",
        "[own[at] for own in self.block_lists], self.counts",
        "tests/distributed runs it in processes of ranks, which these mutants are not in.",
        equal=False,
    ),
    Verdict(
        "roseinfer/kv/plan.py",
        "_tail_blocks",
        "for row, (position, count) in enumerate(zip(seen.positions, counts, strict=True)):",
        "for row, (position, count) in enumerate(zip(seen.positions, counts, strict=False)):",
        "The lists always have one length; `strict` only states it.",
    ),
    Verdict(
        "roseinfer/kv/plan.py",
        "_allocate_row_blocks",
        "new = KVBlockInfo(pool.layer, SCRATCH, 0, 0)  # a throwaway record",
        "new = KVBlockInfo(None, SCRATCH, 0, 0)  # a throwaway record",
        "Nothing reads the layer of a throwaway record.",
    ),
    Verdict(
        "roseinfer/kv/plan.py",
        "check_truncation",
        "for block_ids, own, length in zip(block_lists, infos, lengths, strict=True):",
        "for block_ids, own, length in zip(block_lists, infos, lengths, strict=None):",
        "The lists always have one length; `strict` only states it.",
    ),
    Verdict(
        "roseinfer/kv/plan.py",
        "TruncationBatch.commit",
        "for lists, length in zip(self.rows, self.lengths, strict=True):",
        "for lists, length in zip(self.rows, self.lengths, ):",
        "The lists always have one length; `strict` only states it.",
    ),
    Verdict(
        "roseinfer/kv/pool.py",
        "BlockPool.__init__",
        "self.infos = [KVBlockInfo(layer, SCRATCH, 0, 0)]",
        "self.infos = [KVBlockInfo(layer, None, 0, 0)]",
        "Nothing reads the record of the scratch block.",
    ),
    Verdict(
        "roseinfer/kv/storage.py",
        "IndexStaging._next_buffer",
        "if size + _ALIGNMENT_MARGIN > self._capacity:",
        "if size + _ALIGNMENT_MARGIN >= self._capacity:",
        "The staging buffer grows earlier, or to a larger size; its contents are the same.",
    ),
    Verdict(
        "roseinfer/kv/storage.py",
        "IndexStaging._next_buffer",
        "self._allocate(1 << (size + _ALIGNMENT_MARGIN - 1).bit_length())",
        "self._allocate(1 << (size + _ALIGNMENT_MARGIN + 1).bit_length())",
        "The staging buffer grows earlier, or to a larger size; its contents are the same.",
    ),
    Verdict(
        "roseinfer/kv/storage.py",
        "AppendExecutor.prepare",
        "plan.path = choose_write_path(self.policy, plan, triton=False)",
        "plan.path = choose_write_path(None, plan, triton=False)",
        "tests/kv/test_triton_unavailable.py runs it in a process of its own, which these "
        "mutants are not in.",
        equal=False,
    ),
    Verdict(
        "roseinfer/kv/storage.py",
        "AppendExecutor.prepare",
        "plan.path = choose_write_path(self.policy, plan, triton=False)",
        "plan.path = choose_write_path(self.policy, plan, triton=None)",
        "tests/kv/test_triton_unavailable.py runs it in a process of its own, which these "
        "mutants are not in.",
        equal=False,
    ),
    Verdict(
        "roseinfer/kv/transfers.py",
        "Readback.start",
        "host[:count].copy_(vector, non_blocking=True)",
        "host[:count].copy_(vector, non_blocking=False)",
        "`non_blocking` changes only who waits; the reader waits for the event, or there is none.",
    ),
    Verdict(
        "roseinfer/kv/transfers.py",
        "Readback._new_buffer",
        "return host, self._transfers.event() if self._transfers.is_async else None",
        "return host, self._transfers.event() if (self._transfers.is_async) and False else None",
        "Transfers are asynchronous on a GPU only, and this run had none.",
        equal=False,
    ),
    Verdict(
        "roseinfer/sampling.py",
        "TokenBitmaskBuffer.write",
        "self._device[:count].copy_(self._host[:count], non_blocking=True)",
        "self._device[:count].copy_(self._host[:count], non_blocking=False)",
        "`non_blocking` changes only who waits; the reader waits for the event, or there is none.",
    ),
    Verdict(
        "roseinfer/sampling.py",
        "SamplingBatch.probabilities",
        "sampled = torch.zeros_like(sorted_logits).scatter(-1, order, sorted_logits.softmax(-1))",
        "sampled = torch.zeros_like(sorted_logits).scatter(-1, order, sorted_logits.softmax(+1))",
        "Logits have two dimensions, so the last one is dimension 1.",
    ),
)
