"""The parameters of a step's requests as columns, and the choice of their next tokens.

A choice is the argmax of logit plus Gumbel noise, which samples exactly from the distribution. The
noise of a token is a hash of the request's seed, the position and the token, so a request draws
the same whatever it is batched with.
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
    """The parameters of some requests as columns on the device, one row each."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    greedy: bool
    """True if every row takes its most likely token: nothing has to be sorted or drawn."""
    penalties: Penalties | None
    """None where nobody has one."""

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str
    ) -> SamplingBatch:
        """Build the columns. ``seeds[i]`` is request ``i``'s own, or drawn for it.

        The host does not wait for the device: the step in front may still run there.
        """
        bring = transfers.Transfers(torch.device(device)).bring
        floats = [(each.temperature, each.top_p, each.min_p) for each in params]
        whole = [(each.top_k, signed64(seed)) for each, seed in zip(params, seeds, strict=True)]
        temperature, top_p, min_p = bring([*zip(*floats, strict=True)], torch.float32)[:, :, None]
        top_k, own_seeds = bring([*zip(*whole, strict=True)], torch.int64)[:, :, None]
        return cls(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=own_seeds,
            greedy=all(each.temperature == 0 for each in params),
            penalties=Penalties.of(params, device),
        )

    def choose(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        tally: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the next token for every row of ``[requests, vocab]`` logits.

        ``positions`` are those of the new tokens. Only penalties need the ``tally``, ``[requests,
        vocab]`` of int32: how often a request has generated each token, and 2**30 more if its
        prompt has it.
        """
        logits = self._penalise(logits.float(), tally)
        likeliest = logits.argmax(-1)
        if self.greedy:
            return likeliest
        kept, order = self._sorted_logits(logits)
        noise = gumbel_noise(self.seeds, positions[:, None], order)
        drawn = order.gather(-1, (kept + noise).argmax(-1, keepdim=True))[:, 0]
        return torch.where(self.temperature[:, 0] == 0, likeliest, drawn)

    def probabilities(
        self, logits: torch.Tensor, tally: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what ``choose`` draws from: exactly zero for a token that cannot be drawn."""
        logits = self._penalise(logits.float(), tally)
        kept, order = self._sorted_logits(logits)
        drawn = torch.zeros_like(kept).scatter(-1, order, kept.softmax(-1))
        certain = torch.zeros_like(kept).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.temperature == 0, certain, drawn)

    def _penalise(self, logits: torch.Tensor, tally: torch.Tensor | None) -> torch.Tensor:
        if self.penalties is None or tally is None:
            return logits
        return self.penalties.apply(logits, tally)

    def _sorted_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sorted_logits(logits, self.temperature, self.top_k, self.top_p, self.min_p)
