"""Forward passes: a model stores sequences, and steps of the engine choose tokens."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import StepBatch, best_backend, find_backend
from roseinfer.decode.readback import Readback
from roseinfer.decode.step import Entrant, Span, TokenRows
from roseinfer.distributed.orders import Copies, Forward
from roseinfer.distributed.ranks import leader_of
from roseinfer.engine.drafter import MOST_DRAFTS
from roseinfer.engine.flight import NO_DRAFTS, Flight, forget_tokens_in_flight, tell_prompts
from roseinfer.errors import BadArgument
from roseinfer.kv.groups import given_back
from roseinfer.kv.manager import StepAppend
from roseinfer.kv.sequence import InferenceSession
from roseinfer.kv.storage import IndexStaging
from roseinfer.paths import EnginePath
from roseinfer.sampling.batch import SamplingBatch
from roseinfer.sampling.logits import AllowedRows, only_allowed, tally_of
from roseinfer.sampling.logprobs import rows_without_a_distribution, tell
from roseinfer.sampling_params import MOST_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from roseinfer.config import EngineConfig
    from roseinfer.decode.readback import Arrival
    from roseinfer.decode.step import ResidentDecode
    from roseinfer.engine.flight import PromptFlight, Settle
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.models.causal import CausalModel

# Prompts of few tokens stored as rows that decode, so that their step can be a graph.
#
# Launching the kernels of a short prompt one by one takes longer than they do.


_LONGEST = 1024
"""Tokens of a text. Each row reads the keys and values of all in front of it."""


class PromptRows:
    """Stores the prompts of a step, if they are short and ask for nothing that rows lack."""

    def __init__(self, rows: TokenRows, most: int) -> None:
        self._rows = rows
        self._most = most

    @property
    def tokens(self) -> Tensor:
        """The tokens that the last step chooses, row by row, on the device."""
        return self._rows.tokens

    def fit(self, chunks: Sequence[tuple[Request, int]]) -> bool:
        return 0 < sum(count for _, count in chunks) <= self._most and all(
            request.session.stored + count <= _LONGEST
            and request.guide is None
            and not request.params.penalised
            and not request.wants_prompt
            for request, count in chunks
        )

    def launch(
        self, chunks: Sequence[tuple[Request, int]]
    ) -> tuple[list[Request], list[int], Arrival, Arrival | None]:
        """Store so many more tokens of each request.

        This returns those whose prompts are whole, the rows of their next tokens, those tokens and
        what is told of them.
        """
        spans: list[Span] = []
        due: list[Request] = []
        rows: list[int] = []
        end = 0
        for request, count in chunks:
            session = request.session
            tokens = session.token_ids[session.stored : session.stored + count]
            spans.append(Span(session, request.params, request.seed, tokens))
            end += count
            if request.pending == count:
                due.append(request)
                rows.append(end - 1)
        return due, rows, *self._rows.launch(spans)

    def clear(self) -> None:
        """Upload all rows anew, since nobody knows what the device has of them."""
        self._rows.clear()


# Chooses tokens for requests that decode without slots, and for those whose prompts end.


class TokenChoice:
    """Remembers the parameters of the last step's requests, which are mostly the next one's."""

    def __init__(self, staging: IndexStaging, most_rows: int) -> None:
        self._staging = staging
        self._most_rows = most_rows
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        self.guided = False
        """Some of those requests have guides."""
        self._guides: AllowedRows | None = None
        """Made when the first request with a guide comes."""
        numbers = most_rows * (1 + 2 * MOST_TOP_LOGPROBS)
        self._told = Readback(numbers, torch.float64, staging.device)

    def forget(self) -> None:
        """Forget the parameters, since one of the requests has ended."""
        self._sampling = None

    def choose(
        self, owners: list[Request], positions: Sequence[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, Arrival | None]:
        """Return the token of each row of logits, which is a request's for a position.

        It is -1 where there is none to choose. Beside them comes what is told of them.
        """
        batch = self._sampling_batch(owners, logits.device)
        tally = self._tally(owners, logits) if batch.penalties else None
        staged = self._staging.stage([list(positions)]).columns[0]
        if self.guided:
            logits = only_allowed(logits.float(), self._allowed(owners, logits.shape[-1]))
        chosen = batch.choose(logits, staged, tally)
        told = None
        if any(request.params.logprobs for request in owners):
            most = max(request.params.top_logprobs for request in owners)
            told = self._told.start(tell(logits, chosen, most).flatten())
        return torch.where(rows_without_a_distribution(logits), -1, chosen), told

    def _sampling_batch(self, requests: list[Request], device: torch.device) -> SamplingBatch:
        """Return the parameters as columns, which are kept while the requests are the same."""
        if self._sampling is None or self._sampling[0] != requests:
            batch = SamplingBatch.of(
                [request.params for request in requests],
                [request.seed for request in requests],
                device,
            )
            self._sampling = (requests, batch)
            self.guided = any(request.guide for request in requests)
        return self._sampling[1]

    def _allowed(self, requests: list[Request], vocabulary: int) -> torch.Tensor:
        """Return the bits of the tokens that each request may get next."""
        if self._guides is None:
            self._guides = AllowedRows(self._most_rows, vocabulary, self._staging.device)
        return self._guides.write([request.guide for request in requests])

    def _tally(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Tally the tokens of the requests that have penalties, anew in every step."""
        tally = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        rows: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        for row, request in enumerate(requests):
            if request.params.penalised:
                own = tally_of(request.session.token_ids, request.prompt_length)
                rows += [row] * len(own)
                tokens += own
                counts += own.values()
        at_rows, at_tokens, numbers = self._staging.stage([rows, tokens, counts]).columns
        return tally.index_put_((at_rows, at_tokens), numbers.int())


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
        self._ranks = leader_of(model.ranks)
        """The ranks, where this one leads them."""
        if self._ranks is not None:
            tell = self._ranks.tell
            kv.tell_copies(lambda plan: tell(Copies.of(plan)))
        backend = find_backend(attention or best_backend(kv.device))
        self.attention = backend(model.traits, kv, self.staging, self.path_counts)

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[InferenceSession], torch.Tensor]:
        """Store prompts; return a session for each, and the logits of their next tokens."""
        for prompt in prompts:
            self.model.shape.check_tokens(prompt)
        sessions = [self.empty(list(prompt)) for prompt in prompts]
        return sessions, self.extend(sessions)

    def extend(
        self,
        sessions: Sequence[InferenceSession],
        counts: Sequence[int] | None = None,
        *,
        in_full: Collection[int] = (),
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> torch.Tensor:
        """Store the next ``counts[i]`` tokens of session ``i``, or all that are not stored yet.

        The last ``drafts[i]`` of them are tokens that the session does not have, behind all that
        it has. This returns the logits behind the last stored token of each; for the sessions
        ``in_full``, behind each token that they store. It is fastest if sessions that store a
        single token stand in front.
        """
        pending = [len(session.token_ids) - session.stored for session in sessions]
        for at, own in drafts.items():
            pending[at] += len(own)
        counts = pending if counts is None else list(counts)
        tokens: list[int] = []
        positions: list[int] = []
        rows_out: list[int] = []
        lengths: list[int] = []
        for at, (session, count, left) in enumerate(zip(sessions, counts, pending, strict=True)):
            if left < 1:
                raise BadArgument(f"session {at} has no token that is not stored yet")
            if not (left if at in drafts else 1) <= count <= left:
                raise BadArgument(f"session {at} has {left} tokens to store, not {count}")
            end = session.stored + count
            if end > self.model.shape.max_length:
                raise BadArgument(f"position {end}: the model has {self.model.shape.max_length}")
            first = len(tokens) if at in in_full else len(tokens) + count - 1
            rows_out += range(first, len(tokens) + count)
            tokens += session.token_ids[session.stored : end]
            tokens += drafts.get(at, ())
            positions += range(session.stored, end)
            lengths.append(end)
        singles = next((at for at, count in enumerate(counts) if count > 1), len(counts))
        one_each = singles == len(counts)
        lists = [session.block_lists for session in sessions]
        new = StepAppend(self.kv, lists, counts, one_each=one_each)
        batch = StepBatch(new, lists, counts, lengths, singles)
        if self._ranks is not None:
            new.plan_all()
            self._ranks.tell(Forward.of(batch, tokens, positions, None if one_each else rows_out))
        self.attention.prepare(batch)
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

    def picked(self, values: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return some rows, in order. An index that is a list would wait for the device."""
        return values.index_select(0, self.staging.stage([rows]).columns[0])

    def release(self, session: InferenceSession) -> None:
        session.rewind(self.kv)
        session.token_ids = []

    def empty(self, token_ids: list[int]) -> InferenceSession:
        return InferenceSession([[] for _ in self.kv.groups], token_ids)


class StepRunner:
    """Launches steps: resident requests in one forward pass, all others in a second."""

    def __init__(
        self, sessions: SequenceRunner, resident: ResidentDecode | None, config: EngineConfig
    ) -> None:
        """Where requests have slots, their drafts and short prompts have rows.

        They have none where several ranks share a model.
        """
        self.settle: Settle | None = None
        """What is to be done with requests whose drafts were verified."""
        self._sessions = sessions
        self._resident = resident
        self._drafted_rows: TokenRows | None = None
        self._prompt_rows: PromptRows | None = None
        device = sessions.kv.device
        rows = config.max_batch_size * (1 + MOST_DRAFTS if config.speculation else 1)
        if resident is not None and sessions.model.ranks is None:
            made, graphs = partial(TokenRows, sessions.model, sessions.attention), resident.captured
            if config.speculation:
                self._drafted_rows = made(rows, EnginePath.VERIFIED, captured=int(graphs))
            if most := config.rows_of_prompts(captured=graphs):
                own = made(most, EnginePath.IN_ROWS, captured=most if graphs else 0)
                self._prompt_rows = PromptRows(own, most)
        self._tokens = Readback(rows, torch.int64, device)
        self._choice = TokenChoice(sessions.staging, rows)
        # A step stores no more tokens than the cache holds.
        capacity = sessions.kv.max_blocks_per_layer * sessions.kv.block_size
        self._prompts = Readback(capacity, torch.float32, device)

    def launch(self, step: Step) -> list[Flight | PromptFlight]:
        """Start a step. Its tokens are in flight when this returns."""
        flights: list[Flight | PromptFlight] = []
        residents = [request for request in step.decoding if request.resident]
        others = [request for request in step.decoding if not request.resident]
        if residents:
            flights.append(self._launch_residents(residents, self._early_blocks(step, residents)))
        # Who enters a slot has none in the step of the residents, and so comes behind them.
        if others and self._drafted_rows is not None:
            drafted = [request for request in others if request.drafter is not None]
            others = [request for request in others if request.drafter is None]
            if drafted:
                flights.append(self._launch_drafted(drafted, self._drafted_rows, step.drafts))
        elif step.drafts:
            others.sort(key=lambda request: request.id in step.drafts)
        requests = [*others, *(request for request, _ in step.chunks)]
        if self._prompt_rows is not None and not others and self._prompt_rows.fit(step.chunks):
            flights += self._launch_in_rows(step.chunks, self._prompt_rows)
        elif requests:
            counts = [1] * len(others) + [count for _, count in step.chunks]
            told = _prompts_to_tell(requests, counts) if step.chunks else {}
            flights += self._launch_others(requests, counts, told, step.drafts)
        return flights

    def withdraw(self, request: Request) -> None:
        """Take back a request's slot, and forget its tokens in flight."""
        self.give_up_slot(request)
        forget_tokens_in_flight(request)

    def give_up_slot(self, request: Request) -> None:
        """Give up the request's slot, if it has one. No slot is given up anywhere else."""
        if self._resident is not None and request.resident is not None:
            self._resident.leave(request.resident)
            request.resident = None

    def forget(self) -> None:
        """Forget the parameters of the last step's requests, since one of them has ended."""
        self._choice.forget()

    def start_over(self) -> None:
        """Take every slot back after a step broke off."""
        self.forget()
        if self._resident is not None:
            self._resident.clear()
        for rows in (self._drafted_rows, self._prompt_rows):
            if rows is not None:
                rows.clear()

    def _early_blocks(self, step: Step, residents: Sequence[Request]) -> int:
        """Return how many blocks may be given to residents that will soon need one.

        There are some only while the next step has enough, if all of them need one then.
        """
        kv = self._sessions.kv
        if step.spare <= len(residents) * len(kv.groups):
            return 0
        return max(0, kv.num_free_blocks(0) - step.blocks)

    def _launch_residents(self, requests: list[Request], early_blocks: int) -> Flight:
        assert self._resident is not None
        residents = [request.resident for request in requests if request.resident]
        rows = [each.slot for each in residents]
        arrival = self._resident.launch(residents, early_blocks)
        kind = self._resident.kind
        told = self._resident.told() if kind.tops is not None else None
        # What a guide allows next depends on the token.
        flight = Flight(requests, rows, arrival, told, kind.guided, NO_DRAFTS, None)
        for request in requests:
            coming = len(request.session.token_ids) + request.in_flight
            if coming == request.full_length:
                self.give_up_slot(request)
        return flight

    def _launch_drafted(
        self,
        requests: list[Request],
        drafted_rows: TokenRows,
        drafted: Mapping[int, list[int]],
    ) -> Flight:
        """Verify drafts. Requests without any have one row, and those that rest enter slots."""
        rows, entries = [], []
        end = 0
        for request in requests:
            tokens = [request.session.token_ids[-1], *drafted.get(request.id, ())]
            entries.append(Span(request.session, request.params, request.seed, tokens))
            rows.append(end)
            end += len(tokens)
        arrival, told = drafted_rows.launch(entries)
        vocabulary = self._sessions.model.shape.vocab_size
        stay = self._enter(requests, rows, drafted_rows.tokens, vocabulary)
        return Flight(requests, rows, arrival, told, stay, drafted, self.settle)

    def _launch_in_rows(
        self, chunks: Sequence[tuple[Request, int]], prompt_rows: PromptRows
    ) -> list[Flight | PromptFlight]:
        """Store prompts as rows, and choose a token behind those that are whole."""
        due, rows, arrival, told = prompt_rows.launch(chunks)
        if not due:
            return []
        stay = self._enter(due, rows, prompt_rows.tokens, self._sessions.model.shape.vocab_size)
        return [Flight(due, rows, arrival, told, stay, NO_DRAFTS, None)]

    def _launch_others(
        self,
        requests: list[Request],
        counts: list[int],
        told: Mapping[int, int],
        drafted: Mapping[int, list[int]],
    ) -> list[Flight | PromptFlight]:
        """Run the requests, with their drafts, and tell of the prompts of those at ``told``."""
        sessions = [request.session for request in requests]
        drafts: dict[int, list[int]] = {}
        if drafted:
            ids = enumerate(request.id for request in requests)
            drafts = {at: drafted[own_id] for at, own_id in ids if own_id in drafted}
            for at, own in drafts.items():
                counts[at] += len(own)
        in_full = {*told, *drafts}
        logits = self._sessions.extend(sessions, counts, in_full=in_full, drafts=drafts)
        due = [at for at, each in enumerate(requests) if at in drafts or not each.pending]
        rows = due
        flights: list[Flight | PromptFlight] = []
        if in_full:
            ends = [*accumulate(counts[at] if at in in_full else 1 for at in range(len(counts)))]
            rows = [
                row for at in due for row in range(ends[at] - 1 - len(drafts.get(at, ())), ends[at])
            ]
            if told:
                staging = self._sessions.staging
                flights.append(tell_prompts(requests, told, ends, logits, staging, self._prompts))
        if not due:
            return flights
        if len(rows) < len(logits):
            logits = self._sessions.picked(logits, rows)
        if len(due) < len(requests):
            requests = [requests[at] for at in due]
        return [*flights, self._choose(requests, logits, drafted)]

    def _choose(
        self, requests: list[Request], logits: torch.Tensor, drafted: Mapping[int, list[int]]
    ) -> Flight:
        """Choose the next token of each request, and the one behind each of its drafts."""
        owners, rows = requests, [*range(len(requests))]
        positions = [len(request.session.token_ids) for request in requests]
        if drafted:
            sizes = [1 + len(drafted.get(request.id, ())) for request in requests]
            rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
            owners = [each for each, size in zip(requests, sizes, strict=True) for _ in range(size)]
            begins = zip(positions, sizes, strict=True)
            positions = [begin + at for begin, size in begins for at in range(size)]
        chosen, told = self._choice.choose(owners, positions, logits)
        stay = self._enter(requests, rows, chosen, logits.shape[-1])
        arrival = self._tokens.start(chosen)
        urgent = stay or self._choice.guided
        return Flight(requests, rows, arrival, told, urgent, drafted, self.settle)

    def _enter(
        self,
        requests: list[Request],
        rows: Sequence[int],
        chosen: torch.Tensor,
        vocabulary: int,
    ) -> bool:
        """Give slots to the requests that can decode in one; return True if some cannot.

        The token of ``requests[i]`` is in row ``rows[i]`` of those chosen.
        """
        entering = []
        stay = False
        for row, request in zip(rows, requests, strict=True):
            if request.num_generated + 1 == request.most_tokens:
                continue
            drafter = request.drafter
            slots = self._resident if drafter is None or not drafter.drafting else None
            if slots is None or not slots.takes(request.params, vocabulary):
                stay = True
            elif request.resident is None:
                entering.append((row, request))
        if entering and self._resident is not None:
            own_rows = [row for row, _ in entering]
            residents = self._resident.enter(
                [
                    Entrant(
                        request.session,
                        request.params,
                        request.seed,
                        request.full_length - 1,  # the last token is never stored
                        request.prompt_length,
                        request.guide,
                    )
                    for _, request in entering
                ],
                chosen if len(own_rows) == len(chosen) else self._sessions.picked(chosen, own_rows),
            )
            for (_, request), own in zip(entering, residents, strict=True):
                request.resident = own
        return stay


def _prompts_to_tell(requests: list[Request], counts: list[int]) -> dict[int, int]:
    """Return which requests will store tokens behind which others of their prompts are told.

    With each goes how many tokens it will store.
    """
    return {
        at: counts[at]
        for at, request in enumerate(requests)
        if request.wants_prompt and request.session.stored + 1 < request.prompt_length
    }
