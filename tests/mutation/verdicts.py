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
        "ResidentDecode.clear",
        "self.kind = StepKind(greedy=True)",
        "self.kind = StepKind(greedy=False)",
        "The next request that enters a slot computes the kind again, before any step.",
    ),
    Verdict(
        "roseinfer/decode/step.py",
        "RowSteps.of_spans",
        "largest = steps.padded_size(captured_rows)",
        "largest = steps.padded_size(None)",
        "Only a captured CUDA graph runs this statement, and this run had no GPU.",
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
        "roseinfer/kv/manager.py",
        "KVBlockManager.truncate_groups",
        "by_row = [list(own) for own in zip(*stored, strict=True)]",
        "by_row = [list(own) for own in zip(*stored, )]",
        "The lists always have one length; `strict` only states it.",
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
        "plan.path = choose_write_path(self.policy, plan, triton=None)",
        "A condition treats None as it treats False.",
    ),
    Verdict(
        "roseinfer/kv/transfers.py",
        "Readback.start",
        "host[:count].copy_(vector, non_blocking=True)",
        "host[:count].copy_(vector, non_blocking=False)",
        "`non_blocking` changes only who waits; the reader waits for the event, or there is none.",
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
