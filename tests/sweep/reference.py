"""Transformers' own results: forward passes without a cache, and ``generate``."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from tests.sweep.prompts import NEW_TOKENS, PAD

_ROUNDING = 2e-4
"""Rounding error of log-probabilities in float32, by other orders of sums."""
_TIMES_TRANSFORMERS = 2.0
"""Largest ratio of the engine's error in 16 bits to that of transformers."""


class Reference:
    """A model with transformers' own attention, in float32 but with the weights of a dtype."""

    def __init__(self, model: Any, dtype: str) -> None:
        rounded = deepcopy(model).to(getattr(torch, dtype))
        rounded.set_attn_implementation("eager")
        self._truth = deepcopy(rounded).float()
        self._rounded = None if dtype == "float32" else rounded
        self._cache: dict[tuple[int, ...], torch.Tensor] = {}
        self._error = 0.0
        """Largest error of transformers itself against float32."""

    @property
    def tolerance(self) -> float:
        return _ROUNDING + _TIMES_TRANSFORMERS * self._error

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Return the next token's log-probabilities, by a plain forward pass."""
        if (text := tuple(tokens)) not in self._cache:
            self._cache[text] = self._compute(tokens)
        return self._cache[text]

    def _compute(self, tokens: list[int]) -> torch.Tensor:
        truth = _last_logprobs(self._truth, tokens)
        if self._rounded is not None:
            error = _last_logprobs(self._rounded, tokens) - truth
            self._error = max(self._error, float(error.abs().max()))
        return truth

    def generated(self, prompt: list[int]) -> list[int]:
        """Return the tokens of ``generate`` after a prompt."""
        row = torch.tensor([prompt])
        tokens = self._truth.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        continuation: list[int] = tokens[0, len(prompt) :].tolist()
        return continuation


@torch.no_grad()
def _last_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    row = torch.tensor([tokens])
    # Some versions of Moshi look ahead where no mask is given.
    everything = torch.ones_like(row)
    logits: torch.Tensor = model(row, attention_mask=everything, use_cache=False).logits
    return logits[0, -1].float().log_softmax(-1)
