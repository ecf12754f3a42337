"""What transformers itself makes of a text: by forward passes without a cache, and by generate."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from tests.sweep.prompts import NEW_TOKENS, PAD

_ROUNDING = 2e-4
"""Of log-probabilities in float32: the same sums, added in another order."""
_TIMES_TRANSFORMERS = 2.0
"""In 16 bits the engine may be so many times as far from the truth as transformers is."""


class Reference:
    """A model with transformers' own attention, in float32 but with the weights of a dtype."""

    def __init__(self, model: Any, dtype: str) -> None:
        rounded = deepcopy(model).to(getattr(torch, dtype))
        rounded.set_attn_implementation("eager")
        self._truth = deepcopy(rounded).float()
        self._rounded = None if dtype == "float32" else rounded
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self._off = 0.0
        """How far transformers itself was from the truth, at most."""

    @property
    def tolerance(self) -> float:
        return _ROUNDING + _TIMES_TRANSFORMERS * self._off

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Return the log-probabilities of what follows these tokens, by a plain forward pass."""
        if (text := tuple(tokens)) not in self._known:
            self._known[text] = self._computed(tokens)
        return self._known[text]

    def _computed(self, tokens: list[int]) -> torch.Tensor:
        truth = _last_logprobs(self._truth, tokens)
        if self._rounded is not None:
            off = _last_logprobs(self._rounded, tokens) - truth
            self._off = max(self._off, float(off.abs().max()))
        return truth

    def generated(self, prompt: list[int]) -> list[int]:
        """Return what ``generate`` continues a prompt with, on a cache of its own."""
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
