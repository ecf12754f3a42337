"""Sampling of next tokens on the device: processing of logits, sampling, and log-probabilities.

A token is sampled as the argmax of logit plus Gumbel noise, which is exact. The noise of a token is
a hash of the request's seed, the position and the token, so a request samples the same tokens
whatever else is in its batch.

A row's result must not depend on other rows (batch invariance). Devices sum a row in an order that
depends on the number of rows, and another order rounds differently. So all sums here are of whole
numbers, which are exact; everything else is elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from roseinfer.kv import transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.guided.compiler import GuideMatcher
    from roseinfer.sampling_params import SamplingParams


_NEG_INF = float("-inf")
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Smallest temperature: a device may flush smaller ones to 0. It always samples the argmax."""
_FIXED_POINT_ONE = 1 << 42
"""Weight of the top token, as a whole number of 42 bits.

Two million such weights fit into 64 bits, and the truncation error of a million smaller ones is
small compared with float32's rounding.
"""


def sorted_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scaled logits in descending order, and the token ids in that order.

    Logits are divided by the temperature and shifted so that the largest is 0. Those of tokens
    that top_k, top_p or min_p exclude are -infinity.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    # Differences to the largest are divided: they can only overflow to -infinity.
    below = torch.where(ordered == ordered[:, :1], 0.0, _differences(ordered))
    scaled = below / temperature.clamp(min=_MIN_TEMPERATURE)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond_k = (rank >= top_k) & (top_k > 0)
    scaled = scaled.masked_fill_(beyond_k, _NEG_INF)
    weights = scaled.exp()
    whole = (weights * _FIXED_POINT_ONE).to(torch.int64)
    sums = whole.cumsum(-1)
    above = sums - whole
    outside = (above >= sums[:, -1:].double() * top_p.double()) & (top_p < 1)
    outside |= weights < min_p
    outside[:, 0] = False
    return scaled.masked_fill_(outside, _NEG_INF), order


def _differences(ordered: torch.Tensor) -> torch.Tensor:
    """Return the difference of each logit to the first of its row, in float32.

    Penalties convert all rows of a step to float64. Rows without penalties get the same result in
    either dtype.
    """
    if ordered.dtype is torch.float32:
        return ordered - ordered[:, :1]
    rounded = ordered.float()
    exact = (rounded == ordered) & (rounded[:, :1] == ordered[:, :1])
    return torch.where(exact, rounded - rounded[:, :1], (ordered - ordered[:, :1]).float())


# Penalties for tokens in prompt and completion, by counts of them.


IN_PROMPT = 1 << 30
"""Summand of a token's count if the prompt has it; the rest is how often it was generated."""


def count_prompt_and_output(token_ids: Sequence[int], num_prompt_tokens: int) -> dict[int, int]:
    """Count the tokens of a request, adding ``IN_PROMPT`` to those that its prompt has."""
    row_token_counts = dict.fromkeys(token_ids[:num_prompt_tokens], IN_PROMPT)
    for token in token_ids[num_prompt_tokens:]:
        row_token_counts[token] = row_token_counts.get(token, 0) + 1
    return row_token_counts


@dataclass(slots=True)
class Penalties:
    """Penalties of requests as columns on the device, in float64."""

    repetition: torch.Tensor
    """Divisor of positive logits, factor of negative ones, of tokens in prompt or completion."""
    presence: torch.Tensor
    """Number subtracted once from the logit of every token already generated."""
    frequency: torch.Tensor
    """Number subtracted for each time that the token was generated."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Penalties | None:
        """Build the columns; return None where no request has a penalty."""
        if not any(each.has_penalties for each in params):
            return None
        rows = [
            (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
            for each in params
        ]
        upload_columns = transfers.Transfers(torch.device(device)).upload_columns
        return cls(*upload_columns([*zip(*rows, strict=True)], torch.float64)[:, :, None])

    def apply(self, logits: torch.Tensor, row_token_counts: torch.Tensor) -> torch.Tensor:
        """Return penalized logits, in float64, which no valid penalty overflows."""
        logits = logits.double()
        lower = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = torch.where(row_token_counts != 0, lower, logits)
        generated = row_token_counts & (IN_PROMPT - 1)
        return logits - (generated * self.frequency + (generated > 0) * self.presence)


# Bitmasks of the tokens that guides allow next.


_WORD_BITS = 32
ALL_TOKENS_ALLOWED = -1
"""Bitmask word that allows all of its tokens."""


def bitmask_words(vocabulary: int) -> int:
    """Return the number of bitmask words for a vocabulary."""
    return -(-vocabulary // _WORD_BITS)


def apply_token_bitmask(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return logits with -infinity for all tokens that are not allowed.

    ``allowed`` is int32, ``[rows, words]``, as xgrammar and llguidance make it: bit ``t % 32`` of
    word ``t // 32`` is set if token ``t`` is allowed. Tokens after the last word are not.
    """
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=allowed.device)
    bits = (allowed[:, :, None] >> shifts) & 1
    mask = bits.flatten(1)[:, : logits.shape[-1]].bool()
    return logits.masked_fill(~pad(mask, (0, logits.shape[-1] - mask.shape[-1])), float("-inf"))


class TokenBitmaskBuffer:
    """Buffer through which the bitmasks of guides are computed and uploaded."""

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device) -> None:
        """Allocate a buffer of ``max_rows`` rows, the most that one ``write`` takes."""
        self._transfers = transfers.Transfers(device)
        self._host = self._transfers.host_buffer((max_rows, bitmask_words(vocabulary)), torch.int32)
        self._device = self._transfers.device_buffer(self._host)
        self._host_words = self._host.numpy().view(np.uint32)
        self._done = self._transfers.event() if self._transfers.is_async else None

    def write(self, guides: Sequence[GuideMatcher | None]) -> torch.Tensor:
        """Return the bitmask of each guide on the device; all tokens are allowed for None.

        The next call overwrites the result.
        """
        if self._done is not None:
            self._done.synchronize()
        for row, guide in zip(self._host_words, guides, strict=False):
            if guide is None:
                row.fill(~np.uint32(0))
            else:
                guide.fill_bitmask(row)
        count = len(guides)
        if self._done is not None:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
            self._done.record(self._transfers.stream())
        return self._device[:count]


# Gumbel noise, a function of seed, position and token alone.


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise, a function of seed, position and token alone."""
    bits = _mix(_mix(_mix(seeds) + positions) + tokens)
    # With one more bit, the largest would round to 1, and its noise would be infinite.
    uniform = (((bits >> 41) & 0x7FFFFF).to(torch.float32) + 0.5) / (1 << 23)
    return -(-uniform.log()).log()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Hash 64-bit integers one to one (the splitmix64 mixer)."""
    bits = bits + signed64(0x9E3779B97F4A7C15)
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * signed64(0xBF58476D1CE4E5B9)
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * signed64(0x94D049BB133111EB)
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


def signed64(number: int) -> int:
    """Return the same 64 bits as a signed integer, the only kind that torch has."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# Sampling, with the parameters of a batch as columns.


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
        sorted_logits, order = self._sorted_logits(logits)
        noise = gumbel_noise(self.seeds, positions[:, None], order)
        sampled = order.gather(-1, (sorted_logits + noise).argmax(-1, keepdim=True))[:, 0]
        return torch.where(self.temperature[:, 0] == 0, argmax, sampled)

    def probabilities(
        self, logits: torch.Tensor, row_token_counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the distribution that ``sample_tokens`` samples from; exactly 0 if excluded."""
        logits = self._penalise(logits.float(), row_token_counts)
        sorted_logits, order = self._sorted_logits(logits)
        sampled = torch.zeros_like(sorted_logits).scatter(-1, order, sorted_logits.softmax(-1))
        certain = torch.zeros_like(sorted_logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.temperature == 0, certain, sampled)

    def _penalise(
        self, logits: torch.Tensor, row_token_counts: torch.Tensor | None
    ) -> torch.Tensor:
        if self.penalties is None or row_token_counts is None:
            return logits
        return self.penalties.apply(logits, row_token_counts)

    def _sorted_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sorted_logits(logits, self.temperature, self.top_k, self.top_p, self.min_p)


# Log-probabilities.


_ALIGNED_COLUMNS = 4
"""Columns of float32 in 16 bytes, the alignment of rows.

Torch sums a row that is not aligned in another order, so that its bits would depend on its index in
the batch.
"""
_MAX_LOGPROB_ROWS = 64
"""Prompt tokens whose logprobs are computed at a time."""


class TokenLogprobs(NamedTuple):
    """Logprobs at the position of one token."""

    logprob: float
    """Logprob of the token itself."""
    top_logprobs: list[tuple[int, float]]
    """Top tokens at its position, each with its logprob."""


def rows_without_a_distribution(logits: torch.Tensor) -> torch.Tensor:
    """Return True for rows with NaN or without a finite logit, which have no next token."""
    return logits.isnan().any(-1) | ~logits.isfinite().any(-1)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of ``[rows, n]`` tokens by the logits, without sampling parameters."""
    scores = logits.float()
    if missing := -scores.shape[-1] % _ALIGNED_COLUMNS:
        scores = pad(scores, (0, missing), value=float("-inf"))
    return scores.log_softmax(-1).gather(-1, tokens)


def prompt_token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logprob of ``tokens[i]`` in row ``rows[i]``, few rows at a time."""
    strips = zip(
        torch.split(rows, _MAX_LOGPROB_ROWS),
        torch.split(tokens[:, None], _MAX_LOGPROB_ROWS),
        strict=True,
    )
    return torch.cat([log_probabilities(logits[each], ids)[:, 0] for each, ids in strips])


def top_token_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the largest logits of each row; ties are ordered by id."""
    bits = (logits.float() + 0.0).view(torch.int32)  # turns -0 into 0, which has other bits
    # As integers these are in the order of the floats.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((ordered << 32) - ids).topk(min(count, len(ids))).indices


def pack_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return a row of float64 for each chosen token, which ``unpack_logprobs`` reads.

    It has the token's logprob, then the ids of the top ``num_top`` tokens, then their logprobs.
    """
    tokens = chosen.clamp(min=0)[:, None]
    if not num_top:
        return log_probabilities(logits, tokens).double()
    top = top_token_ids(logits, num_top)
    logprobs = log_probabilities(logits, torch.cat([tokens, top], -1)).double()
    return torch.cat([logprobs[:, :1], top.double(), logprobs[:, 1:]], -1)


def unpack_logprobs(row: list[float]) -> TokenLogprobs:
    """Convert a row of ``pack_logprobs``."""
    num_top = len(row) // 2
    return TokenLogprobs(
        row[0], list(zip(map(int, row[1 : num_top + 1]), row[num_top + 1 :], strict=True))
    )
