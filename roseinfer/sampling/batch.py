"""Sampling parameters of a batch as columns, and sampling of its next tokens.

A token is sampled as the argmax of logit plus Gumbel noise, which is exact. The noise of a token is
a hash of the request's seed, the position and the token, so a request samples the same tokens
whatever else is in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.kv import transfers
from roseinfer.sampling.logits import Penalties, gumbel_noise, signed64, sorted_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of requests as columns on the device, one row each."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    greedy: bool
    """True if every row takes its argmax: no sorting or sampling is needed."""
    penalties: Penalties | None
    """Penalties; None where no request has any."""

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str
    ) -> SamplingBatch:
        """Build the columns. ``seeds[i]`` is the seed of request ``i``, its own or a drawn one.

        The host does not wait for the device, which may still run the previous step.
        """
        upload_columns = transfers.Transfers(torch.device(device)).upload_columns
        floats = [(each.temperature, each.top_p, each.min_p) for each in params]
        whole = [(each.top_k, signed64(seed)) for each, seed in zip(params, seeds, strict=True)]
        temperature, top_p, min_p = upload_columns([*zip(*floats, strict=True)], torch.float32)[
            :, :, None
        ]
        top_k, own_seeds = upload_columns([*zip(*whole, strict=True)], torch.int64)[:, :, None]
        return cls(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=own_seeds,
            greedy=all(each.temperature == 0 for each in params),
            penalties=Penalties.of(params, device),
        )

    def sample_tokens(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        row_token_counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the next token for every row of ``[requests, vocab]`` logits.

        ``positions`` are those of the new tokens. Only penalties need ``row_token_counts``, int32
        ``[requests, vocab]``: how often a request has generated each token, plus 2**30 if its
        prompt has it.
        """
        logits = self._penalise(logits.float(), row_token_counts)
        argmax = logits.argmax(-1)
        if self.greedy:
            return argmax
        kept, order = self._sorted_logits(logits)
        noise = gumbel_noise(self.seeds, positions[:, None], order)
        drawn = order.gather(-1, (kept + noise).argmax(-1, keepdim=True))[:, 0]
        return torch.where(self.temperature[:, 0] == 0, argmax, drawn)

    def probabilities(
        self, logits: torch.Tensor, row_token_counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the probabilities by which ``sample_tokens`` samples; exactly 0 if excluded."""
        logits = self._penalise(logits.float(), row_token_counts)
        kept, order = self._sorted_logits(logits)
        drawn = torch.zeros_like(kept).scatter(-1, order, kept.softmax(-1))
        certain = torch.zeros_like(kept).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.temperature == 0, certain, drawn)

    def _penalise(
        self, logits: torch.Tensor, row_token_counts: torch.Tensor | None
    ) -> torch.Tensor:
        if self.penalties is None or row_token_counts is None:
            return logits
        return self.penalties.apply(logits, row_token_counts)

    def _sorted_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sorted_logits(logits, self.temperature, self.top_k, self.top_p, self.min_p)
