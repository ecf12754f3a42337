"""Bugs in choosing tokens, and in the text of a completion."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_SAMPLING = "roseinfer.sampling"
_ENGINE = "roseinfer.engine.engine"
_TEXT = "roseinfer.text.completion_text"
_BYTES = "roseinfer.text.detokenizer"


def _mutant(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "one-more-than-top-k",
        "top_k keeps one token more.",
        _SAMPLING,
        "sorted_logits",
        "beyond_k = (rank >= top_k) & (top_k > 0)",
        "beyond_k = (rank > top_k) & (top_k > 0)",
    ),
    _mutant(
        "top-p-of-all-tokens",
        "top_p counts the probabilities of all tokens, even if top_k has removed most.",
        _SAMPLING,
        "sorted_logits",
        "weights = scaled.exp()",
        "weights = (below / temperature.clamp(min=_MIN_TEMPERATURE)).exp()",
    ),
    _mutant(
        "min-p-as-absolute-probability",
        "min_p is an absolute probability, not a share of the top probability.",
        _SAMPLING,
        "sorted_logits",
        "outside |= weights < min_p",
        "outside |= weights < min_p * weights.sum(-1, keepdim=True)",
    ),
    _mutant(
        "temperature-applied-twice",
        "The temperature is applied twice.",
        _SAMPLING,
        "sorted_logits",
        "scaled = below / temperature.clamp(min=_MIN_TEMPERATURE)",
        "scaled = below / temperature.clamp(min=_MIN_TEMPERATURE) ** 2",
    ),
    _mutant(
        "penalty-increases-negative-logits",
        "The repetition penalty divides negative logits too, which increases them.",
        _SAMPLING,
        "Penalties.apply",
        "lower = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)",
        "lower = logits / self.repetition",
    ),
    _mutant(
        "prompt-counted-as-output",
        "Presence and frequency penalties count tokens of the prompt too.",
        _SAMPLING,
        "count_prompt_and_output",
        """
        for token in token_ids[prompted:]:
            ...
        """,
        """
        for token in token_ids:
            ...
        """,
    ),
    _mutant(
        "presence-penalty-per-occurrence",
        "The presence penalty is subtracted once per occurrence of a token.",
        _SAMPLING,
        "Penalties.apply",
        "return logits - (generated * self.frequency + (generated > 0) * self.presence)",
        "return logits - (generated * self.frequency + generated * self.presence)",
    ),
    _mutant(
        "logprob-of-the-first-token",
        "The returned log-probability is that of the vocabulary's first token.",
        _SAMPLING,
        "log_probabilities",
        "return scores.log_softmax(-1).gather(-1, tokens)",
        "return scores.log_softmax(-1).gather(-1, torch.zeros_like(tokens))",
    ),
    _mutant(
        "top-tokens-ordered-by-bits",
        "Top tokens are ordered by the bits of logits, which is wrong for negative ones.",
        _SAMPLING,
        "likeliest",
        "ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)",
        "ordered = bits.to(torch.int64)",
    ),
    _mutant(
        "prompt-logprobs-without-the-prefix",
        "A request for prompt logprobs reuses a prefix, whose tokens then have none.",
        "roseinfer.engine.request",
        "RequestBlockAllocator.start",
        "tokens = session.token_ids[:1] if request.wants_prompt else session.token_ids",
        "tokens = session.token_ids",
    ),
    _mutant(
        "guide-advanced-again-by-a-preemption",
        "A preemption advances a request's guide by its newest token once more.",
        "roseinfer.engine.scheduler",
        "Scheduler._preempt",
        "request.times_preempted += 1",
        """
        request.times_preempted += 1
        if request.guide is not None and request.num_generated:
            request.guide.accept_token(request.sequence.token_ids[-1])
        """,
    ),
    _mutant(
        "mask-of-another-row",
        "The masks of guides are in the opposite order of their rows.",
        "roseinfer.engine.runner",
        "TokenSampler._token_bitmask",
        "return self._token_bitmasks.write([request.guide for request in requests])",
        "return self._token_bitmasks.write([request.guide for request in reversed(requests)])",
    ),
    _mutant(
        "masks-in-the-order-of-requests",
        "In a resident step, the mask of a guide is in the row of its turn, not of its slot.",
        "roseinfer.decode.step",
        "ResidentDecode.launch",
        "self.steps.guides.upload({each.slot: each.guide for each in residents if each.guide})",
        """
        self.steps.guides.upload(
            {row: each.guide for row, each in enumerate(residents) if each.guide}
        )
        """,
    ),
    _mutant(
        "continues-after-a-stop-string",
        "A request continues after its stop string.",
        _ENGINE,
        "Engine._take",
        """
        if stopped or complete:
            return self._final_update(request, token, text, FinishReason.STOP)
        """,
        """
        if complete or (stopped and length == request.max_total_length):
            return self._final_update(request, token, text, FinishReason.STOP)
        """,
    ),
    _mutant(
        "held-back-text-lost",
        "Text held back as the possible begin of a stop string is never returned.",
        _TEXT,
        "CompletionText.finish",
        "text += self._stops.flush()",
        "self._stops.flush()",
    ),
    _mutant(
        "character-from-its-first-byte",
        "A character is returned before all of its bytes are generated.",
        _BYTES,
        "_decode",
        """
        text, used = utf_8_decode(data, "replace", False)
        """,
        """
        text, used = utf_8_decode(data, "replace", True)
        """,
    ),
)
