"""Forward passes: a model stores sequences, and steps of the engine choose tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import StepBatch, best_backend, find_backend
from roseinfer.config import MOST_TOP_LOGPROBS
from roseinfer.decode.readback import Readback
from roseinfer.decode.resident import Entrant
from roseinfer.engine.prompt_flight import PromptFlight
from roseinfer.engine_paths import EnginePath
from roseinfer.errors import BadArgument, RequestTooLarge
from roseinfer.kv.groups import given_back
from roseinfer.kv.manager import StepAppend
from roseinfer.kv.sequence import InferenceSession
from roseinfer.kv.storage import IndexStaging
from roseinfer.sampling.log_probabilities import (
    of_a_prompt,
    rows_without_a_distribution,
    tell,
    told_of,
)
from roseinfer.sampling.penalties import tally_of
from roseinfer.sampling.sampling_batch import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from roseinfer.decode.readback import Arrival
    from roseinfer.decode.resident import ResidentDecode
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.models.causal import CausalModel
    from roseinfer.sampling.log_probabilities import Told


class SequenceRunner:
    """Runs sequences of any lengths through one model, on one cache."""

    def __init__(
        self, model: CausalModel, kv: KVBlockManager, *, attention: str | None = None
    ) -> None:
        self.model = model
        self.kv = kv
        self.path_counts: Counter[str] = Counter()
        self.staging = IndexStaging(kv.device, kv.work_counts)
        """Copies a step's numbers to the device through buffers that are used again."""
        backend = find_backend(attention or best_backend(kv.device))
        self.attention = backend(model.traits, kv, self.staging, self.path_counts)

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[InferenceSession], torch.Tensor]:
        """Store prompts; return a session for each, and the logits of their next tokens."""
        for prompt in prompts:
            self.check_tokens(prompt)
        sessions = [self.empty(list(prompt)) for prompt in prompts]
        return sessions, self.extend(sessions)

    def extend(
        self,
        sessions: Sequence[InferenceSession],
        counts: Sequence[int] | None = None,
        *,
        in_full: Collection[int] = (),
    ) -> torch.Tensor:
        """Store the next ``counts[i]`` tokens of session ``i``, or all that are not stored yet.

        This returns the logits behind the last stored token of each; for the sessions ``in_full``,
        behind each token that they store. It is fastest if sessions that store a single token
        stand in front.
        """
        pending = [len(session.token_ids) - session.stored for session in sessions]
        counts = pending if counts is None else list(counts)
        tokens: list[int] = []
        positions: list[int] = []
        rows_out: list[int] = []
        lengths: list[int] = []
        for at, (session, count, left) in enumerate(zip(sessions, counts, pending, strict=True)):
            if left < 1:
                raise BadArgument(f"session {at} has no token that is not stored yet")
            if not 1 <= count <= left:
                raise BadArgument(f"session {at} has {left} tokens to store, not {count}")
            end = session.stored + count
            if end > self.model.shape.max_length:
                raise BadArgument(f"position {end}: the model has {self.model.shape.max_length}")
            first = len(tokens) if at in in_full else len(tokens) + count - 1
            rows_out += range(first, len(tokens) + count)
            tokens += session.token_ids[session.stored : end]
            positions += range(session.stored, end)
            lengths.append(end)
        singles = next((at for at, count in enumerate(counts) if count > 1), len(counts))
        one_each = singles == len(counts)
        lists = [session.block_lists for session in sessions]
        new = StepAppend(self.kv, lists, counts, one_each=one_each)
        self.attention.prepare(StepBatch(new, lists, counts, lengths, singles))
        for path in self.model.paths:
            self.path_counts[path] += 1
        stage = self.staging.stage
        token_ids, at_positions = stage([tokens, positions]).columns
        rows = None if one_each else stage([rows_out]).columns[0]
        logits = self.model.logits(token_ids, at_positions, rows, self.attention)
        size = self.kv.block_size
        for session, count in zip(sessions, counts, strict=True):
            session.stored += count
            session.room = len(session.block_lists[0]) * size
        return logits

    def fork(self, session: InferenceSession) -> InferenceSession:
        """Return a session that shares all that is stored and can be continued differently."""
        child = InferenceSession(
            [list(block_ids) for block_ids in session.block_lists],
            list(session.token_ids),
            session.stored,
        )
        for block_ids in child.block_lists:
            self.kv.incref_blocks(block_ids[given_back(block_ids) :])
        session.room = child.room = session.stored
        self.path_counts[EnginePath.FORKED] += 1
        return child

    def release(self, session: InferenceSession) -> None:
        session.rewind(self.kv)
        session.token_ids = []

    def empty(self, token_ids: list[int]) -> InferenceSession:
        return InferenceSession([[] for _ in self.kv.groups], token_ids)

    def check_tokens(self, prompt: Sequence[int]) -> None:
        shape = self.model.shape
        if not prompt:
            raise BadArgument("an empty prompt: at least one token is needed")
        if len(prompt) > shape.max_length:
            raise RequestTooLarge(
                f"a prompt of {len(prompt)} tokens for a model of {shape.max_length} positions"
            )
        if min(prompt) < 0 or max(prompt) >= shape.vocab_size:
            raise BadArgument(f"token ids must lie in 0..{shape.vocab_size - 1}")


@dataclass(slots=True)
class Flight:
    """Tokens of a forward pass that the host has not read yet."""

    requests: list[Request]
    rows: Sequence[int]
    """The index of each request's token in ``tokens``."""
    tokens: Arrival
    """Negative where there was none to choose."""
    told: Arrival | None
    """The numbers of one token after the other, if some request wants them told."""
    urgent: bool
    """True if a request needs its token on the host before it can go on."""

    def land(self) -> Iterator[tuple[Request, int, Told | None]]:
        """Wait for the tokens. Those of requests that have ended meanwhile are dropped."""
        tokens = self.tokens.wait()
        told = self.told.wait() if self.told else []
        each = len(told) // len(tokens)
        for request, row in zip(self.requests, self.rows, strict=True):
            if request.finish_reason is None:
                request.in_flight -= 1
                own = told[row * each : (row + 1) * each] if request.params.logprobs else None
                yield request, tokens[row], told_of(own) if own else None


class StepRunner:
    """Launches steps: resident requests in one forward pass, all others in a second."""

    def __init__(
        self, sessions: SequenceRunner, resident: ResidentDecode | None, max_batch_size: int
    ) -> None:
        self._sessions = sessions
        self._resident = resident
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        device = sessions.kv.device
        self._tokens = Readback(max_batch_size, torch.int64, device)
        numbers = max_batch_size * (1 + 2 * MOST_TOP_LOGPROBS)
        self._told = Readback(numbers, torch.float64, device)
        # A step stores no more tokens than the cache holds.
        capacity = sessions.kv.max_blocks_per_layer * sessions.kv.block_size
        self._prompts = Readback(capacity, torch.float32, device)

    def launch(self, step: Step) -> list[Flight | PromptFlight]:
        """Start a step. Its tokens are in flight when this returns."""
        flights: list[Flight | PromptFlight] = []
        residents = [request for request in step.decoding if request.resident]
        others = [request for request in step.decoding if not request.resident]
        if residents:
            spare = min(step.spare, self._sessions.kv.num_free_blocks(0) - step.blocks)
            flights.append(self._launch_residents(residents, spare))
        requests = [*others, *(request for request, _ in step.chunks)]
        if requests:
            counts = [1] * len(others) + [count for _, count in step.chunks]
            told = _prompts_to_tell(requests) if step.chunks else []
            flights += self._launch_others(requests, counts, told)
        return flights

    def withdraw(self, request: Request) -> None:
        """Take back a request's slot, and forget its tokens in flight."""
        self.give_up_slot(request)
        request.in_flight = 0

    def give_up_slot(self, request: Request) -> None:
        """Give up the request's slot, if it has one. No slot is given up anywhere else."""
        if self._resident is not None and request.resident is not None:
            self._resident.leave(request.resident)
            request.resident = None

    def forget(self) -> None:
        """Forget the parameters of the last step's requests, since one of them has ended."""
        self._sampling = None

    def start_over(self) -> None:
        """Take every slot back after a step broke off."""
        self.forget()
        if self._resident is not None:
            self._resident.clear()

    def _launch_residents(self, requests: list[Request], spare: int) -> Flight:
        assert self._resident is not None
        residents = [request.resident for request in requests if request.resident]
        rows = [each.slot for each in residents]
        arrival = self._resident.launch(residents, spare)
        told = self._resident.told() if self._resident.kind.tops is not None else None
        for request in requests:
            request.in_flight += 1
            coming = len(request.session.token_ids) + request.in_flight
            if coming == request.full_length:
                self.give_up_slot(request)
        return Flight(requests, rows, arrival, told, urgent=False)

    def _launch_others(
        self, requests: list[Request], counts: list[int], told: list[int]
    ) -> list[Flight | PromptFlight]:
        """Run the requests, those at ``told`` with the log-probabilities of their prompts."""
        sessions = [request.session for request in requests]
        logits = self._sessions.extend(sessions, counts, in_full=told)
        flights: list[Flight | PromptFlight] = []
        if told:
            logits, flight = self._tell_prompts(requests, counts, told, logits)
            flights.append(flight)
        due = [row for row, request in enumerate(requests) if not request.pending]
        if not due:
            return flights
        if len(due) < len(requests):
            logits = logits[due]
            requests = [requests[row] for row in due]
        return [*flights, self._choose(requests, logits)]

    def _tell_prompts(
        self, requests: list[Request], counts: list[int], told: list[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, PromptFlight]:
        """Take the rows of prompts out of the logits; return the last of each request."""
        spans: list[tuple[Request, int, int]] = []
        rows: list[int] = []
        tokens: list[int] = []
        last_rows: list[int] = []
        row = 0
        for at, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if at in told:
                end = request.session.stored
                begin = end - count + 1
                end = min(end + 1, request.prompt_length)
                spans.append((request, begin, end))
                rows += range(row, row + end - begin)
                tokens += request.session.token_ids[begin:end]
                row += count - 1
            last_rows.append(row)
            row += 1
        at_rows, at_tokens = self._sessions.staging.stage([rows, tokens]).columns
        values = of_a_prompt(logits, at_rows, at_tokens)
        return logits[last_rows], PromptFlight(spans, self._prompts.start(values))

    def _choose(self, requests: list[Request], logits: torch.Tensor) -> Flight:
        batch = self._sampling_batch(requests, logits.device)
        tally = self._tally(requests, logits) if batch.penalties else None
        positions = [len(request.session.token_ids) for request in requests]
        staged = self._sessions.staging.stage([positions]).columns[0]
        chosen = batch.choose(logits, staged, tally)
        told = None
        if any(request.params.logprobs for request in requests):
            most = max(request.params.top_logprobs for request in requests)
            told = self._told.start(tell(logits, chosen, most).flatten())
        chosen = torch.where(rows_without_a_distribution(logits), -1, chosen)
        stay = self._enter(requests, chosen, logits.shape[-1])
        for request in requests:
            request.in_flight += 1
        rows = range(len(requests))
        return Flight(requests, rows, self._tokens.start(chosen), told, urgent=stay)

    def _enter(self, requests: list[Request], chosen: torch.Tensor, vocabulary: int) -> bool:
        """Give slots to the requests that can decode in one; return True if some cannot."""
        entering = []
        stay = False
        for row, request in enumerate(requests):
            if request.num_generated + 1 == request.most_tokens:
                continue
            if self._resident is None or not self._resident.takes(request.params, vocabulary):
                stay = True
            elif request.resident is None:
                entering.append((row, request))
        if entering and self._resident is not None:
            rows = [row for row, _ in entering]
            residents = self._resident.enter(
                [
                    Entrant(
                        request.session,
                        request.params,
                        request.seed,
                        request.full_length - 1,  # the last token is never stored
                        request.prompt_length,
                    )
                    for _, request in entering
                ],
                chosen if len(rows) == len(requests) else chosen[rows],
            )
            for (_, request), resident in zip(entering, residents, strict=True):
                request.resident = resident
        return stay

    def _sampling_batch(self, requests: list[Request], device: torch.device) -> SamplingBatch:
        """Return the parameters as columns, which are kept while the requests are the same."""
        if self._sampling is None or self._sampling[0] != requests:
            batch = SamplingBatch.of(
                [request.params for request in requests],
                [request.seed for request in requests],
                device,
            )
            self._sampling = (requests, batch)
        return self._sampling[1]

    def _tally(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Tally the tokens of the requests that have penalties, anew in every step."""
        tally = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        for row, request in enumerate(requests):
            if request.params.penalised:
                own = tally_of(request.session.token_ids, request.prompt_length)
                counts = torch.tensor(list(own.values()), dtype=torch.int32, device=logits.device)
                tally[row, list(own)] = counts
        return tally


def _prompts_to_tell(requests: list[Request]) -> list[int]:
    """Return which requests will store tokens behind which others of their prompts are told."""
    return [
        at
        for at, request in enumerate(requests)
        if request.wants_prompt and request.session.stored + 1 < request.prompt_length
    ]
