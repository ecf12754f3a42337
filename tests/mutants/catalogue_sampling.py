"""Bugs in choosing tokens, and in the text that is shown of them."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_NUCLEUS = "roseinfer.sampling.nucleus"
_PENALTIES = "roseinfer.sampling.penalties"
_TOLD = "roseinfer.sampling.log_probabilities"
_ENGINE = "roseinfer.engine.engine"
_TEXT = "roseinfer.text.request_text"
_BYTES = "roseinfer.text.byte_level"


def _mutant(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "one-more-than-top-k",
        "top_k lets the next likeliest token through as well.",
        _NUCLEUS,
        "    beyond_k = (rank >= top_k) & (top_k > 0)\n",
        "    beyond_k = (rank > top_k) & (top_k > 0)\n",
    ),
    _mutant(
        "top-p-of-all-tokens",
        "top_p is a share of all tokens, also where top_k left a few.",
        _NUCLEUS,
        "    weights = scaled.exp()\n",
        "    weights = (below / temperature.clamp(min=_SMALLEST)).exp()\n",
    ),
    _mutant(
        "min-p-of-one",
        "min_p excludes tokens below a probability, not below a share of the likeliest one's.",
        _NUCLEUS,
        "weights < min_p",
        "weights < min_p * weights.sum(-1, keepdim=True)",
    ),
    _mutant(
        "hotter-than-asked",
        "The temperature is taken twice.",
        _NUCLEUS,
        "    scaled = below / temperature.clamp(min=_SMALLEST)\n",
        "    scaled = below / temperature.clamp(min=_SMALLEST) ** 2\n",
    ),
    _mutant(
        "penalty-rewards-the-unlikely",
        "The repetition penalty divides negative logits too, which makes them larger.",
        _PENALTIES,
        "torch.where(logits > 0, logits / self.repetition, logits * self.repetition)",
        "logits / self.repetition",
    ),
    _mutant(
        "prompt-counted-as-text",
        "Presence and frequency penalties are taken for tokens of the prompt too.",
        _PENALTIES,
        "    for token in token_ids[prompted:]:\n",
        "    for token in token_ids:\n",
    ),
    _mutant(
        "presence-taken-each-time",
        "The presence penalty is taken as often as a token was generated.",
        _PENALTIES,
        "(generated > 0) * self.presence",
        "generated * self.presence",
    ),
    _mutant(
        "logprob-of-the-first-token",
        "The log-probability that is told is that of the first token of the vocabulary.",
        _TOLD,
        "log_softmax(-1).gather(-1, tokens)",
        "log_softmax(-1).gather(-1, torch.zeros_like(tokens))",
    ),
    _mutant(
        "likeliest-told-by-their-bits",
        "The likeliest tokens are told as if the bits of negative numbers were in order too.",
        _TOLD,
        "    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)\n",
        "    ordered = bits.to(torch.int64)\n",
    ),
    _mutant(
        "prompt-told-without-its-beginning",
        "The prefix cache gives a request the beginning of a prompt that is to be told of.",
        "roseinfer.engine.request",
        "session.token_ids[:1] if request.wants_prompt else session.token_ids",
        "session.token_ids",
    ),
    _mutant(
        "stopped-and-going-on",
        "A request goes on after its stop string.",
        _ENGINE,
        "        if stopped or complete:\n",
        "        if complete or (stopped and length == request.full_length):\n",
    ),
    _mutant(
        "held-back-for-ever",
        "What was held back because it could begin a stop string is never shown.",
        _TEXT,
        "                text += self._stops.flush()\n",
        "                self._stops.flush()\n",
    ),
    _mutant(
        "character-shown-by-its-first-byte",
        "A character is shown before all of its bytes are there.",
        _BYTES,
        'utf_8_decode(data, "replace", False)',
        'utf_8_decode(data, "replace", True)',
    ),
)
