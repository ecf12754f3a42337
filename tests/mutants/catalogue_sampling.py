"""Bugs in choosing tokens, and in the text that is shown of them."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_NUCLEUS = "roseinfer.sampling.logits"
_PENALTIES = "roseinfer.sampling.logits"
_LOGPROB_FIELDS = "roseinfer.sampling.logprobs"
_ENGINE = "roseinfer.engine.engine"
_TEXT = "roseinfer.text.completion_text"
_BYTES = "roseinfer.text.detokenizer"


def _mutant(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "one-more-than-top-k",
        "top_k lets the next likeliest token through as well.",
        _NUCLEUS,
        "sorted_logits",
        "beyond_k = (rank >= top_k) & (top_k > 0)",
        "beyond_k = (rank > top_k) & (top_k > 0)",
    ),
    _mutant(
        "top-p-of-all-tokens",
        "top_p is a share of all tokens, also where top_k left a few.",
        _NUCLEUS,
        "sorted_logits",
        "weights = scaled.exp()",
        "weights = (below / temperature.clamp(min=_MIN_TEMPERATURE)).exp()",
    ),
    _mutant(
        "min-p-of-one",
        "min_p excludes tokens below a probability, not below a share of the likeliest one's.",
        _NUCLEUS,
        "sorted_logits",
        "outside |= weights < min_p",
        "outside |= weights < min_p * weights.sum(-1, keepdim=True)",
    ),
    _mutant(
        "hotter-than-asked",
        "The temperature is taken twice.",
        _NUCLEUS,
        "sorted_logits",
        "scaled = below / temperature.clamp(min=_MIN_TEMPERATURE)",
        "scaled = below / temperature.clamp(min=_MIN_TEMPERATURE) ** 2",
    ),
    _mutant(
        "penalty-rewards-the-unlikely",
        "The repetition penalty divides negative logits too, which makes them larger.",
        _PENALTIES,
        "Penalties.apply",
        "lower = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)",
        "lower = logits / self.repetition",
    ),
    _mutant(
        "prompt-counted-as-text",
        "Presence and frequency penalties are taken for tokens of the prompt too.",
        _PENALTIES,
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
        "presence-taken-each-time",
        "The presence penalty is taken as often as a token was generated.",
        _PENALTIES,
        "Penalties.apply",
        "return logits - (generated * self.frequency + (generated > 0) * self.presence)",
        "return logits - (generated * self.frequency + generated * self.presence)",
    ),
    _mutant(
        "logprob-of-the-first-token",
        "The log-probability that is told is that of the first token of the vocabulary.",
        _LOGPROB_FIELDS,
        "log_probabilities",
        "return scores.log_softmax(-1).gather(-1, tokens)",
        "return scores.log_softmax(-1).gather(-1, torch.zeros_like(tokens))",
    ),
    _mutant(
        "likeliest-told-by-their-bits",
        "The likeliest tokens are told as if the bits of negative numbers were in order too.",
        _LOGPROB_FIELDS,
        "likeliest",
        "ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)",
        "ordered = bits.to(torch.int64)",
    ),
    _mutant(
        "prompt-told-without-its-beginning",
        "The prefix cache gives a request the beginning of a prompt that is to be told of.",
        "roseinfer.engine.request",
        "RequestBlockAllocator.start",
        "tokens = session.token_ids[:1] if request.wants_prompt else session.token_ids",
        "tokens = session.token_ids",
    ),
    _mutant(
        "stopped-and-going-on",
        "A request goes on after its stop string.",
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
        "held-back-for-ever",
        "What was held back because it could begin a stop string is never shown.",
        _TEXT,
        "CompletionText.finish",
        "text += self._stops.flush()",
        "self._stops.flush()",
    ),
    _mutant(
        "character-shown-by-its-first-byte",
        "A character is shown before all of its bytes are there.",
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
