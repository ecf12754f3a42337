"""Chooses tokens for requests that decode without slots, and for those whose prompts end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.decode.readback import Readback
from roseinfer.sampling.allowed_tokens import AllowedRows, only_allowed
from roseinfer.sampling.log_probabilities import rows_without_a_distribution, tell
from roseinfer.sampling.penalties import tally_of
from roseinfer.sampling.sampling_batch import SamplingBatch
from roseinfer.sampling_params import MOST_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.decode.readback import Arrival
    from roseinfer.engine.request import Request
    from roseinfer.kv.storage import IndexStaging


class TokenChoice:
    """Remembers the parameters of the last step's requests, which are mostly the next one's."""

    def __init__(self, staging: IndexStaging, most_rows: int) -> None:
        self._staging = staging
        self._most_rows = most_rows
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        self.guided = False
        """Some of those requests have guides."""
        self._guides: AllowedRows | None = None
        """Made when the first request with a guide comes."""
        numbers = most_rows * (1 + 2 * MOST_TOP_LOGPROBS)
        self._told = Readback(numbers, torch.float64, staging.device)

    def forget(self) -> None:
        """Forget the parameters, since one of the requests has ended."""
        self._sampling = None

    def choose(
        self, owners: list[Request], positions: Sequence[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, Arrival | None]:
        """Return the token of each row of logits, which is a request's for a position.

        It is -1 where there is none to choose. Beside them comes what is told of them.
        """
        batch = self._sampling_batch(owners, logits.device)
        tally = self._tally(owners, logits) if batch.penalties else None
        staged = self._staging.stage([list(positions)]).columns[0]
        if self.guided:
            logits = only_allowed(logits.float(), self._allowed(owners, logits.shape[-1]))
        chosen = batch.choose(logits, staged, tally)
        told = None
        if any(request.params.logprobs for request in owners):
            most = max(request.params.top_logprobs for request in owners)
            told = self._told.start(tell(logits, chosen, most).flatten())
        return torch.where(rows_without_a_distribution(logits), -1, chosen), told

    def _sampling_batch(self, requests: list[Request], device: torch.device) -> SamplingBatch:
        """Return the parameters as columns, which are kept while the requests are the same."""
        if self._sampling is None or self._sampling[0] != requests:
            batch = SamplingBatch.of(
                [request.params for request in requests],
                [request.seed for request in requests],
                device,
            )
            self._sampling = (requests, batch)
            self.guided = any(request.guide for request in requests)
        return self._sampling[1]

    def _allowed(self, requests: list[Request], vocabulary: int) -> torch.Tensor:
        """Return the bits of the tokens that each request may get next."""
        if self._guides is None:
            self._guides = AllowedRows(self._most_rows, vocabulary, self._staging.device)
        return self._guides.write([request.guide for request in requests])

    def _tally(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Tally the tokens of the requests that have penalties, anew in every step."""
        tally = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        rows: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        for row, request in enumerate(requests):
            if request.params.penalised:
                own = tally_of(request.session.token_ids, request.prompt_length)
                rows += [row] * len(own)
                tokens += own
                counts += own.values()
        at_rows, at_tokens, numbers = self._staging.stage([rows, tokens, counts]).columns
        return tally.index_put_((at_rows, at_tokens), numbers.int())
