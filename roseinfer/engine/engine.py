"""The engine: accepts requests and returns their tokens, one step at a time."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from roseinfer.decode.step import ResidentDecode
from roseinfer.distributed.ranks import as_leader
from roseinfer.engine.prefix_cache import PrefixCache
from roseinfer.engine.request import (
    FinishReason,
    Request,
    RequestBlockAllocator,
    RequestLimits,
    tokenize_prompt,
)
from roseinfer.engine.runner import SequenceRunner, StepRunner
from roseinfer.engine.scheduler import Scheduler
from roseinfer.engine.speculation import Speculation
from roseinfer.errors import (
    BadArgument,
    DetokenizationFailed,
    NoDistribution,
    StepFailed,
    TooBusy,
)
from roseinfer.guided.compiler import GuideCompiler
from roseinfer.models.loading import replace_weights
from roseinfer.paths import STEP_TOKEN_BOUNDS, EnginePath, Histogram
from roseinfer.sampling_params import SamplingParams
from roseinfer.text.completion_text import (
    CompletionText,
    StopStringMatcher,
    new_detokenizer_factory,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from roseinfer.config import EngineConfig
    from roseinfer.engine.in_flight import PromptLogprobsInFlight, TokensInFlight
    from roseinfer.engine.scheduler import Step
    from roseinfer.guided.compiler import GuideMatcher
    from roseinfer.models.loading import LoadedModel
    from roseinfer.sampling import TokenLogprobs


_LOG = logging.getLogger(__name__)


class Occupancy(NamedTuple):
    """Block counts of the KV cache. Blocks that are neither held nor cached are free."""

    total: int
    num_held: int
    """Blocks held by requests."""
    cached: int
    """Blocks held by the prefix cache alone, which can be evicted when others are needed."""


@dataclass(slots=True)
class Update:
    """The result of one step for one request. Not frozen: that would cost 1 µs a token."""

    request: Request
    token_id: int | None
    """New token; None if the request ended without one."""
    text: str
    """Output text that became final with this token."""
    finish_reason: FinishReason | None = None
    """Reason for the end of the request; None unless this is its last update."""
    logprob: float | None = None
    """Log-probability of the token; None if not requested."""
    top_logprobs: list[tuple[int, float]] | None = None
    """Most probable tokens at its position and their log-probabilities; None if not requested."""


class Engine:
    """An engine: one model and one KV cache for any number of requests."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        model, kv = loaded.model, loaded.kv
        self.config = config = config.for_model(kv.device.type, model.num_weights)
        self._weights = loaded.weights
        self.sequence_runner = SequenceRunner(model, kv, attention=config.attention_backend)
        self.path_counts: Counter[str] = self.sequence_runner.path_counts
        """Number of times that each path of the engine and of its attention was taken."""
        self._ranks = as_leader(model.ranks)
        """The ranks of a tensor-parallel model; None without tensor parallelism."""
        self.prefixes = PrefixCache(kv) if config.prefix_cache else None
        device = kv.device.type
        resident = _resident_decode(self.sequence_runner, config)
        self._runner = StepRunner(self.sequence_runner, resident, config)
        self._run_ahead = config.max_steps_in_flight(device) if resident else 0
        self._block_allocator = RequestBlockAllocator(
            kv,
            self.prefixes,
            self._runner.withdraw,
            max_tokens_per_step=config.max_prompt_tokens if config.chunked_prefill else None,
            max_steps_in_flight=self._run_ahead,
            path_counts=self.path_counts,
        )
        self.request_limits = RequestLimits(
            self._block_allocator.block_requirements,
            self._block_allocator.capacity,
            model.shape.max_length,
            limited_by_max_length=config.max_length is not None,
        )
        self._scheduler = Scheduler(config, self._block_allocator)
        self.speculation: Speculation | None = None
        if config.speculation is not None:
            self.speculation = Speculation(
                kv,
                self._block_allocator,
                self._runner,
                self.path_counts,
                slots=resident is not None,
            )
            self._runner.on_drafts_verified = self.speculation.record_verification
        self._in_flight: deque[list[TokensInFlight | PromptLogprobsInFlight]] = deque()
        """Steps launched and not yet read back, oldest first."""
        self._updates: list[Update] = []
        """Updates that no step has returned yet. A step that raises returns none."""
        self._failed_step_requests: list[Request] = []
        """Requests of the last step that raised."""
        self._busy = threading.Lock()
        """Held while a step or a change runs. The garbage collector may finalise a stream inside
        either, in any thread: the changes of that stream then wait in ``_pending_changes``."""
        self._step_thread: int | None = None
        self._pending_changes: deque[Callable[[], None]] = deque()
        self._tokenizer = loaded.tokenizer
        self._new_detokenizer = (
            new_detokenizer_factory(loaded.tokenizer, _LOG.warning) if loaded.tokenizer else None
        )
        self._eos_token_ids = loaded.eos_token_ids
        self._guide_compiler = GuideCompiler(
            loaded.tokenizer,
            model.shape.vocab_size,
            loaded.eos_token_ids,
            cpu_seconds=config.guide_cpu_seconds,
            memory_mb=config.guide_memory_mb,
        )
        self._block_size = kv.block_size
        self._next_id = 0
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache."""
        self.prefix_hits = 0
        """Prompt tokens served from the prefix cache."""
        self._step_tokens = Histogram(STEP_TOKEN_BOUNDS)
        self._unread_step_sizes: defaultdict[int, int] = defaultdict(int)
        """Number of steps for each token count, not yet added to ``_step_tokens``: this keeps
        steps free of calls to the histogram."""
        self._tokens = 0
        """Tokens of the current step."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Requests that run keep what they have stored, and none of it is cached later.
        """
        if self.prefixes is not None:
            self.prefixes.reset()

    def update_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace weights by name, and forget the prefixes that others have computed."""
        if self.has_work:
            raise TooBusy(
                f"{self.num_running + self.num_waiting} requests are unfinished, and their stored "
                "keys and values are of the present weights: update these once all have ended"
            )
        replace_weights(self._weights, values)
        self.reset_prefix_cache()

    @property
    def step_tokens(self) -> Histogram:
        """Tokens per step: prompt tokens computed and tokens generated."""
        for tokens, times in self._unread_step_sizes.items():
            self._step_tokens.add(tokens, times)
        self._unread_step_sizes.clear()
        return self._step_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def has_full_lookahead(self) -> bool:
        """True if further waiting requests would not change the next step."""
        return self._scheduler.has_full_lookahead

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
        block_allocator = self._block_allocator
        cached = self.prefixes.num_evictable_blocks if self.prefixes else 0
        return Occupancy(
            block_allocator.capacity, block_allocator.capacity - block_allocator.available, cached
        )

    def new_completion_text(self, params: SamplingParams) -> CompletionText | None:
        """Return an empty completion text for a request, or None for a model without a tokenizer.

        Long stop strings take time to prepare. Any thread may call this.
        """
        if not isinstance(params, SamplingParams):
            raise BadArgument(f"params must be SamplingParams, not {params!r}")
        if self._new_detokenizer is None:
            if params.stop:
                raise BadArgument(
                    "stop strings need a tokenizer, and this model has none; give a tokenizer"
                )
            return None
        stops = StopStringMatcher(params.stop) if params.stop else None
        return CompletionText(self._new_detokenizer, stops)

    def new_guide_matcher(self, params: SamplingParams) -> GuideMatcher | None:
        """Return the guide matcher of a request, or None for a request without a guide.

        A new guide takes time to compile: milliseconds mostly, at most twice the limit of the
        settings, and the very first one longer. This raises if the constraint cannot be compiled.
        Any thread may call this.
        """
        if params.guide is None:
            return None
        return self._guide_compiler.new_matcher(params.guide, ignore_eos=params.ignore_eos)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: CompletionText | None = None,
        guide: GuideMatcher | None = None,
    ) -> Request:
        """Queue a prompt. This raises for a prompt that could never be served.

        ``text`` and ``guide`` are the results of ``new_completion_text`` and ``new_guide_matcher``
        for it, if these were called already.
        """
        text = text or self.new_completion_text(params)
        guide = guide or self.new_guide_matcher(params)
        token_ids = tokenize_prompt(prompt, self._tokenizer)
        self.sequence_runner.model.shape.check_tokens(token_ids)
        request = Request(
            id=self._next_id,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            prompt_length=len(token_ids),
            max_generated_tokens=self.request_limits.validated_max_tokens(len(token_ids), params),
            sequence=self.sequence_runner.new_cached_sequence(token_ids),
            text=text,
            guide=guide,
            drafter=self.speculation.drafter_for(params) if self.speculation else None,
        )
        self._next_id += 1
        self._apply_between_steps(partial(self._scheduler.add, request))
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, or after the current step; no effect on one that has ended."""
        self._apply_between_steps(partial(self._cancel, request))

    def _cancel(self, request: Request) -> None:
        if request.finish_reason is None:
            self.path_counts[EnginePath.CANCELLED] += 1
            self._finish_request(request, FinishReason.CANCELLED)

    def pause(self, request: Request) -> None:
        """Pause a request: no more tokens until it is resumed, except those in flight.

        It holds no blocks meanwhile. The prefix cache keeps its stored blocks while there is space.
        """
        self._apply_between_steps(partial(self._pause, request))

    def _pause(self, request: Request) -> None:
        if request.finish_reason is None:
            self._runner.release_request_slot(request)
            self._scheduler.pause(request)

    def resume(self, request: Request) -> None:
        """Resume a request, if it is paused."""
        self._apply_between_steps(partial(self._scheduler.resume, request))

    def _apply_between_steps(self, change: Callable[[], None]) -> None:
        """Run a change of requests between steps: now, unless the engine is busy."""
        self._pending_changes.append(change)
        self._apply_pending_changes()

    def _apply_pending_changes(self) -> None:
        # Check again after each release: another thread may have queued a change just before it.
        while self._pending_changes and self._busy.acquire(blocking=False):
            try:
                while self._pending_changes:
                    self._pending_changes.popleft()()
            finally:
                self._busy.release()

    def step(self) -> list[Update]:
        """Launch a step, and return an update for each request that got a token or ended.

        At most ``run_ahead`` steps stay in flight when this returns. The work of a step that raises
        is done again by the next one, unless its requests are cancelled or ended by ``fail_step``.
        """
        thread = threading.get_ident()
        if self._step_thread == thread:
            raise BadArgument("engine: a step runs already; run no step inside another")
        try:
            with self._busy:
                self._step_thread = thread
                try:
                    return self._step()
                finally:
                    self._step_thread = None
        finally:
            if self._pending_changes:
                self._apply_pending_changes()

    def _step(self) -> list[Update]:
        step = self._scheduler.next_step()
        try:
            if self.speculation is not None:
                self.speculation.add_drafts(step)
            if step:
                self._launch(step)
            # If no step is launched, the oldest one in flight is read back.
            self._process_tokens_in_flight(self._run_ahead if step else len(self._in_flight) - 1)
        except BaseException as error:
            self._abort_step(step)
            if self._ranks is not None:
                raise self._ranks.mark_failed(error) from error
            raise
        if not self._scheduler.running:
            self._in_flight.clear()  # their tokens come after the ends of their requests
        updates, self._updates = self._updates, []
        if step.chunks:
            self._tokens += sum(count for _, count in step.chunks)
        if self._tokens:
            self._unread_step_sizes[self._tokens] += 1
            self._tokens = 0
        return updates

    def fail_step(self, error: Exception) -> list[Update]:
        """End the requests of the step that has just raised ``error``, and return the updates."""
        self._apply_between_steps(partial(self._finish_failed_requests, error))
        updates, self._updates = self._updates, []
        return updates

    def _finish_failed_requests(self, error: Exception) -> None:
        for request in self._failed_step_requests:
            if request.finish_reason is None:
                request.error = StepFailed(error)
                self._updates.append(self._final_update(request, None, "", FinishReason.ERROR))
        self._failed_step_requests = []

    def _abort_step(self, step: Step) -> None:
        """Undo a step that raised, wherever it did.

        All running requests are preempted, and tokens in flight are computed again. The prefix
        cache drops all blocks of the step's own requests.
        """
        in_step = [*step.decoding, *(request for request, _ in step.chunks)]
        # An empty step was waiting for tokens of the running requests.
        self._failed_step_requests = in_step or list(self._scheduler.running.values())
        for request in self._failed_step_requests:
            self._block_allocator.invalidate_prefix(request)
        self._in_flight.clear()
        self._scheduler.preempt_all()
        self._runner.reset_slots()

    def _process_tokens_in_flight(self, max_in_flight: int) -> None:
        """Read back steps until ``max_in_flight`` are left and none blocks the next step."""
        steps, updates, take = self._in_flight, self._updates, self._add_token
        while len(steps) > max(0, max_in_flight) or any(
            each.blocks_next_step for step in steps for each in step
        ):
            for flight in steps.popleft():
                # One at a time, so that updates are kept if a later one raises.
                for request, token, logprobs in flight.collect():
                    if self._ranks is not None:  # a dead rank leaves arbitrary numbers to others
                        self._ranks.require_alive()
                    updates.append(take(request, token))
                    if logprobs is not None:
                        _record_logprobs(updates[-1], logprobs)

    def _launch(self, step: Step) -> None:
        self._block_allocator.ensure(step.max_blocks_needed)
        self._count_paths(step)
        # A step without tokens counts too, so that later steps are read back no later than usual.
        self._in_flight.append(self._runner.launch(step))
        for request, _ in step.chunks:
            if request.num_unstored:
                self._block_allocator.publish_stored_blocks(request)

    def _add_token(self, request: Request, token: int) -> Update:
        if token < 0:
            request.error = _no_distribution(request)
            return self._final_update(request, None, "", FinishReason.ERROR)
        tokens = request.sequence.token_ids
        tokens.append(token)
        self._tokens += 1
        length, guide = len(tokens), request.guide
        first = length == request.prompt_length + 1
        if first:
            request.first_token_at = time.monotonic()
        if self._block_allocator.tracks_stored_blocks:
            # Once a block for each request, in different steps.
            turn = (length - request.id) % self._block_size == 0
            if turn or first:
                self._block_allocator.publish_stored_blocks(request)
        ends = token in self._eos_token_ids and not request.params.ignore_eos
        if ends and (guide is None or guide.may_end):
            return self._final_update(request, token, "", FinishReason.STOP)
        complete = guide is not None and guide.accept_token(token)
        try:
            text, stopped = request.text.add(token) if request.text else ("", False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            request.error = DetokenizationFailed(error)
            return self._final_update(request, token, "", FinishReason.ERROR)
        if stopped or complete:
            return self._final_update(request, token, text, FinishReason.STOP)
        if length == request.max_total_length:
            return self._final_update(request, token, text, FinishReason.LENGTH)
        return Update(request, token, text)

    def _final_update(
        self, request: Request, token: int | None, text: str, reason: FinishReason
    ) -> Update:
        text += self._finish_request(request, reason)
        return Update(request, token, text, request.finish_reason)

    def _finish_request(self, request: Request, reason: FinishReason) -> str:
        """Release all that a request holds, and return the rest of its text."""
        if reason is FinishReason.ERROR:
            self._block_allocator.invalidate_prefix(request)
        self._scheduler.remove(request)
        self._runner.drop_cached_params()
        request.finish_reason = reason
        request.ended_at = time.monotonic()
        try:
            text, stopped = request.text.finish() if request.text else ("", False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            request.finish_reason = FinishReason.ERROR
            request.error = request.error or DetokenizationFailed(error)
            return ""
        if stopped and reason is FinishReason.LENGTH:
            request.finish_reason = FinishReason.STOP
        return text

    def _count_paths(self, step: Step) -> None:
        counts = self.path_counts
        if self._in_flight and self._in_flight[-1]:
            counts[EnginePath.RUN_AHEAD] += 1
        if step.num_out_of_order:
            counts[EnginePath.ADMITTED_OUT_OF_ORDER] += step.num_out_of_order
        if len(step.decoding) + len(step.chunks) > 1:
            counts[EnginePath.BATCHED] += 1
        if step.decoding and step.chunks:
            counts[EnginePath.MIXED] += 1
        for request, count in step.chunks:
            if request.started_at is None:
                request.started_at = time.monotonic()
            first = request.sequence.num_stored == request.num_cached_tokens
            if count < request.num_unstored:
                counts[EnginePath.CHUNKED] += 1
            if first and request.num_cached_tokens:
                counts[EnginePath.PREFIX_HIT] += 1
            if first and self.prefixes and not request.times_preempted:
                self.prefix_queries += request.prompt_length
                self.prefix_hits += request.num_cached_tokens
            if first and request.times_preempted:
                counts[EnginePath.RECOMPUTED] += 1


def _resident_decode(runner: SequenceRunner, config: EngineConfig) -> ResidentDecode | None:
    """Return the runner of resident steps, or None where sequences decode without slots."""
    device = runner.kv.device.type
    if not config.uses_resident_decode(device):
        return None
    return ResidentDecode(
        runner.model,
        runner.attention,
        config.max_batch_size,
        graphs=device == "cuda" and config.cuda_graph is not False,
        graphs_required=config.cuda_graph is True,
    )


def _no_distribution(request: Request) -> NoDistribution:
    """Return the error of a request whose next token could not be chosen."""
    guide = request.guide
    reason = (
        f"the model's logits for token {len(request.sequence.token_ids)} hold NaN, or nothing "
        "finite"
    )
    if guide is not None:
        reason = guide.failure if guide.has_failed else f"{reason}, or {guide.failure}"
    return NoDistribution(f"{reason}: no next token can be chosen")


def _record_logprobs(update: Update, logprobs: TokenLogprobs) -> None:
    """Record the log-probabilities of a token in its update and its request."""
    request = update.request
    if update.token_id is None:
        return
    update.logprob = logprobs.logprob
    request.logprobs.append(logprobs.logprob)
    if num_top := request.params.top_logprobs:
        update.top_logprobs = logprobs.top_logprobs[:num_top]
        if request.guide is not None:  # it may allow fewer than ``num_top`` tokens here
            update.top_logprobs = [each for each in update.top_logprobs if each[1] != -inf]
        request.top_logprobs.append(update.top_logprobs)
