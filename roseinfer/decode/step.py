"""Decode steps that the host launches before it has read the previous step's tokens."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.attention.backend import ResidentBatch
from roseinfer.decode.graphs import StepGraphs, StepKind, required_top_logprobs
from roseinfer.decode.slots import (
    FIRST_BLOCK_COLUMN,
    DecodeSlots,
    SlotFields,
    SlotGuides,
    SlotPenalties,
    SlotRows,
)
from roseinfer.distributed.ranks import Decode, as_leader
from roseinfer.errors import ConfigError
from roseinfer.kernels.runtime import unusable_reason
from roseinfer.kv.sequence import reserve
from roseinfer.kv.transfers import Readback, outside_inference_mode
from roseinfer.paths import EnginePath
from roseinfer.sampling import apply_token_bitmask, pack_logprobs, rows_without_a_distribution
from roseinfer.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.guided.compiler import GuideMatcher
    from roseinfer.kv.sequence import CachedSequence
    from roseinfer.kv.transfers import PendingReadback
    from roseinfer.models.causal import CausalModel

# Steps over rows on the device: each row stores its token and samples the next one.


class RowSteps:
    """Runner of steps over the first rows, as CUDA graphs where they were captured."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        rows: SlotRows,
        sizes: Sequence[int],
        *,
        drafts: bool = False,
    ) -> None:
        """Set up steps of the given ``sizes`` in rows, ascending; the last is all rows.

        With ``drafts``, several rows may be consecutive tokens of one sequence. Of several ranks
        that compute a model, the first chooses the tokens, and tells the others to run each step.
        """
        self.rows = rows
        self._led_ranks = as_leader(model.ranks)
        self._follows = model.ranks is not None and self._led_ranks is None
        self.penalties: SlotPenalties | None = None
        self.guides: SlotGuides | None = None
        self._model = model
        self._attention = attention
        self._path_counts = attention.path_counts
        self._sizes = sizes
        self._drafts = drafts
        device = attention.kv.device
        self._greedy_kernel: Callable[..., None] | None = None
        """Argmax kernel that ends a greedy step; None where Triton cannot run."""
        if attention.uses_kernels and not unusable_reason(device):
            from roseinfer.kernels.triton.greedy import argmax_and_advance

            self._greedy_kernel = argmax_and_advance
        with outside_inference_mode():
            self.tokens = torch.zeros_like(rows.tokens)
            """Token that the last step chose in each row; -1 where logits had no distribution."""
        self._graphs: StepGraphs | None = None
        num_rows = len(rows.tokens)
        self._readback = Readback(num_rows, torch.int64, device)
        self._logprobs_readback = Readback(
            num_rows * (1 + 2 * MAX_TOP_LOGPROBS), torch.float64, device
        )
        self._packed_logprobs: dict[int, Tensor] = {}
        """Packed logprobs of the last step, by its number of top logprobs."""

    @classmethod
    def of_residents(
        cls, model: CausalModel, attention: AttentionBackend, num_slots: int
    ) -> RowSteps:
        """Set up steps over the rows of sequences that have slots."""
        path = EnginePath.RESIDENT
        rows = SlotRows.of(num_slots, model, attention.kv, attention.staging, path)
        return cls(model, attention, rows, step_sizes(num_slots))

    @classmethod
    def of_spans(
        cls,
        model: CausalModel,
        attention: AttentionBackend,
        max_rows: int,
        path: EnginePath,
        *,
        captured_rows: int = 0,
    ) -> RowSteps:
        """Set up steps of at most ``max_rows`` rows, several of which may be of one sequence.

        Steps of at most ``captured_rows`` rows are captured as CUDA graphs now, and larger ones
        when they first run; with 0, no step is captured.
        """
        sizes = _doubling_step_sizes(max_rows)
        rows = SlotRows.of(sizes[-1], model, attention.kv, attention.staging, path)
        steps = cls(model, attention, rows, sizes, drafts=True)
        if captured_rows:
            largest = steps.padded_size(captured_rows)
            steps.capture([size for size in sizes if size <= largest], required=False)
        return steps

    def capture(self, sizes: Sequence[int], *, required: bool) -> bool:
        """Capture plain steps of some sizes, and all others when they first run.

        Returns False where the model's steps cannot be captured.
        """
        graphs = StepGraphs(self.step, self.rows, self._path_counts)
        if graphs.capture(sizes, required=required):
            self._graphs = graphs
        return self._graphs is not None

    def padded_size(self, rows_in_use: int) -> int:
        """Return the smallest step size of at least ``rows_in_use`` rows."""
        return next(size for size in self._sizes if size >= rows_in_use)

    def run(self, count: int, kind: StepKind) -> None:
        if self._led_ranks is not None:
            self._led_ranks.send_command(Decode(self.rows.path, count, kind))
        run = self._graphs.run if self._graphs else self.step
        run(count, kind)

    def read_back(self, rows_in_use: int) -> PendingReadback:
        """Start copying the tokens that the last launched step chooses in the first rows."""
        return self._readback.start(self.tokens[:rows_in_use])

    def read_back_logprobs(self, rows_in_use: int, num_top_logprobs: int) -> PendingReadback:
        """Start copying the last launched step's logprobs, which its kind must include.

        The result concatenates the rows of ``pack_logprobs``.
        """
        return self._logprobs_readback.start(
            self._packed_logprobs[num_top_logprobs][:rows_in_use].flatten()
        )

    @torch.inference_mode()
    def step(self, count: int, kind: StepKind) -> None:
        """Store the token of each of the first ``count`` rows and sample the next one.

        This needs no data from the host, so that it can be captured once and replayed.
        """
        rows = self.rows
        for path in self._model.paths:
            self._path_counts[path] += 1
        lengths = rows.lengths(count)
        batch = ResidentBatch(rows.tables(count), lengths, self._drafts, kind.long_context)
        self._attention.prepare(batch)
        logits = self._model.logits(rows.tokens[:count], lengths, None, self._attention)
        if self._follows:
            rows.broadcast_tokens(count)
            lengths += rows.active(count)
            return
        if kind.guided and self.guides is not None:
            self._path_counts[EnginePath.GUIDED] += 1
            logits = apply_token_bitmask(logits.float(), self.guides.token_bitmasks[:count])
        token_ids = self._sample_rows(count, kind, logits, lengths)
        rows.broadcast_tokens(count)
        if kind.num_top_logprobs is not None:
            self._store_logprobs(logits, token_ids, kind.num_top_logprobs)

    def _sample_rows(self, count: int, kind: StepKind, logits: Tensor, lengths: Tensor) -> Tensor:
        """Sample the next token of each row, and add the stored one to the row's length."""
        rows = self.rows
        if kind.greedy and not kind.has_penalties and self._greedy_kernel is not None:
            self._path_counts[EnginePath.FUSED_ARGMAX] += 1
            token_ids, tokens = self.tokens[:count], rows.tokens[:count]
            self._greedy_kernel(logits, token_ids, tokens, lengths, rows.active(count))
            return token_ids
        penalties = row_token_counts = None
        if kind.has_penalties and self.penalties is not None:
            self._path_counts[EnginePath.PENALTIES] += 1
            penalties = self.penalties.columns(count)
            row_token_counts = self.penalties.count_tokens(rows.tokens[:count], rows.active(count))
        batch = rows.sampling(count, greedy=kind.greedy, penalties=penalties)
        token_ids = batch.sample_tokens(logits, lengths + 1, row_token_counts)
        token_ids = torch.where(rows_without_a_distribution(logits), -1, token_ids)
        self.tokens[:count] = token_ids
        rows.tokens[:count] = token_ids.clamp(min=0)
        lengths += rows.active(count)
        return token_ids

    def _store_logprobs(self, logits: Tensor, token_ids: Tensor, num_top_logprobs: int) -> None:
        self._path_counts[EnginePath.LOGPROBS] += 1
        packed = pack_logprobs(logits, token_ids, num_top_logprobs)
        if num_top_logprobs not in self._packed_logprobs:
            with outside_inference_mode():
                shape = len(self.tokens), packed.shape[1]
                self._packed_logprobs[num_top_logprobs] = torch.zeros(
                    shape, dtype=packed.dtype, device=packed.device
                )
        self._packed_logprobs[num_top_logprobs][: len(token_ids)] = packed


_LOG = logging.getLogger("roseinfer")
_EARLY_BLOCK_TOKENS = 16
"""Free tokens of its last block, at most, when a sequence may get its next block early."""


@dataclass(slots=True)
class Resident:
    """Sequence that has a slot, and so its state on the device."""

    sequence: CachedSequence
    """Sequence with all tokens but the newest, which only the device knows."""
    params: SamplingParams
    seed: int
    max_stored: int
    """Most tokens that it may store."""
    num_prompt_tokens: int
    """Prompt tokens among its tokens."""
    guide: GuideMatcher | None = None
    """Matcher that masks tokens, None for no guide; must know all tokens before each step."""
    slot: int = -1
    """Slot that it was assigned; -1 for none yet."""


class ResidentDecode:
    """Runner of the decode steps of residents."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        num_slots: int,
        *,
        graphs: bool,
        graphs_required: bool = False,
    ) -> None:
        self._kv = kv = attention.kv
        self._path_counts = attention.path_counts
        try:
            self.steps = RowSteps.of_residents(model, attention, num_slots)
            """Steps; penalties and guides are allocated for the first request that needs them."""
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"max_batch_size={num_slots}: {kv.device} has no memory for the state of "
                f"{num_slots} requests; lower max_batch_size, or turn resident_decode off"
            ) from error
        self.rows = self.steps.rows
        self.slots = DecodeSlots(self.rows)
        self._staging = attention.staging
        self._max_megakernel_length = model.max_megakernel_tokens
        self._num_slots = num_slots
        self._out_of_memory = False
        self._feature_counts = Counter[str]()
        """Number of residents that need each optional feature of a step."""
        self.kind = StepKind(greedy=True)
        """Kind of the next step: the union of the residents' features."""
        self.uses_graphs = graphs and self.steps.capture(
            step_sizes(num_slots), required=graphs_required
        )
        """True if steps run as CUDA graphs."""

    def supports(self, params: SamplingParams, vocabulary: int) -> bool:
        """Return True if a request can decode in a slot, with logits as wide as ``vocabulary``.

        One with penalties or a guide cannot where the device lacks memory for their state.
        """
        steps = self.steps
        try:
            if params.has_penalties and steps.penalties is None and not self._out_of_memory:
                steps.penalties = SlotPenalties(self._num_slots, vocabulary, self._staging)
            if params.guide is not None and steps.guides is None and not self._out_of_memory:
                steps.guides = SlotGuides(self._num_slots, vocabulary, self._staging)
        except (RuntimeError, MemoryError):
            self._out_of_memory = True
            _LOG.warning(
                "requests with penalties or guides decode without resident_decode, one step at a "
                "time: %s has no memory for the token counts or bitmasks of %d requests; lower "
                "max_batch_size",
                self._kv.device,
                self._num_slots,
            )
        has_counts = not params.has_penalties or steps.penalties is not None
        return has_counts and (params.guide is None or steps.guides is not None)

    def add_sequences(self, residents: Sequence[Resident], tokens: Tensor) -> None:
        """Assign slots to sequences, whose newest tokens are ``tokens``, on the device."""
        for each in residents:
            params, sequence = each.params, each.sequence
            each.slot = self.slots.assign_slot(sequence, params, each.seed)
            self._update_kind(params, 1)
            if params.has_penalties and self.steps.penalties is not None:
                self.steps.penalties.set_penalties(
                    each.slot, params, sequence.token_ids, each.num_prompt_tokens
                )
        # The rest of a partial last block is the sequence's already.
        size = self._kv.block_size
        partial = [each for each in residents if each.sequence.num_stored % size]
        self._reserve(partial, [size - each.sequence.num_stored % size for each in partial])
        self.rows.put_tokens([each.slot for each in residents], tokens.clamp(min=0))

    def remove_sequence(self, resident: Resident) -> None:
        """Release a resident's slot. This does not disturb steps in flight."""
        self.slots.release_slot(resident.slot)
        self._update_kind(resident.params, -1)
        if resident.params.has_penalties and self.steps.penalties is not None:
            self.steps.penalties.reset_slot(resident.slot)
        if resident.guide is not None and self.steps.guides is not None:
            self.steps.guides.reset_slot(resident.slot)

    def clear(self) -> None:
        """Release all slots, including those of an ``add_sequences`` call that failed."""
        self.slots.clear()
        if self.steps.penalties is not None:
            self.steps.penalties.clear()
        if self.steps.guides is not None:
            self.steps.guides.clear()
        self._feature_counts.clear()
        self.kind = StepKind(greedy=True)

    def _update_kind(self, params: SamplingParams, more: int) -> None:
        """Update ``kind`` for a request that was added (``more`` is 1) or removed (-1)."""
        counts = self._feature_counts
        counts["sampled"] += more * (params.temperature != 0)
        counts["penalised"] += more * params.has_penalties
        counts["guided"] += more * (params.guide is not None)
        counts["logprobs"] += more * params.logprobs
        counts["top_logprobs"] += more * (params.top_logprobs > 0)
        self.kind = StepKind(
            greedy=not counts["sampled"],
            has_penalties=counts["penalised"] > 0,
            guided=counts["guided"] > 0,
            num_top_logprobs=required_top_logprobs(
                logprobs=counts["logprobs"] > 0, num_top_logprobs=counts["top_logprobs"] > 0
            ),
        )

    def launch(self, residents: Sequence[Resident], early_blocks: int) -> PendingReadback:
        """Launch a step of all residents; the tokens read back are indexed by slot.

        A sequence that needs a block for its token gets one, with capacity for all tokens until
        that block is full. At most ``early_blocks`` more go to sequences that will need one soon.
        """
        needing_blocks = self._needing_blocks(residents, early_blocks)
        self._reserve(needing_blocks, [self._kv.block_size] * len(needing_blocks))
        if self.kind.guided and self.steps.guides is not None:
            self.steps.guides.upload({each.slot: each.guide for each in residents if each.guide})
        self.slots.upload()
        rows_in_use = self.slots.rows_in_use
        count = self.steps.padded_size(rows_in_use)
        kind = self.kind
        if (
            count == 1
            and self._max_megakernel_length
            and residents[0].sequence.num_stored >= self._max_megakernel_length
        ):
            kind = kind._replace(long_context=True)
        self.steps.run(count, kind)
        for each in residents:
            each.sequence.num_stored += 1
        self._path_counts[EnginePath.RESIDENT] += 1
        return self.steps.read_back(rows_in_use)

    def read_back_logprobs(self) -> PendingReadback:
        """Start copying the last launched step's logprobs, which its kind must include."""
        assert self.kind.num_top_logprobs is not None
        return self.steps.read_back_logprobs(self.slots.rows_in_use, self.kind.num_top_logprobs)

    def _needing_blocks(self, residents: Sequence[Resident], early_blocks: int) -> list[Resident]:
        """Return the residents that need a block now, and a few that will need one soon.

        Sequences that were admitted together fill their blocks together: allocating all of these
        blocks in one step would cause a latency spike. Other sequences need blocks one by one, and
        allocating a few takes little longer than one, so early allocations are batched.
        """
        soon = [
            each
            for each in residents
            if each.sequence.token_capacity - each.sequence.num_stored < _EARLY_BLOCK_TOKENS
        ]
        needing_now = [
            each for each in soon if each.sequence.num_stored >= each.sequence.token_capacity
        ]
        if early_blocks and len(soon) > len(needing_now):
            early = [
                each
                for each in soon
                if each.sequence.num_stored < each.sequence.token_capacity < each.max_stored
            ]
            max_early = min(
                -(-len(residents) // _EARLY_BLOCK_TOKENS), early_blocks // len(self._kv.groups)
            )
            if needing_now or len(early) >= max_early:
                needing_now += early[:max_early]
        return needing_now

    def _reserve(self, residents: Sequence[Resident], counts: Sequence[int]) -> None:
        if not residents:
            return
        reserve(self._kv, [each.sequence for each in residents], counts)
        for each in residents:
            self.slots.mark_new_blocks(each.slot)


def step_sizes(max_size: int) -> list[int]:
    """Return the step sizes: each at most twice the previous one, large ones 32 apart."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_size]
    sizes += [size for size in (*range(16, 64, 16), *range(64, max_size, 32)) if size < max_size]
    return [*sizes, max_size]


# Steps that store several tokens of a sequence, one row per token.
#
# A row decodes as the row of a resident sequence does, so the token after each has the same bits as
# where tokens are decoded one at a time, and a step can be a CUDA graph.


_MIN_STEP_ROWS = 16
"""Fewest rows that tensor cores multiply: smaller steps would take as long."""


_GREEDY = SamplingParams(temperature=0)


class TokenSpan(NamedTuple):
    """Tokens that a step stores after the stored ones of a sequence."""

    sequence: CachedSequence
    tokens: Sequence[int]
    """Tokens of the sequence, or drafts of its next ones."""
    params: SamplingParams = _GREEDY
    """Sampling parameters of the token after each."""
    seed: int = 0
    all_logits: bool = False
    """True if a forward pass computes the logits after every token, not only after the last."""


class MultiTokenDecode:
    """Runner of steps that store several tokens per sequence and sample the token after each."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        max_rows: int,
        path: EnginePath,
        *,
        captured_rows: int = 0,
    ) -> None:
        """Set up the steps as ``RowSteps.of_spans`` does; they are counted as ``path``."""
        self._kv = attention.kv
        self._path_counts = attention.path_counts
        self._steps = RowSteps.of_spans(
            model, attention, max_rows, path, captured_rows=captured_rows
        )
        self._rows = self._steps.rows
        self._num_rows = 0
        """Rows of the last step."""
        self.tokens: Tensor = self._steps.tokens
        """Tokens that the last step chose, row by row, on the device."""

    def launch(self, spans: Sequence[TokenSpan]) -> tuple[PendingReadback, PendingReadback | None]:
        """Store the tokens of all spans, and sample the token after each, sequence by sequence.

        Returns the sampled tokens, and their logprobs if some request wants them.
        """
        counts = [len(each.tokens) for each in spans]
        reserve(self._kv, [each.sequence for each in spans], counts)
        self._upload(spans)
        kind = _step_kind([each.params for each in spans])
        self._steps.run(self._steps.padded_size(self._num_rows), kind)
        for each in spans:
            each.sequence.num_stored += len(each.tokens)
        self._path_counts[self._rows.path] += 1
        logprobs = (
            None
            if kind.num_top_logprobs is None
            else self._steps.read_back_logprobs(self._num_rows, kind.num_top_logprobs)
        )
        return self._steps.read_back(self._num_rows), logprobs

    def clear(self) -> None:
        """Mark all rows for upload: their state on the device is unknown."""
        self._num_rows = len(self._rows.tokens)

    def _upload(self, spans: Sequence[TokenSpan]) -> None:
        rows = self._rows
        tokens: list[int] = []
        flat: list[int] = []
        width = self._table_width(spans)
        for sequence, row_tokens, params, seed, _ in spans:
            fields = SlotFields.of(params, seed)
            table = rows.padded_block_table(sequence, width)
            for length in range(sequence.num_stored, sequence.num_stored + len(row_tokens)):
                flat += [
                    len(tokens) + length - sequence.num_stored,
                    *fields._replace(length=length),
                ]
                flat += table
            tokens += row_tokens
        before, self._num_rows = self._num_rows, len(tokens)
        for row in range(self._num_rows, before):
            flat += [row, *rows.padding_row[: FIRST_BLOCK_COLUMN + width * rows.num_groups]]
        rows.put_rows(flat, max(before, self._num_rows))
        rows.put_first_tokens(tokens)

    def _table_width(self, spans: Sequence[TokenSpan]) -> int:
        """Return the blocks to upload per row: at least those in use.

        With several groups of layers, rows are uploaded whole, since each group has its columns.
        """
        if self._rows.num_groups > 1:
            return self._rows.blocks_per_group
        return max(len(each.sequence.block_lists[0]) for each in spans)


def _step_kind(params: Sequence[SamplingParams]) -> StepKind:
    num_top_logprobs = required_top_logprobs(
        logprobs=any(each.logprobs for each in params),
        num_top_logprobs=any(each.top_logprobs for each in params),
    )
    return StepKind(
        greedy=not any(each.temperature for each in params), num_top_logprobs=num_top_logprobs
    )


def _doubling_step_sizes(max_size: int) -> list[int]:
    """Return the step sizes, each twice the previous one, so that few graphs are captured."""
    sizes = [_MIN_STEP_ROWS]
    while sizes[-1] < max_size:
        sizes.append(2 * sizes[-1])
    return sizes
