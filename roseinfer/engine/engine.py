"""The engine takes requests and returns their tokens, one step at a time."""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from roseinfer.decode.step import ResidentDecode
from roseinfer.distributed.ranks import leader_of
from roseinfer.engine.prefix_cache import PrefixCache
from roseinfer.engine.request import BlockSupply, FinishReason, Request, RequestRoom, token_ids_of
from roseinfer.engine.runner import SequenceRunner, StepRunner
from roseinfer.engine.scheduler import Scheduler
from roseinfer.engine.speculation import Speculation
from roseinfer.errors import (
    BadArgument,
    NoDistribution,
    NoText,
    StepFailed,
)
from roseinfer.guided.compiler import GuideCompiler
from roseinfer.histogram import STEP_BOUNDS, Histogram
from roseinfer.paths import EnginePath
from roseinfer.sampling_params import SamplingParams
from roseinfer.text.request_text import RequestText, StopStrings, detokenizers

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from roseinfer.config import EngineConfig
    from roseinfer.engine.flight import Flight, PromptFlight
    from roseinfer.engine.scheduler import Step
    from roseinfer.guided.compiler import GuideProgress
    from roseinfer.models.loading import Loaded
    from roseinfer.sampling.logprobs import Told


class Occupancy(NamedTuple):
    """How many blocks the KV cache has, and what they are used for. The others are free."""

    total: int
    held: int
    """Requests hold these."""
    cached: int
    """The prefix cache keeps these, and gives them to whoever needs them."""


@dataclass(slots=True)
class Update:
    """What one step brings for one request. Freezing it would cost a microsecond a token."""

    request: Request
    token_id: int | None
    """None where the request ended without a token."""
    text: str
    """The text that can be shown now and could not before."""
    finish_reason: FinishReason | None = None
    """None unless this is the request's last update."""
    logprob: float | None = None
    """The token's log-probability, if asked for."""
    top_logprobs: list[tuple[int, float]] | None = None
    """The likeliest tokens at its place, each with its own, if asked for."""


class Engine:
    """Serves any number of requests with one model on one cache."""

    def __init__(self, loaded: Loaded, config: EngineConfig) -> None:
        model, kv = loaded.model, loaded.kv
        self.config = config
        self.sessions = SequenceRunner(model, kv, attention=config.attention_backend)
        self.path_counts: Counter[str] = self.sessions.path_counts
        """How often each path of the engine and of its attention was taken."""
        self._ranks = leader_of(model.ranks)
        """The ranks, where several compute the model and this one leads them."""
        self.prefixes = PrefixCache(kv) if config.prefix_cache else None
        device = kv.device.type
        resident = None
        if config.decodes_in_slots(device):
            graphs = device == "cuda" and config.cuda_graph is not False
            most = config.max_batch_size
            resident = ResidentDecode(
                model,
                self.sessions.attention,
                most,
                graphs=graphs,
                graphs_required=config.cuda_graph is True,
            )
        self._runner = StepRunner(self.sessions, resident, config)
        self._run_ahead = config.lag(device) if resident else 0
        self._supply = BlockSupply(
            kv,
            self.prefixes,
            self._runner.withdraw,
            at_once=config.prefill_max_tokens if config.chunked_prefill else None,
            lag=self._run_ahead,
            path_counts=self.path_counts,
        )
        self.room = RequestRoom(
            self._supply.needs,
            self._supply.capacity,
            model.shape.max_length,
            by_max_length=config.max_length is not None,
        )
        self._scheduler = Scheduler(config, self._supply)
        self.speculation: Speculation | None = None
        if config.speculation is not None:
            self.speculation = Speculation(
                kv, self._supply, self._runner, self.path_counts, slots=resident is not None
            )
            self._runner.settle = self.speculation.settle
        self._in_flight: deque[list[Flight | PromptFlight]] = deque()
        """Steps that were launched and whose tokens nobody has read yet, oldest first."""
        self._updates: list[Update] = []
        """Updates that no step has returned yet. A step that breaks off returns none."""
        self._broken: list[Request] = []
        """The requests of the step that broke off last."""
        self._busy = threading.Lock()
        """Held while a step or a change runs. The garbage collector may finalise a stream inside
        either, in any thread: what the stream changes then waits in ``_changes``."""
        self._busy_thread: int | None = None
        self._changes: deque[Callable[[], None]] = deque()
        self._tokenizer = loaded.tokenizer
        self._new_detokenizer = detokenizers(loaded.tokenizer) if loaded.tokenizer else None
        self._end_tokens = loaded.end_tokens
        self._guides = GuideCompiler(
            loaded.tokenizer,
            model.shape.vocab_size,
            loaded.end_tokens,
            cpu_seconds=config.guide_cpu_seconds,
            memory_mb=config.guide_memory_mb,
        )
        self._block_size = kv.block_size
        self._next_id = 0
        self.prefix_queries = 0
        """Prompt tokens that the prefix cache was asked for."""
        self.prefix_hits = 0
        """Those of them that it had."""
        self._step_tokens = Histogram(STEP_BOUNDS)
        self._new_steps: defaultdict[int, int] = defaultdict(int)
        """By their tokens, how many steps nobody has asked for yet: a step calls nothing for it."""
        self._tokens = 0
        """Those of the step that is under way."""

    @property
    def step_tokens(self) -> Histogram:
        """How many tokens of prompts each step computed, and tokens of texts it brought."""
        for tokens, times in self._new_steps.items():
            self._step_tokens.add(tokens, times)
        self._new_steps.clear()
        return self._step_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def is_fed(self) -> bool:
        """Tell if the next step would be the same with more requests behind those that wait."""
        return self._scheduler.is_fed

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def occupancy(self) -> Occupancy:
        supply = self._supply
        cached = self.prefixes.num_unused if self.prefixes else 0
        return Occupancy(supply.capacity, supply.capacity - supply.available, cached)

    def text_for(self, params: SamplingParams) -> RequestText | None:
        """Return an empty text for a request, or None for a model without a tokenizer.

        Looking for long stop strings takes time to prepare. Any thread may call this.
        """
        if not isinstance(params, SamplingParams):
            raise BadArgument(f"params must be SamplingParams, not {params!r}")
        if self._new_detokenizer is None:
            if params.stop:
                raise BadArgument("stop strings need a tokenizer, and this model came without one")
            return None
        stops = StopStrings(params.stop) if params.stop else None
        return RequestText(self._new_detokenizer, stops)

    def guide_for(self, params: SamplingParams) -> GuideProgress | None:
        """Return what rules out tokens of a request, or None for one without a guide.

        A guide that is new takes time to prepare: milliseconds mostly, at most twice the limit of
        the settings, and the first of all longer. This raises for one that cannot be followed. Any
        thread may call this.
        """
        if params.guide is None:
            return None
        return self._guides.progress(params.guide, ignore_eos=params.ignore_eos)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: RequestText | None = None,
        guide: GuideProgress | None = None,
    ) -> Request:
        """Queue a prompt. This raises for one that could never be served.

        ``text`` and ``guide`` are what ``text_for`` and ``guide_for`` returned for it, if somebody
        has called these already.
        """
        text = text or self.text_for(params)
        guide = guide or self.guide_for(params)
        token_ids = token_ids_of(prompt, self._tokenizer)
        self.sessions.model.shape.check_tokens(token_ids)
        request = Request(
            id=self._next_id,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            prompt_length=len(token_ids),
            most_tokens=self.room.most_for(len(token_ids), params),
            session=self.sessions.empty(token_ids),
            text=text,
            guide=guide,
            drafter=self.speculation.drafter_for(params) if self.speculation else None,
        )
        self._next_id += 1
        self._change(partial(self._scheduler.add, request))
        return request

    def cancel(self, request: Request) -> None:
        """End a request, unless it has ended already: now, or after the step that runs."""
        self._change(partial(self._cancel, request))

    def _cancel(self, request: Request) -> None:
        if request.finish_reason is None:
            self.path_counts[EnginePath.CANCELLED] += 1
            self._end(request, FinishReason.CANCELLED)

    def pause(self, request: Request) -> None:
        """Give a request no more tokens until it is resumed, but for those in flight.

        It holds no blocks meanwhile. The prefix cache keeps what it stored while there is room.
        """
        self._change(partial(self._pause, request))

    def _pause(self, request: Request) -> None:
        if request.finish_reason is None:
            self._runner.give_up_slot(request)
            self._scheduler.pause(request)

    def resume(self, request: Request) -> None:
        """Let a request go on, if it is paused."""
        self._change(partial(self._scheduler.resume, request))

    def _change(self, what: Callable[[], None]) -> None:
        """Change the state of requests between steps: now, unless the engine is busy."""
        self._changes.append(what)
        self._make_changes()

    def _make_changes(self) -> None:
        # Looked at again after each release: a change may have come just before it.
        while self._changes and self._busy.acquire(blocking=False):
            try:
                while self._changes:
                    self._changes.popleft()()
            finally:
                self._busy.release()

    def step(self) -> list[Update]:
        """Launch a step, and return an update for each request that got a token or ended.

        Up to ``run_ahead`` steps stay in flight when this returns. The work of a step that raises
        is done again by the next, unless its requests are cancelled or ended by ``fail_step``.
        """
        thread = threading.get_ident()
        if self._busy_thread == thread:
            raise BadArgument("engine: a step runs already; run no step inside another")
        try:
            with self._busy:
                self._busy_thread = thread
                try:
                    return self._step()
                finally:
                    self._busy_thread = None
        finally:
            if self._changes:
                self._make_changes()

    def _step(self) -> list[Update]:
        step = self._scheduler.next_step()
        try:
            if self.speculation is not None:
                self.speculation.plan(step)
            if step:
                self._launch(step)
            # If no step is launched, the oldest one in flight lands.
            self._land(self._run_ahead if step else len(self._in_flight) - 1)
        except BaseException as error:
            self._break_off(step)
            if self._ranks is not None:
                raise self._ranks.break_off(error) from error
            raise
        if not self._scheduler.running:
            self._in_flight.clear()  # their tokens follow the ends of requests
        updates, self._updates = self._updates, []
        if step.chunks:
            self._tokens += sum(count for _, count in step.chunks)
        if self._tokens:
            self._new_steps[self._tokens] += 1
            self._tokens = 0
        return updates

    def fail_step(self, error: Exception) -> list[Update]:
        """End the requests of the step that has just raised ``error``, and return the updates."""
        self._change(partial(self._fail, error))
        updates, self._updates = self._updates, []
        return updates

    def _fail(self, error: Exception) -> None:
        for request in self._broken:
            if request.finish_reason is None:
                request.error = StepFailed(error)
                self._updates.append(self._last(request, None, "", FinishReason.ERROR))
        self._broken = []

    def _break_off(self, step: Step) -> None:
        """Give up a step that raised, however far it came.

        All running requests start over, and tokens in flight are computed again. What the
        step's own requests have stored is shared with nobody.
        """
        in_step = [*step.decoding, *(request for request, _ in step.chunks)]
        # An empty step was waiting for tokens of the running requests.
        self._broken = in_step or list(self._scheduler.running.values())
        for request in self._broken:
            self._supply.spoil(request)
        self._in_flight.clear()
        self._scheduler.start_over()
        self._runner.start_over()

    def _land(self, most: int) -> None:
        """Read tokens until at most ``most`` steps are in flight, none of them urgent."""
        steps, updates, take = self._in_flight, self._updates, self._take
        while len(steps) > max(0, most) or any(each.urgent for step in steps for each in step):
            for flight in steps.popleft():
                # One by one, so that updates are kept if a later one raises.
                for request, token, told in flight.land():
                    if self._ranks is not None:  # one that has ended leaves others any numbers
                        self._ranks.require()
                    updates.append(take(request, token))
                    if told is not None:
                        _tell(updates[-1], told)

    def _launch(self, step: Step) -> None:
        self._supply.ensure(step.blocks)
        self._count(step)
        # A step without tokens counts too, so that the steps behind it land no later than others.
        self._in_flight.append(self._runner.launch(step))
        for request, _ in step.chunks:
            if request.pending:
                self._supply.note_stored(request)

    def _take(self, request: Request, token: int) -> Update:
        if token < 0:
            request.error = _no_distribution(request)
            return self._last(request, None, "", FinishReason.ERROR)
        tokens = request.session.token_ids
        tokens.append(token)
        self._tokens += 1
        length, guide = len(tokens), request.guide
        first = length == request.prompt_length + 1
        if first:
            request.first_at = time.monotonic()
        if self._supply.listens:
            # Requests take turns, each once a block.
            turn = (length - request.id) % self._block_size == 0
            if turn or first:
                self._supply.note_stored(request)
        ends = token in self._end_tokens and not request.params.ignore_eos
        if ends and (guide is None or guide.may_end):
            return self._last(request, token, "", FinishReason.STOP)
        complete = guide is not None and guide.take(token)
        try:
            text, stopped = request.text.add(token) if request.text else ("", False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            request.error = NoText(error)
            return self._last(request, token, "", FinishReason.ERROR)
        if stopped or complete:
            return self._last(request, token, text, FinishReason.STOP)
        if length == request.full_length:
            return self._last(request, token, text, FinishReason.LENGTH)
        return Update(request, token, text)

    def _last(self, request: Request, token: int | None, text: str, reason: FinishReason) -> Update:
        text += self._end(request, reason)
        return Update(request, token, text, request.finish_reason)

    def _end(self, request: Request, reason: FinishReason) -> str:
        """Let go of all that a request holds, and return the last of its text."""
        if reason is FinishReason.ERROR:
            self._supply.spoil(request)
        self._scheduler.remove(request)
        self._runner.forget()
        request.finish_reason = reason
        request.ended_at = time.monotonic()
        try:
            text, stopped = request.text.finish() if request.text else ("", False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            request.finish_reason = FinishReason.ERROR
            request.error = request.error or NoText(error)
            return ""
        if stopped and reason is FinishReason.LENGTH:
            request.finish_reason = FinishReason.STOP
        return text

    def _count(self, step: Step) -> None:
        counts = self.path_counts
        if self._in_flight and self._in_flight[-1]:
            counts[EnginePath.RUN_AHEAD] += 1
        if step.overtaken:
            counts[EnginePath.OVERTAKEN] += step.overtaken
        if len(step.decoding) + len(step.chunks) > 1:
            counts[EnginePath.BATCHED] += 1
        if step.decoding and step.chunks:
            counts[EnginePath.MIXED] += 1
        for request, count in step.chunks:
            if request.begun_at is None:
                request.begun_at = time.monotonic()
            first = request.session.stored == request.found
            if count < request.pending:
                counts[EnginePath.CHUNKED] += 1
            if first and request.found:
                counts[EnginePath.PREFIX_HIT] += 1
            if first and self.prefixes and not request.preempted:
                self.prefix_queries += request.prompt_length
                self.prefix_hits += request.found
            if first and request.preempted:
                counts[EnginePath.RESUMED] += 1


def _no_distribution(request: Request) -> NoDistribution:
    """Return the error of a request for which no token was chosen."""
    guide = request.guide
    why = (
        f"the model's logits for token {len(request.session.token_ids)} hold NaN, or nothing finite"
    )
    if guide is not None:
        why = guide.failure if guide.gave_up else f"{why}, or {guide.failure}"
    return NoDistribution(f"{why}: there is no next token to choose")


def _tell(update: Update, told: Told) -> None:
    """Note the log-probabilities of an update's token, with the request and with the update."""
    request = update.request
    if update.token_id is None:
        return
    update.logprob = told.logprob
    request.logprobs.append(told.logprob)
    if most := request.params.top_logprobs:
        update.top_logprobs = told.top[:most]
        if request.guide is not None:  # it allows fewer tokens at many a place
            update.top_logprobs = [each for each in update.top_logprobs if each[1] != -inf]
        request.top_logprobs.append(update.top_logprobs)
