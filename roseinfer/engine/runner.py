"""Forward passes: run sequences through the model, and launch the engine's steps."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import default_backend, find_backend
from roseinfer.decode.step import MultiTokenDecode, Resident, TokenSpan
from roseinfer.distributed.ranks import CopyBlocks, Forward, as_leader
from roseinfer.engine.drafter import MAX_DRAFT_TOKENS
from roseinfer.engine.in_flight import (
    TokensInFlight,
    drop_tokens_in_flight,
    launch_prompt_logprobs,
)
from roseinfer.errors import BadArgument
from roseinfer.kv.manager import StepBatch
from roseinfer.kv.pool import count_out_of_window
from roseinfer.kv.sequence import CachedSequence
from roseinfer.kv.storage import IndexStaging
from roseinfer.kv.transfers import Readback
from roseinfer.paths import EnginePath
from roseinfer.sampling import (
    SamplingBatch,
    TokenBitmaskBuffer,
    apply_token_bitmask,
    count_prompt_and_output,
    pack_logprobs,
    rows_without_a_distribution,
)
from roseinfer.sampling_params import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.config import EngineConfig
    from roseinfer.decode.step import ResidentDecode
    from roseinfer.engine.in_flight import DraftsVerified, PromptLogprobsInFlight
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.transfers import PendingReadback
    from roseinfer.models.causal import CausalModel

# Short prompts, and what is left of long ones behind a cached prefix, stored as rows of a decode
# step, so that the step can be a CUDA graph.
#
# Their kernels take longer to launch one by one than to run.


_MAX_TOKENS_READ = 300_000
"""Most tokens whose keys and values the rows of a step read. Each row reads those of all previous
tokens of its sequence by itself, where a kernel for prompts reads them once."""
_MAX_LAUNCHES = 4
"""Most launches of rows for the prompts of a step. A forward pass waits for the host, which
launches its kernels one by one: on an H200 at least as long as four launches of a graph take."""
_MAX_BYTES_READ = 40 << 30
"""Most bytes of weights that the launches of a step read; each launch reads all weights. With 16
GB of weights, two launches took less time than a forward pass on an H200, and three took more
where the host was quick."""


class PromptRows:
    """The rows for the prompts of a step, if few tokens are left that need only what rows have."""

    def __init__(self, rows: MultiTokenDecode, most: int, weight_bytes: int) -> None:
        self._rows = rows
        self._max_tokens = most
        self._max_launches = max(1, min(_MAX_LAUNCHES, _MAX_BYTES_READ // weight_bytes))

    @property
    def tokens(self) -> Tensor:
        """Tokens chosen by the last step, one for each row, on the device."""
        return self._rows.tokens

    def split_into_launches(
        self, chunks: Sequence[tuple[Request, int]]
    ) -> list[list[tuple[Request, int]]]:
        """Return the chunks of each launch; empty if a forward pass is needed, or faster."""
        launches: list[list[tuple[Request, int]]] = []
        left = tokens_read = 0
        for request, count in chunks:
            tokens_read += count * (request.sequence.num_stored + count)
            if (
                count > self._max_tokens
                or request.guide is not None
                or request.params.has_penalties
                or request.needs_prompt_logprobs
            ):
                return []
            if count > left:
                launches.append([])
                left = self._max_tokens
            launches[-1].append((request, count))
            left -= count
        few = len(launches) <= self._max_launches and tokens_read <= _MAX_TOKENS_READ
        return launches if few else []

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
            spans.append(_span_of(request, count))
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
            kv.observe_block_copies(lambda plan: send_command(CopyBlocks.of(plan)))
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
        self, sequences: Sequence[CachedSequence], counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Store the next ``counts[i]`` tokens of sequence ``i``, or all that are not stored yet.

        Returns the logits after the last stored token of each sequence.
        """
        unstored = [each.token_ids[each.num_stored :] for each in sequences]
        for at, tokens in enumerate(unstored):
            if not tokens:
                raise BadArgument(f"sequence {at}: all of its tokens are stored already")
        if counts is not None:
            for at, (tokens, count) in enumerate(zip(unstored, counts, strict=True)):
                if not 1 <= count <= len(tokens):
                    raise BadArgument(
                        f"sequence {at}: it has {len(tokens)} tokens to store, not {count}"
                    )
            unstored = [tokens[:count] for tokens, count in zip(unstored, counts, strict=True)]
        return self.forward([TokenSpan(*each) for each in zip(sequences, unstored, strict=True)])

    def forward(self, spans: Sequence[TokenSpan]) -> torch.Tensor:
        """Store the tokens of all spans in one forward pass.

        Returns the logits after the last token of each span, and after every token of those with
        ``all_logits``. It is fastest if spans of a single token come first.
        """
        batch, token_ids, positions, rows_out = self._batch_of(spans)
        if self._ranks is not None:
            batch.plan_all()
            self._ranks.send_command(Forward.of(batch, token_ids, positions, rows_out))
        self.attention.prepare(batch)
        for path in self.model.paths:
            self.path_counts[path] += 1
        stage = self.staging.stage
        new_tokens, at_positions = stage([token_ids, positions]).columns
        rows = None if rows_out is None else stage([rows_out]).columns[0]
        logits = self.model.logits(new_tokens, at_positions, rows, self.attention)
        size = self.kv.block_size
        for sequence, tokens, *_ in spans:
            sequence.num_stored += len(tokens)
            sequence.token_capacity = len(sequence.block_lists[0]) * size
        return logits

    def _batch_of(
        self, spans: Sequence[TokenSpan]
    ) -> tuple[StepBatch, list[int], list[int], list[int] | None]:
        """Return the batch of spans, their tokens, positions, and rows whose logits are needed.

        The rows are None if all are needed, since every span has one token.
        """
        token_lists = [span.tokens for span in spans]
        counts = list(map(len, token_lists))
        lengths = [
            span.sequence.num_stored + count for span, count in zip(spans, counts, strict=True)
        ]
        most = self.model.shape.max_length
        if max(lengths, default=0) > most:
            at, end = next((at, end) for at, end in enumerate(lengths) if end > most)
            raise BadArgument(f"sequence {at}: {end} tokens; the model has {most} positions")
        lists = [span.sequence.block_lists for span in spans]
        tokens = list(chain.from_iterable(token_lists))
        if len(tokens) == len(spans):
            batch = StepBatch(self.kv, lists, counts, lengths, len(spans))
            return batch, tokens, [end - 1 for end in lengths], None
        num_decodes = next(at for at, count in enumerate(counts) if count > 1)
        batch = StepBatch(self.kv, lists, counts, lengths, num_decodes)
        positions: list[int] = []
        rows_out: list[int] = []
        row = 0
        for span, count, end in zip(spans, counts, lengths, strict=True):
            positions += range(end - count, end)
            row += count
            rows_out += range(row - (count if span.all_logits else 1), row)
        return batch, tokens, positions, rows_out

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


def _most_rows(config: EngineConfig) -> int:
    """Return the rows of a step of all requests, with their drafts."""
    return config.max_batch_size * (1 + MAX_DRAFT_TOKENS if config.speculation else 1)


def span_rows(config: EngineConfig, *, graphs: bool) -> dict[EnginePath, tuple[int, int]]:
    """Return how many rows there are for drafts and for prompts, and how many are captured.

    All ranks of a model set them up in this order. ``graphs``: steps are captured.
    """
    rows = {}
    if config.speculation:
        rows[EnginePath.DRAFT_VERIFICATION] = (_most_rows(config), int(graphs))
    if most := config.num_prompt_rows(captured=graphs):
        rows[EnginePath.PROMPTS_AS_ROWS] = (most, most if graphs else 0)
    return rows


class StepRunner:
    """A launcher of steps: rows for residents, drafts and short prompts, or else a forward pass."""

    def __init__(
        self, sequence_runner: SequenceRunner, resident: ResidentDecode | None, config: EngineConfig
    ) -> None:
        """Allocate rows for drafts and short prompts if requests have slots."""
        self.on_drafts_verified: DraftsVerified | None = None
        """Callback for requests whose drafts were verified."""
        self._sequence_runner = sequence_runner
        self._resident = resident
        self._drafted_rows: MultiTokenDecode | None = None
        self._prompt_rows: PromptRows | None = None
        device = sequence_runner.kv.device
        model = sequence_runner.model
        if resident is not None:
            for path, (most, captured) in span_rows(config, graphs=resident.uses_graphs).items():
                new_rows = MultiTokenDecode(
                    model, sequence_runner.attention, most, path, captured_rows=captured
                )
                if path is EnginePath.DRAFT_VERIFICATION:
                    self._drafted_rows = new_rows
                else:
                    self._prompt_rows = PromptRows(
                        new_rows, most, model.num_weights * model.dtype.itemsize
                    )
        rows = _most_rows(config)
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
                flights.append(self._launch_drafted(drafted, self._drafted_rows))
        chunks = step.chunks
        launches: list[list[tuple[Request, int]]] = []
        if self._prompt_rows is not None and not others:
            launches = self._prompt_rows.split_into_launches(chunks)
        if launches:
            if len(launches) > 1:
                self._sequence_runner.path_counts[EnginePath.PROMPTS_IN_LAUNCHES] += 1
            for launch in launches:
                flights += self._launch_in_rows(launch)
        elif others or chunks:
            if self.on_drafts_verified is not None:
                chunks = [*((each, 1) for each in others if each.drafts), *chunks]
                others = [each for each in others if not each.drafts]
            flights += self._launch_forward_pass(others, chunks)
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
        flight = TokensInFlight(requests, rows, arrival, logprobs, kind.guided)
        for request in requests:
            coming = len(request.sequence.token_ids) + request.num_in_flight
            if coming == request.max_total_length:
                self.release_request_slot(request)
        return flight

    def _launch_drafted(
        self, requests: list[Request], drafted_rows: MultiTokenDecode
    ) -> TokensInFlight:
        """Verify drafts. Requests without drafts have one row; those in backoff enter slots."""
        spans = [_span_of(request, 1) for request in requests]
        ends = accumulate(len(span.tokens) for span in spans)
        rows = [end - len(span.tokens) for end, span in zip(ends, spans, strict=True)]
        arrival, logprobs = drafted_rows.launch(spans)
        vocabulary = self._sequence_runner.model.shape.vocab_size
        stay = self._assign_slots(requests, rows, drafted_rows.tokens, vocabulary)
        return TokensInFlight(
            requests, rows, arrival, logprobs, stay, self._verification_of(requests)
        )

    def _verification_of(self, requests: Sequence[Request]) -> DraftsVerified | None:
        """Return the callback for verified drafts, or None if no request has drafts."""
        callback = self.on_drafts_verified
        return callback if callback and any(request.drafts for request in requests) else None

    def _launch_in_rows(self, chunks: Sequence[tuple[Request, int]]) -> list[TokensInFlight]:
        """Store prompts as rows, and choose the next token of each complete one."""
        prompt_rows = self._prompt_rows
        assert prompt_rows is not None
        complete, rows, arrival, logprobs = prompt_rows.launch(chunks)
        if not complete:
            return []
        stay = self._assign_slots(
            complete, rows, prompt_rows.tokens, self._sequence_runner.model.shape.vocab_size
        )
        return [TokensInFlight(complete, rows, arrival, logprobs, stay)]

    def _launch_forward_pass(
        self, decoding: Sequence[Request], chunks: Sequence[tuple[Request, int]]
    ) -> list[TokensInFlight | PromptLogprobsInFlight]:
        """Store the newest token of each decoding request, and of others chunks and drafts."""
        spans = [TokenSpan(each.sequence, each.sequence.token_ids[-1:]) for each in decoding]
        spans += [_span_of(request, count) for request, count in chunks]
        logits = self._sequence_runner.forward(spans)
        flights: list[TokensInFlight | PromptLogprobsInFlight] = []
        complete = [*decoding]
        end = len(decoding)
        rows = [*range(end)]
        reported: list[tuple[Request, int, int]] = []
        for (request, count), span in zip(chunks, spans[end:], strict=True):
            end += len(span.tokens) if span.all_logits else 1
            if request.drafts or not request.num_unstored:
                complete.append(request)
                rows += range(end - 1 - len(request.drafts), end)
            if span.all_logits and not request.drafts:
                reported.append((request, count, end))
        if reported:
            staging = self._sequence_runner.staging
            flights.append(launch_prompt_logprobs(reported, logits, staging, self._prompts))
        if not complete:
            return flights
        if len(rows) < len(logits):
            logits = self._sequence_runner.select_rows(logits, rows)
        return [*flights, self._sample_tokens(complete, logits)]

    def _sample_tokens(self, requests: list[Request], logits: torch.Tensor) -> TokensInFlight:
        """Choose the next token of each request, and the one after each of its drafts."""
        owners, rows = requests, [*range(len(requests))]
        positions = [len(request.sequence.token_ids) for request in requests]
        on_drafts_verified = self._verification_of(requests)
        if on_drafts_verified is not None:
            sizes = [1 + len(request.drafts) for request in requests]
            rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
            owners = [each for each, size in zip(requests, sizes, strict=True) for _ in range(size)]
            begins = zip(positions, sizes, strict=True)
            positions = [begin + at for begin, size in begins for at in range(size)]
        chosen, logprobs = self._token_sampler.sample_tokens(owners, positions, logits)
        stay = self._assign_slots(requests, rows, chosen, logits.shape[-1])
        arrival = self._tokens.start(chosen)
        blocks_next_step = stay or self._token_sampler.guided
        return TokensInFlight(
            requests, rows, arrival, logprobs, blocks_next_step, on_drafts_verified
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
        entering: list[Request] = []
        own_rows: list[int] = []
        stay = False
        for row, request in zip(rows, requests, strict=True):
            if request.num_generated + 1 == request.max_generated_tokens:
                continue
            drafter = request.drafter
            slots = self._resident if drafter is None or not drafter.drafting else None
            if slots is None or not slots.supports(request.params, vocabulary):
                stay = True
            elif request.resident is None:
                entering.append(request)
                own_rows.append(row)
        if entering and self._resident is not None:
            residents = [
                Resident(
                    request.sequence,
                    request.params,
                    request.seed,
                    request.max_total_length - 1,  # the last token is never stored
                    request.prompt_length,
                    request.guide,
                )
                for request in entering
            ]
            if len(own_rows) < len(chosen):
                chosen = self._sequence_runner.select_rows(chosen, own_rows)
            self._resident.add_sequences(residents, chosen)
            for request, resident in zip(entering, residents, strict=True):
                request.resident = resident
        return stay


def _span_of(request: Request, count: int) -> TokenSpan:
    """Return the next ``count`` tokens of a request, and its drafts after them."""
    sequence = request.sequence
    stored = sequence.num_stored
    tokens = sequence.token_ids[stored : stored + count]
    if request.drafts:
        return TokenSpan(sequence, tokens + request.drafts, request.params, request.seed, True)
    # The last of the prompt's tokens yields no log-probability of the prompt.
    reported = request.needs_prompt_logprobs and stored + 1 < request.prompt_length
    return TokenSpan(sequence, tokens, request.params, request.seed, reported)
