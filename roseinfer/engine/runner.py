"""Steps carried out: what the scheduler decided on becomes forward passes and their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.decode.readback import Readback
from roseinfer.sampling import SamplingBatch, log_probability, rows_without_a_distribution

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roseinfer.config import SamplingParams
    from roseinfer.decode.readback import Arrival
    from roseinfer.decode.resident import ResidentDecode
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step
    from roseinfer.engine.sequences import InferenceSession, SequenceRunner


@dataclass(slots=True)
class Flight:
    """Tokens of a forward pass, which the host has not read yet."""

    requests: list[Request]
    rows: Sequence[int]
    """Where each request's token will be found."""
    tokens: Arrival
    """Negative where there was none to choose."""
    logprobs: Arrival | None
    urgent: bool
    """Somebody needs its token on the host before it can go on."""

    def land(self) -> Iterator[tuple[Request, int, float | None]]:
        """Wait for the tokens; those of requests that have ended meanwhile are nobody's."""
        tokens = self.tokens.wait()
        logprobs = self.logprobs.wait() if self.logprobs else None
        for request, row in zip(self.requests, self.rows, strict=True):
            if request.finish_reason is None:
                request.in_flight -= 1
                yield request, tokens[row], logprobs[row] if logprobs else None


class StepRunner:
    """Launches steps: residents by themselves, all other requests in one pass."""

    def __init__(
        self, sessions: SequenceRunner, resident: ResidentDecode | None, max_batch_size: int
    ) -> None:
        self._sessions = sessions
        self._resident = resident
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        device = sessions.kv.device
        self._tokens = Readback(max_batch_size, torch.int64, device)
        self._logprobs = Readback(max_batch_size, torch.float32, device)

    def launch(self, step: Step) -> list[Flight]:
        """Start a step; its tokens are on their way when this returns."""
        flights = []
        residents = [request for request in step.decoding if request.resident]
        others = [request for request in step.decoding if not request.resident]
        if residents:
            spare = min(step.spare, self._sessions.kv.num_free_blocks(0) - step.blocks)
            flights.append(self._launch_residents(residents, spare))
        requests = [*others, *(request for request, _ in step.chunks)]
        if requests:
            counts = [1] * len(others) + [count for _, count in step.chunks]
            flights += self._launch_others(requests, counts)
        return flights

    def forget(self) -> None:
        """The requests that the last step was for are not those of the next."""
        self._sampling = None

    def start_over(self) -> None:
        """Nobody has a slot, however far a step came that broke off."""
        self.forget()
        if self._resident is not None:
            self._resident.clear()

    def _launch_residents(self, requests: list[Request], spare: int) -> Flight:
        assert self._resident is not None
        residents = [request.resident for request in requests if request.resident]
        rows = [each.slot for each in residents]
        arrival = self._resident.launch(residents, spare)
        for request in requests:
            request.in_flight += 1
            coming = len(request.session.token_ids) + request.in_flight
            if coming == request.full_length:
                self._leave(request)
        return Flight(requests, rows, arrival, None, urgent=False)

    def _leave(self, request: Request) -> None:
        assert self._resident is not None
        assert request.resident is not None
        self._resident.leave(request.resident)
        request.resident = None

    def _launch_others(self, requests: list[Request], counts: list[int]) -> list[Flight]:
        logits = self._sessions.extend([request.session for request in requests], counts)
        due = [row for row, request in enumerate(requests) if not request.pending]
        if not due:
            return []
        if len(due) < len(requests):
            logits = logits[due]
            requests = [requests[row] for row in due]
        return [self._choose(requests, logits)]

    def _choose(self, requests: list[Request], logits: torch.Tensor) -> Flight:
        batch = self._sampling_batch(requests, logits.device)
        seen = self._seen(requests, logits) if batch.penalised else None
        positions = [len(request.session.token_ids) for request in requests]
        staged = self._sessions.staging.stage([positions]).columns[0]
        chosen = batch.choose(logits, staged, seen)
        logprobs = None
        if any(request.params.logprobs for request in requests):
            logprobs = self._logprobs.start(log_probability(logits, chosen))
        chosen = torch.where(rows_without_a_distribution(logits), -1, chosen)
        stay = self._enter(requests, chosen)
        for request in requests:
            request.in_flight += 1
        rows = range(len(requests))
        return Flight(requests, rows, self._tokens.start(chosen), logprobs, urgent=stay)

    def _enter(self, requests: list[Request], chosen: torch.Tensor) -> bool:
        """Let those decode on the device who can; whether some are left who have to go on."""
        entering = []
        stay = False
        for row, request in enumerate(requests):
            if request.num_generated + 1 == request.most_tokens:
                continue
            if self._resident is None or not self._resident.takes(request.params):
                stay = True
            elif request.resident is None:
                entering.append((row, request))
        if entering and self._resident is not None:
            rows = [row for row, _ in entering]
            residents = self._resident.enter(
                [_entering(request) for _, request in entering],
                chosen if len(rows) == len(requests) else chosen[rows],
            )
            for (_, request), resident in zip(entering, residents, strict=True):
                request.resident = resident
        return stay

    def _sampling_batch(self, requests: list[Request], device: torch.device) -> SamplingBatch:
        """The parameters as columns, built anew only where the requests are others."""
        if self._sampling is None or self._sampling[0] != requests:
            batch = SamplingBatch.of(
                [request.params for request in requests],
                [request.seed for request in requests],
                device,
            )
            self._sampling = (requests, batch)
        return self._sampling[1]

    def _seen(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Which tokens each request has already, its prompt's included."""
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        for row, request in enumerate(requests):
            if request.params.repetition_penalty != 1:
                seen[row, request.session.token_ids] = True
        return seen


def _entering(request: Request) -> tuple[InferenceSession, SamplingParams, int, int]:
    most = request.full_length - 1  # the last one is never stored
    return request.session, request.params, request.seed, most
