"""Steps over rows on the device: each stores the token of its row and chooses the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import ResidentBatch
from roseinfer.decode.graphs import StepGraphs
from roseinfer.decode.readback import Readback
from roseinfer.engine_paths import EnginePath
from roseinfer.kernels.runtime import why_unusable
from roseinfer.kv.lasting import lasting
from roseinfer.sampling.allowed_tokens import only_allowed
from roseinfer.sampling.log_probabilities import rows_without_a_distribution, tell
from roseinfer.sampling_params import MOST_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.decode.readback import Arrival
    from roseinfer.decode.slot_guides import SlotGuides
    from roseinfer.decode.slot_penalties import SlotPenalties
    from roseinfer.decode.slot_rows import SlotRows
    from roseinfer.decode.step_kind import StepKind
    from roseinfer.models.causal import CausalModel


class RowSteps:
    """Runs the model on the first so many rows, as graphs where there are any."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        rows: SlotRows,
        sizes: Sequence[int],
        *,
        drafts: bool = False,
    ) -> None:
        """``sizes`` are those that steps are made in; the last is all rows.

        With ``drafts``, several rows may be of one sequence, one token behind the other.
        """
        self.rows = rows
        self.penalties: SlotPenalties | None = None
        self.guides: SlotGuides | None = None
        self._model = model
        self._attention = attention
        self._path_counts = attention.path_counts
        self._sizes = sizes
        self._drafts = drafts
        device = attention.kv.device
        self._advance: Callable[..., None] | None = None
        """The kernels that end a greedy step, where there are any."""
        if attention.name != "reference" and not why_unusable(device):
            from roseinfer.kernels.likeliest import advance_to_likeliest

            self._advance = advance_to_likeliest
        with lasting():
            self.tokens = torch.zeros_like(rows.tokens)
            """The token that the last step chose in each row; -1 where there was none."""
        self._graphs: StepGraphs | None = None
        num_rows = len(rows.tokens)
        self._readback = Readback(num_rows, torch.int64, device)
        self._told_readback = Readback(
            num_rows * (1 + 2 * MOST_TOP_LOGPROBS), torch.float64, device
        )
        self._told: dict[int, Tensor] = {}
        """What the last step told, by how many likeliest tokens it told of."""

    def capture(self, sizes: Sequence[int], *, required: bool) -> bool:
        """Capture plain steps of some sizes, and all others when they are first run.

        This returns False where the model's steps cannot be captured.
        """
        graphs = StepGraphs(self.step, self.rows, self._path_counts)
        if graphs.capture(sizes, required=required):
            self._graphs = graphs
        return self._graphs is not None

    def size_for(self, extent: int) -> int:
        """Return how many rows a step has that is to have the first ``extent``."""
        return next(size for size in self._sizes if size >= extent)

    def run(self, count: int, kind: StepKind) -> None:
        run = self._graphs.run if self._graphs else self.step
        run(count, kind)

    def read_back(self, extent: int) -> Arrival:
        """Copy the tokens that the step launched last chooses in the first rows."""
        return self._readback.start(self.tokens[:extent])

    def told(self, extent: int, tops: int) -> Arrival:
        """Copy what it tells of its tokens, which its kind must ask for.

        It arrives as the numbers of one row after the other, as ``tell`` has them.
        """
        return self._told_readback.start(self._told[tops][:extent].flatten())

    @torch.inference_mode()
    def step(self, count: int, kind: StepKind) -> None:
        """Store the token of each of the first ``count`` rows and choose the next one.

        This needs nothing from the host, so that it can be captured once and replayed.
        """
        rows = self.rows
        for path in self._model.paths:
            self._path_counts[path] += 1
        lengths = rows.lengths(count)
        batch = ResidentBatch(rows.tables(count), lengths, self._drafts, kind.long)
        self._attention.prepare(batch)
        logits = self._model.logits(rows.tokens[:count], lengths, None, self._attention)
        if kind.guided and self.guides is not None:
            self._path_counts[EnginePath.GUIDED] += 1
            logits = only_allowed(logits.float(), self.guides.allowed[:count])
        chosen = self._choose(count, kind, logits, lengths)
        rows.share_tokens(count)
        if kind.tops is not None:
            self._tell(logits, chosen, kind.tops)

    def _choose(self, count: int, kind: StepKind, logits: Tensor, lengths: Tensor) -> Tensor:
        """Choose the next token of each row, and count the one that was stored."""
        rows = self.rows
        if kind.greedy and not kind.penalised and self._advance is not None:
            self._path_counts[EnginePath.LIKELIEST] += 1
            chosen, tokens = self.tokens[:count], rows.tokens[:count]
            self._advance(logits, chosen, tokens, lengths, rows.active(count))
            return chosen
        penalties = tally = None
        if kind.penalised and self.penalties is not None:
            self._path_counts[EnginePath.PENALISED] += 1
            penalties = self.penalties.columns(count)
            tally = self.penalties.tally(rows.tokens[:count], rows.active(count))
        batch = rows.sampling(count, greedy=kind.greedy, penalties=penalties)
        chosen = batch.choose(logits, lengths + 1, tally)
        chosen = torch.where(rows_without_a_distribution(logits), -1, chosen)
        self.tokens[:count] = chosen
        rows.tokens[:count] = chosen.clamp(min=0)
        lengths += rows.active(count)
        return chosen

    def _tell(self, logits: Tensor, chosen: Tensor, tops: int) -> None:
        self._path_counts[EnginePath.TOLD] += 1
        told = tell(logits, chosen, tops)
        if tops not in self._told:
            with lasting():
                shape = len(self.tokens), told.shape[1]
                self._told[tops] = torch.zeros(shape, dtype=told.dtype, device=told.device)
        self._told[tops][: len(chosen)] = told
