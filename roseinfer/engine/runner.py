"""Forward passes: run sequences through the model, and launch the engine's steps."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import StepBatch, default_backend, find_backend
from roseinfer.decode.readback import Readback
from roseinfer.decode.step import MultiTokenDecode, NewResident, TokenSpan
from roseinfer.distributed.orders import CopyBlocks, Forward
from roseinfer.distributed.ranks import as_leader
from roseinfer.engine.drafter import MAX_DRAFT_TOKENS
from roseinfer.engine.in_flight import (
    NO_DRAFTS,
    TokensInFlight,
    drop_tokens_in_flight,
    launch_prompt_logprobs,
)
from roseinfer.errors import BadArgument
from roseinfer.kv.groups import count_out_of_window
from roseinfer.kv.manager import StepAppend
from roseinfer.kv.sequence import CachedSequence
from roseinfer.kv.storage import IndexStaging
from roseinfer.paths import EnginePath
from roseinfer.sampling.batch import SamplingBatch
from roseinfer.sampling.logits import (
    TokenBitmaskBuffer,
    apply_token_bitmask,
    count_prompt_and_output,
)
from roseinfer.sampling.logprobs import pack_logprobs, rows_without_a_distribution
from roseinfer.sampling_params import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from roseinfer.config import EngineConfig
    from roseinfer.decode.readback import PendingReadback
    from roseinfer.decode.step import ResidentDecode
    from roseinfer.engine.in_flight import DraftsVerified, PromptLogprobsInFlight
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.models.causal import CausalModel

# Short prompts stored as rows of a decode step, so that the step can be a CUDA graph.
#
# The kernels of a short prompt take longer to launch one by one than to run.


_MAX_SEQUENCE_LENGTH = 1024
"""Most tokens of a sequence stored in rows. Each row reads the keys and values of all previous
tokens by itself."""


class PromptRows:
    """The rows for the prompts of a step, if these are short and need only what rows support."""

    def __init__(self, rows: MultiTokenDecode, most: int) -> None:
        self._rows = rows
        self._max_tokens = most

    @property
    def tokens(self) -> Tensor:
        """Tokens chosen by the last step, one for each row, on the device."""
        return self._rows.tokens

    def can_launch(self, chunks: Sequence[tuple[Request, int]]) -> bool:
        return 0 < sum(count for _, count in chunks) <= self._max_tokens and all(
            request.sequence.num_stored + count <= _MAX_SEQUENCE_LENGTH
            and request.guide is None
            and not request.params.has_penalties
            and not request.needs_prompt_logprobs
            for request, count in chunks
        )

    def launch(
        self, chunks: Sequence[tuple[Request, int]]
    ) -> tuple[list[Request], list[int], PendingReadback, PendingReadback | None]:
        """Store the next tokens of each request, as many as its chunk says.

        This returns the requests whose prompts are complete, the rows of their next tokens, these
        tokens and their log-probabilities.
        """
        spans: list[TokenSpan] = []
        complete: list[Request] = []
        rows: list[int] = []
        end = 0
        for request, count in chunks:
            sequence = request.sequence
            tokens = sequence.token_ids[sequence.num_stored : sequence.num_stored + count]
            spans.append(TokenSpan(sequence, request.params, request.seed, tokens))
            end += count
            if request.num_unstored == count:
                complete.append(request)
                rows.append(end - 1)
        return complete, rows, *self._rows.launch(spans)

    def clear(self) -> None:
        """Mark all rows for upload, since their state on the device is unknown."""
        self._rows.clear()


# Sampling for requests that decode without slots, and for those whose prompts end.


class TokenSampler:
    """A sampler that caches the parameters of the last requests: the next are mostly the same."""

    def __init__(self, staging: IndexStaging, most_rows: int) -> None:
        self._staging = staging
        self._most_rows = most_rows
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        self.guided = False
        """True if some of those requests have guides."""
        self._token_bitmasks: TokenBitmaskBuffer | None = None
        """Buffer of bitmasks; None until the first request with a guide."""
        numbers = most_rows * (1 + 2 * MAX_TOP_LOGPROBS)
        self._logprobs_readback = Readback(numbers, torch.float64, staging.device)

    def drop_cached_params(self) -> None:
        """Drop the cached parameters, since one of the requests has ended."""
        self._sampling = None

    def sample_tokens(
        self, owners: list[Request], positions: Sequence[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, PendingReadback | None]:
        """Choose a token for each row of logits, given the request and position of each row.

        The token is -1 where none can be chosen. This also returns their packed log-probabilities,
        or None if no request needs these.
        """
        batch = self._sampling_batch(owners, logits.device)
        tally = self._tally(owners, logits) if batch.penalties else None
        staged = self._staging.stage([list(positions)]).columns[0]
        if self.guided:
            logits = apply_token_bitmask(
                logits.float(), self._token_bitmask(owners, logits.shape[-1])
            )
        chosen = batch.sample_tokens(logits, staged, tally)
        logprobs = None
        if any(request.params.logprobs for request in owners):
            most = max(request.params.top_logprobs for request in owners)
            logprobs = self._logprobs_readback.start(pack_logprobs(logits, chosen, most).flatten())
        return torch.where(rows_without_a_distribution(logits), -1, chosen), logprobs

    def _sampling_batch(self, requests: list[Request], device: torch.device) -> SamplingBatch:
        """Return the parameters as columns, cached while the requests stay the same."""
        if self._sampling is None or self._sampling[0] != requests:
            batch = SamplingBatch.of(
                [request.params for request in requests],
                [request.seed for request in requests],
                device,
            )
            self._sampling = (requests, batch)
            self.guided = any(request.guide for request in requests)
        return self._sampling[1]

    def _token_bitmask(self, requests: list[Request], vocabulary: int) -> torch.Tensor:
        """Return the bitmask of the tokens that each request may get next."""
        if self._token_bitmasks is None:
            self._token_bitmasks = TokenBitmaskBuffer(
                self._most_rows, vocabulary, self._staging.device
            )
        return self._token_bitmasks.write([request.guide for request in requests])

    def _tally(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Count the tokens of the requests that have penalties, from scratch in every step."""
        tally = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        rows: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        for row, request in enumerate(requests):
            if request.params.has_penalties:
                own = count_prompt_and_output(request.sequence.token_ids, request.prompt_length)
                rows += [row] * len(own)
                tokens += own
                counts += own.values()
        at_rows, at_tokens, numbers = self._staging.stage([rows, tokens, counts]).columns
        return tally.index_put_((at_rows, at_tokens), numbers.int())


class SequenceRunner:
    """A runner of sequences, of any lengths, through one model on one cache."""

    def __init__(
        self, model: CausalModel, kv: KVBlockManager, *, attention: str | None = None
    ) -> None:
        self.model = model
        self.kv = kv
        self.path_counts: Counter[str] = Counter()
        self.staging = IndexStaging(kv.device, kv.work_counts)
        """Reused buffers through which a step's numbers are copied to the device."""
        self._ranks = as_leader(model.ranks)
        """The ranks, if this one leads them; None otherwise."""
        if self._ranks is not None:
            send_command = self._ranks.send_command
            kv.tell_copies(lambda plan: send_command(CopyBlocks.of(plan)))
        backend = find_backend(attention or default_backend(kv.device))
        self.attention = backend(model.traits, kv, self.staging, self.path_counts)

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[CachedSequence], torch.Tensor]:
        """Store prompts; return a sequence for each, and the logits of their next tokens."""
        for prompt in prompts:
            self.model.shape.check_tokens(prompt)
        sequences = [self.new_cached_sequence(list(prompt)) for prompt in prompts]
        return sequences, self.extend(sequences)

    def extend(
        self,
        sequence_runner: Sequence[CachedSequence],
        counts: Sequence[int] | None = None,
        *,
        with_all_logits: Collection[int] = (),
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> torch.Tensor:
        """Store the next ``counts[i]`` tokens of sequence ``i``, or all that are not stored yet.

        The last of them are the ``drafts[i]``, which follow the sequence's own tokens and are not
        part of it. This returns the logits after the last stored token of each sequence, and after
        every stored token of the sequences ``with_all_logits``. It is fastest if sequences that
        store a single token come first.
        """
        pending = [len(sequence.token_ids) - sequence.num_stored for sequence in sequence_runner]
        for at, draft in drafts.items():
            pending[at] += len(draft)
        counts = pending if counts is None else list(counts)
        tokens: list[int] = []
        positions: list[int] = []
        rows_out: list[int] = []
        lengths: list[int] = []
        for at, (sequence, count, left) in enumerate(
            zip(sequence_runner, counts, pending, strict=True)
        ):
            if left < 1:
                raise BadArgument(f"sequence {at}: all of its tokens are stored already")
            if not (left if at in drafts else 1) <= count <= left:
                raise BadArgument(f"sequence {at}: it has {left} tokens to store, not {count}")
            end = sequence.num_stored + count
            if end > self.model.shape.max_length:
                raise BadArgument(
                    f"sequence {at}: {end} tokens; the model has {self.model.shape.max_length} "
                    "positions"
                )
            first = len(tokens) if at in with_all_logits else len(tokens) + count - 1
            rows_out += range(first, len(tokens) + count)
            tokens += sequence.token_ids[sequence.num_stored : end]
            tokens += drafts.get(at, ())
            positions += range(sequence.num_stored, end)
            lengths.append(end)
        num_decodes = next((at for at, count in enumerate(counts) if count > 1), len(counts))
        one_token_each = num_decodes == len(counts)
        lists = [sequence.block_lists for sequence in sequence_runner]
        new = StepAppend(self.kv, lists, counts, one_token_each=one_token_each)
        batch = StepBatch(new, lists, counts, lengths, num_decodes)
        if self._ranks is not None:
            new.plan_all()
            self._ranks.send_command(
                Forward.of(batch, tokens, positions, None if one_token_each else rows_out)
            )
        self.attention.prepare(batch)
        for path in self.model.paths:
            self.path_counts[path] += 1
        stage = self.staging.stage
        token_ids, at_positions = stage([tokens, positions]).columns
        rows = None if one_token_each else stage([rows_out]).columns[0]
        logits = self.model.logits(token_ids, at_positions, rows, self.attention)
        size = self.kv.block_size
        for sequence, count in zip(sequence_runner, counts, strict=True):
            sequence.num_stored += count
            sequence.token_capacity = len(sequence.block_lists[0]) * size
        return logits

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Return a new sequence that shares all stored tokens and can be continued differently."""
        child = CachedSequence(
            [list(block_ids) for block_ids in sequence.block_lists],
            list(sequence.token_ids),
            sequence.num_stored,
        )
        for block_ids in child.block_lists:
            self.kv.incref_blocks(block_ids[count_out_of_window(block_ids) :])
        sequence.token_capacity = child.token_capacity = sequence.num_stored
        self.path_counts[EnginePath.FORKED] += 1
        return child

    def select_rows(self, values: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return some rows, in order. Indexing with a list would wait for the device."""
        return values.index_select(0, self.staging.stage([rows]).columns[0])

    def release(self, sequence: CachedSequence) -> None:
        sequence.free_all_blocks(self.kv)
        sequence.token_ids = []

    def new_cached_sequence(self, token_ids: list[int]) -> CachedSequence:
        return CachedSequence([[] for _ in self.kv.groups], token_ids)


class StepRunner:
    """A launcher of steps: one forward pass for resident requests, another for all others."""

    def __init__(
        self, sequence_runner: SequenceRunner, resident: ResidentDecode | None, config: EngineConfig
    ) -> None:
        """Allocate rows for drafts and short prompts if requests have slots.

        Tensor-parallel models have no such rows.
        """
        self.on_drafts_verified: DraftsVerified | None = None
        """Callback for requests whose drafts were verified."""
        self._sequence_runner = sequence_runner
        self._resident = resident
        self._drafted_rows: MultiTokenDecode | None = None
        self._prompt_rows: PromptRows | None = None
        device = sequence_runner.kv.device
        rows = config.max_batch_size * (1 + MAX_DRAFT_TOKENS if config.speculation else 1)
        if resident is not None and sequence_runner.model.ranks is None:
            new_rows, graphs = (
                partial(MultiTokenDecode, sequence_runner.model, sequence_runner.attention),
                resident.uses_graphs,
            )
            if config.speculation:
                self._drafted_rows = new_rows(
                    rows, EnginePath.DRAFT_VERIFICATION, captured_rows=int(graphs)
                )
            if most := config.num_prompt_rows(captured=graphs):
                prompt_rows = new_rows(
                    most, EnginePath.PROMPTS_AS_ROWS, captured_rows=most if graphs else 0
                )
                self._prompt_rows = PromptRows(prompt_rows, most)
        self._tokens = Readback(rows, torch.int64, device)
        self._token_sampler = TokenSampler(sequence_runner.staging, rows)
        # A step stores no more tokens than the cache holds.
        capacity = sequence_runner.kv.max_blocks_per_layer * sequence_runner.kv.block_size
        self._prompts = Readback(capacity, torch.float32, device)

    def launch(self, step: Step) -> list[TokensInFlight | PromptLogprobsInFlight]:
        """Start a step. Its tokens are in flight when this returns."""
        flights: list[TokensInFlight | PromptLogprobsInFlight] = []
        residents = [request for request in step.decoding if request.resident]
        others = [request for request in step.decoding if not request.resident]
        if residents:
            flights.append(self._launch_residents(residents, self._early_blocks(step, residents)))
        # Requests that enter a slot here are not in the residents' step, so they come after it.
        if others and self._drafted_rows is not None:
            drafted = [request for request in others if request.drafter is not None]
            others = [request for request in others if request.drafter is None]
            if drafted:
                flights.append(self._launch_drafted(drafted, self._drafted_rows, step.drafts))
        elif step.drafts:
            others.sort(key=lambda request: request.id in step.drafts)
        requests = [*others, *(request for request, _ in step.chunks)]
        if (
            self._prompt_rows is not None
            and not others
            and self._prompt_rows.can_launch(step.chunks)
        ):
            flights += self._launch_in_rows(step.chunks, self._prompt_rows)
        elif requests:
            counts = [1] * len(others) + [count for _, count in step.chunks]
            reported = _prompts_needing_logprobs(requests, counts) if step.chunks else {}
            flights += self._launch_forward_pass(requests, counts, reported, step.drafts)
        return flights

    def withdraw(self, request: Request) -> None:
        """Release a request's slot, and drop its tokens in flight."""
        self.release_request_slot(request)
        drop_tokens_in_flight(request)

    def release_request_slot(self, request: Request) -> None:
        """Release the request's slot, if it has one. Slots are released nowhere else."""
        if self._resident is not None and request.resident is not None:
            self._resident.remove_sequence(request.resident)
            request.resident = None

    def drop_cached_params(self) -> None:
        """Drop the cached parameters of the last step, since one of its requests has ended."""
        self._token_sampler.drop_cached_params()

    def reset_slots(self) -> None:
        """Release every slot after a step that raised."""
        self.drop_cached_params()
        if self._resident is not None:
            self._resident.clear()
        for rows in (self._drafted_rows, self._prompt_rows):
            if rows is not None:
                rows.clear()

    def _early_blocks(self, step: Step, residents: Sequence[Request]) -> int:
        """Return how many blocks may be allocated early to residents that will soon need one.

        This is 0 unless the next step has enough even if every resident needs a block then.
        """
        kv = self._sequence_runner.kv
        if step.num_spare_blocks <= len(residents) * len(kv.groups):
            return 0
        return max(0, kv.num_free_blocks(0) - step.max_blocks_needed)

    def _launch_residents(self, requests: list[Request], early_blocks: int) -> TokensInFlight:
        assert self._resident is not None
        residents = [request.resident for request in requests if request.resident]
        rows = [each.slot for each in residents]
        arrival = self._resident.launch(residents, early_blocks)
        kind = self._resident.kind
        logprobs = (
            self._resident.read_back_logprobs() if kind.num_top_logprobs is not None else None
        )
        # The next mask of a guide depends on the token.
        flight = TokensInFlight(requests, rows, arrival, logprobs, kind.guided, NO_DRAFTS, None)
        for request in requests:
            coming = len(request.sequence.token_ids) + request.num_in_flight
            if coming == request.max_total_length:
                self.release_request_slot(request)
        return flight

    def _launch_drafted(
        self,
        requests: list[Request],
        drafted_rows: MultiTokenDecode,
        drafted: Mapping[int, list[int]],
    ) -> TokensInFlight:
        """Verify drafts. Requests without drafts have one row; those in backoff enter slots."""
        rows, entries = [], []
        end = 0
        for request in requests:
            tokens = [request.sequence.token_ids[-1], *drafted.get(request.id, ())]
            entries.append(TokenSpan(request.sequence, request.params, request.seed, tokens))
            rows.append(end)
            end += len(tokens)
        arrival, logprobs = drafted_rows.launch(entries)
        vocabulary = self._sequence_runner.model.shape.vocab_size
        stay = self._assign_slots(requests, rows, drafted_rows.tokens, vocabulary)
        return TokensInFlight(
            requests, rows, arrival, logprobs, stay, drafted, self.on_drafts_verified
        )

    def _launch_in_rows(
        self, chunks: Sequence[tuple[Request, int]], prompt_rows: PromptRows
    ) -> list[TokensInFlight | PromptLogprobsInFlight]:
        """Store prompts as rows, and choose the next token of each complete one."""
        complete, rows, arrival, logprobs = prompt_rows.launch(chunks)
        if not complete:
            return []
        stay = self._assign_slots(
            complete, rows, prompt_rows.tokens, self._sequence_runner.model.shape.vocab_size
        )
        return [TokensInFlight(complete, rows, arrival, logprobs, stay, NO_DRAFTS, None)]

    def _launch_forward_pass(
        self,
        requests: list[Request],
        counts: list[int],
        reported: Mapping[int, int],
        drafted: Mapping[int, list[int]],
    ) -> list[TokensInFlight | PromptLogprobsInFlight]:
        """Run the requests with their drafts; read back prompt logprobs of those ``reported``."""
        sequences = [request.sequence for request in requests]
        drafts: dict[int, list[int]] = {}
        if drafted:
            ids = enumerate(request.id for request in requests)
            drafts = {at: drafted[request_id] for at, request_id in ids if request_id in drafted}
            for at, draft in drafts.items():
                counts[at] += len(draft)
        with_all_logits = {*reported, *drafts}
        logits = self._sequence_runner.extend(
            sequences, counts, with_all_logits=with_all_logits, drafts=drafts
        )
        complete = [at for at, each in enumerate(requests) if at in drafts or not each.num_unstored]
        rows = complete
        flights: list[TokensInFlight | PromptLogprobsInFlight] = []
        if with_all_logits:
            ends = [
                *accumulate(counts[at] if at in with_all_logits else 1 for at in range(len(counts)))
            ]
            rows = [
                row
                for at in complete
                for row in range(ends[at] - 1 - len(drafts.get(at, ())), ends[at])
            ]
            if reported:
                staging = self._sequence_runner.staging
                flights.append(
                    launch_prompt_logprobs(requests, reported, ends, logits, staging, self._prompts)
                )
        if not complete:
            return flights
        if len(rows) < len(logits):
            logits = self._sequence_runner.select_rows(logits, rows)
        if len(complete) < len(requests):
            requests = [requests[at] for at in complete]
        return [*flights, self._sample_tokens(requests, logits, drafted)]

    def _sample_tokens(
        self, requests: list[Request], logits: torch.Tensor, drafted: Mapping[int, list[int]]
    ) -> TokensInFlight:
        """Choose the next token of each request, and the one after each of its drafts."""
        owners, rows = requests, [*range(len(requests))]
        positions = [len(request.sequence.token_ids) for request in requests]
        if drafted:
            sizes = [1 + len(drafted.get(request.id, ())) for request in requests]
            rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
            owners = [each for each, size in zip(requests, sizes, strict=True) for _ in range(size)]
            begins = zip(positions, sizes, strict=True)
            positions = [begin + at for begin, size in begins for at in range(size)]
        chosen, logprobs = self._token_sampler.sample_tokens(owners, positions, logits)
        stay = self._assign_slots(requests, rows, chosen, logits.shape[-1])
        arrival = self._tokens.start(chosen)
        blocks_next_step = stay or self._token_sampler.guided
        return TokensInFlight(
            requests, rows, arrival, logprobs, blocks_next_step, drafted, self.on_drafts_verified
        )

    def _assign_slots(
        self,
        requests: list[Request],
        rows: Sequence[int],
        chosen: torch.Tensor,
        vocabulary: int,
    ) -> bool:
        """Give slots to the requests that can decode in one; return True if some cannot.

        The token of ``requests[i]`` is in row ``rows[i]`` of ``chosen``.
        """
        entering = []
        stay = False
        for row, request in zip(rows, requests, strict=True):
            if request.num_generated + 1 == request.max_generated_tokens:
                continue
            drafter = request.drafter
            slots = self._resident if drafter is None or not drafter.drafting else None
            if slots is None or not slots.supports(request.params, vocabulary):
                stay = True
            elif request.resident is None:
                entering.append((row, request))
        if entering and self._resident is not None:
            own_rows = [row for row, _ in entering]
            residents = self._resident.add_sequences(
                [
                    NewResident(
                        request.sequence,
                        request.params,
                        request.seed,
                        request.max_total_length - 1,  # the last token is never stored
                        request.prompt_length,
                        request.guide,
                    )
                    for _, request in entering
                ],
                chosen
                if len(own_rows) == len(chosen)
                else self._sequence_runner.select_rows(chosen, own_rows),
            )
            for (_, request), resident in zip(entering, residents, strict=True):
                request.resident = resident
        return stay


def _prompts_needing_logprobs(requests: list[Request], counts: list[int]) -> dict[int, int]:
    """Return the requests that will store tokens whose logits give prompt log-probabilities.

    The values are the numbers of tokens that they will store.
    """
    return {
        at: counts[at]
        for at, request in enumerate(requests)
        if request.needs_prompt_logprobs and request.sequence.num_stored + 1 < request.prompt_length
    }
