"""Bugs in the ends of requests, their refusals, pauses and restarts, and in prompts."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ENGINE = "roseinfer.engine.engine"
_PREFIXES = "roseinfer.engine.prefix_cache"
_REQUEST = "roseinfer.engine.request"
_IN_FLIGHT = "roseinfer.engine.in_flight"
_TEXT = "roseinfer.text.completion_text"
_SCHEDULER = "roseinfer.engine.scheduler"
_SAMPLING = "roseinfer.sampling"


_RUNNER = "roseinfer.engine.runner"
_INITIALISED = "tests.mutants.initialised_engine:InitialisedEngine"


def _mutant(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "stop-token-at-the-limit-reported-as-length",
        "A stop token that is also the last token allowed is reported as the limit.",
        _ENGINE,
        "Engine._add_token",
        'return self._final_update(request, token, "", FinishReason.STOP)',
        """
        reason = (
            FinishReason.LENGTH if length == request.max_total_length else FinishReason.STOP
        )
        return self._final_update(request, token, "", reason)
        """,
    ),
    _mutant(
        "limit-reported-as-stop",
        "A request that reached its limit of tokens is reported as one that ended by itself.",
        _ENGINE,
        "Engine._add_token",
        """
        if length == request.max_total_length:
            return self._final_update(request, token, text, FinishReason.LENGTH)
        """,
        """
        if length == request.max_total_length:
            return self._final_update(request, token, text, FinishReason.STOP)
        """,
    ),
    _mutant(
        "cancelled-reported-as-stop",
        "A cancelled request is reported as one that ended by itself.",
        _ENGINE,
        "Engine._cancel",
        "self._finish_request(request, FinishReason.CANCELLED)",
        "self._finish_request(request, FinishReason.STOP)",
    ),
    _mutant(
        "stop-token-unseen-as-first",
        "A stop token does not end a request whose first token it is.",
        _ENGINE,
        "Engine._add_token",
        "ends = token in self._eos_token_ids and not request.params.ignore_eos",
        "ends = token in self._eos_token_ids and not request.params.ignore_eos and not first",
    ),
    _mutant(
        "stop-string-unseen-inside-another",
        "A stop string is not found while a longer one that contains it has begun.",
        _TEXT,
        "StopStringMatcher._connect",
        """
        self._matched_stop_length[longer] = (
            self._matched_stop_length[longer] or self._matched_stop_length[shorter]
        )
        """,
        "",
    ),
    _mutant(
        "stop-string-unseen-in-the-flushed-text",
        "A stop string that an incomplete character completes at the end of a text is not cut.",
        _TEXT,
        "CompletionText.finish",
        """
        text, stopped = self._stops.feed(text)
        if not stopped:
            text += self._stops.flush()
        """,
        "text = self._stops.flush() + text",
    ),
    _mutant(
        "cached-tokens-count-the-prompt",
        "The first token to compute counts as served from the prefix cache.",
        _REQUEST,
        "RequestBlockAllocator.reuse_prefix",
        "request.num_cached_tokens = sequence.num_stored = sequence.token_capacity = num_tokens",
        """
        sequence.num_stored = sequence.token_capacity = num_tokens
        request.num_cached_tokens = num_tokens + (num_tokens > 0)
        """,
    ),
    _mutant(
        "last-full-block-never-found",
        "A lookup leaves out the last full block of a prompt, although more tokens follow.",
        _PREFIXES,
        "PrefixCache._full_blocks",
        "while parent.end + size <= max_tokens: ...",
        "while parent.end + 2 * size <= max_tokens: ...",
    ),
    _mutant(
        "most-recent-prefix-evicted-first",
        "The prefix that was used last is evicted first.",
        _PREFIXES,
        "PrefixCache.evict",
        "entry, used = next(iter(self.evictable_entries.items()), (None, self._uses + 1))",
        """
        entry, used = next(reversed(self.evictable_entries.items()), (None, self._uses + 1))
        used = min(used, 0) if entry is not None else used
        """,
    ),
    _mutant(
        "first-blocks-evicted-before-the-last",
        "A text loses its first block first, and with it all others.",
        _PREFIXES,
        "PrefixCache._renew_path",
        """
        while tip is not None:
            if tip in self.evictable_entries:
                self._uses += 1
                self.evictable_entries[tip] = self._uses
                self.evictable_entries.move_to_end(tip)
            tip = tip.parent
        """,
        """
        path = []
        while tip is not None:
            path.append(tip)
            tip = tip.parent
        for entry in reversed(path):
            if entry in self.evictable_entries:
                self._uses += 1
                self.evictable_entries[entry] = self._uses
                self.evictable_entries.move_to_end(entry)
        """,
    ),
    _mutant(
        "second-stop-token-unseen",
        "A model's second stop token does not end a text.",
        _ENGINE,
        "Engine._add_token",
        "ends = token in self._eos_token_ids and not request.params.ignore_eos",
        "ends = token == min(self._eos_token_ids) and not request.params.ignore_eos",
    ),
    _mutant(
        "oversized-request-accepted",
        "A request may take one block more than the cache has.",
        _REQUEST,
        "RequestLimits.validated_max_tokens",
        "if blocks > self.capacity: ...",
        "if blocks > self.capacity + 1: ...",
    ),
    _mutant(
        "prompt-of-all-positions-accepted",
        "A prompt that takes all positions of the model is accepted.",
        _REQUEST,
        "RequestLimits.validated_max_tokens",
        "if prompt_length >= positions: ...",
        "if prompt_length > positions: ...",
    ),
    _mutant(
        "paused-request-goes-on",
        "A request that is paused while it runs is not preempted.",
        _SCHEDULER,
        "Scheduler.pause",
        """
        if request.id not in self.running:
            self.waiting.remove(request)
        elif request not in self._leaving:
            self._leaving.append(request)
        """,
        """
        if request.id not in self.running:
            self.waiting.remove(request)
        """,
    ),
    _mutant(
        "seed-of-32-bits",
        "Only the low 32 bits of a seed count.",
        _SAMPLING,
        "SamplingBatch.of",
        "whole = [(each.top_k, signed64(seed)) for each, seed in zip(params, seeds, strict=True)]",
        """
        whole = [
            (each.top_k, signed64(seed & 0xFFFFFFFF))
            for each, seed in zip(params, seeds, strict=True)
        ]
        """,
    ),
    _mutant(
        "prompt-logprobs-of-later-chunks-shifted",
        "Prompt logprobs of chunks after the first are those of the tokens one position earlier.",
        _IN_FLIGHT,
        "launch_prompt_logprobs",
        "tokens += sequence.token_ids[begin:end]",
        "tokens += sequence.token_ids[begin - (begin > 1) : end - (begin > 1)]",
    ),
    _mutant(
        "prompt-logprobs-kept-twice",
        "A restarted prompt gets its logprobs once more, after those from before its preemption.",
        _IN_FLIGHT,
        "PromptLogprobsInFlight.collect",
        "request.prompt_logprobs[begin:end] = islice(values, end - begin)",
        "request.prompt_logprobs += islice(values, end - begin)",
    ),
    _mutant(
        "prompt-logprobs-not-resumed",
        "A prompt that is preempted before its end never gets the rest of its logprobs.",
        _REQUEST,
        "Request.needs_prompt_logprobs",
        "return self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_length",
        """
        missing = len(self.prompt_logprobs) < self.prompt_length
        return self.params.prompt_logprobs and missing and not self.times_preempted
        """,
    ),
    _mutant(
        "prompt-logprobs-begun-again",
        "A preempted request begins its prompt logprobs again, after those that it has.",
        _SCHEDULER,
        "Scheduler._preempt",
        "request.times_preempted += 1",
        """
        request.times_preempted += 1
        if request.params.prompt_logprobs:
            request.prompt_logprobs.append(None)
        """,
    ),
    Mutant(
        "positions-off-by-one-in-small-weights",
        "Chunks after the first have positions one too low, in a model as it was initialised.",
        _RUNNER,
        "SequenceRunner._batch_of",
        "positions += range(end - count, end)",
        "positions += range(end - count - (end > count), end - (end > count))",
        targets=(_INITIALISED,),
    ),
    Mutant(
        "positions-off-by-one-after-a-restart",
        "A restarted request is computed at positions one too low, in a model as it was "
        "initialised.",
        _RUNNER,
        "StepRunner._launch_forward_pass",
        "logits = self._sequence_runner.forward(spans)",
        """
        from unittest.mock import patch

        batch_of = self._sequence_runner._batch_of
        restarted = [False] * len(decoding)
        restarted += [request.times_preempted > 0 for request, _ in chunks]

        def shifted(spans):
            batch, tokens, positions, rows = batch_of(spans)
            lowered = [low for span, low in zip(spans, restarted) for _ in span.tokens]
            positions = [max(0, at - low) for at, low in zip(positions, lowered)]
            return batch, tokens, positions, rows

        with patch.object(self._sequence_runner, "_batch_of", shifted):
            logits = self._sequence_runner.forward(spans)
        """,
        targets=(_INITIALISED,),
    ),
)
