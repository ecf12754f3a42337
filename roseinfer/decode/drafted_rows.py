"""Drafts verified in one step: a row for each token of a text that is not known to come next.

A row decodes as the one of a resident sequence does, so the token behind a draft has the bits that
it gets without drafts, and a step can be a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from roseinfer.decode.row_steps import RowSteps
from roseinfer.decode.slot_rows import SlotFields, SlotRows
from roseinfer.decode.step_kind import StepKind, tops_told
from roseinfer.engine_paths import EnginePath
from roseinfer.kv.sequence import reserve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.decode.readback import Arrival
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.models.causal import CausalModel
    from roseinfer.sampling_params import SamplingParams

_LEAST_ROWS = 16
"""Tensor cores take no fewer, so fewer would take as long."""


class Drafted(NamedTuple):
    """A sequence, and the tokens that may come behind those it has stored."""

    session: InferenceSession
    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    """Its newest token, and drafts of those behind it."""


class DraftedRows:
    """Stores drafts and chooses the token behind each."""

    def __init__(
        self, model: CausalModel, attention: AttentionBackend, most_rows: int, *, graphs: bool
    ) -> None:
        self._kv = attention.kv
        self._path_counts = attention.path_counts
        sizes = _ladder(most_rows)
        rows = SlotRows.of(sizes[-1], model, attention.kv, attention.staging)
        self._rows = rows
        self._steps = RowSteps(model, attention, rows, sizes, drafts=True)
        self._taken = 0
        """How many rows the last step had."""
        self.tokens: Tensor = self._steps.tokens
        """Those that the last step chooses, row by row, on the device."""
        if graphs:
            self._steps.capture(sizes[:1], required=False)

    def launch(self, drafted: Sequence[Drafted]) -> tuple[Arrival, Arrival | None]:
        """Store the tokens of all, and choose the one behind each, sequence by sequence.

        This returns the tokens, and what is told of them if some request wants that.
        """
        counts = [len(each.tokens) for each in drafted]
        reserve(self._kv, [each.session for each in drafted], counts)
        self._upload(drafted)
        kind = _kind_of([each.params for each in drafted])
        self._steps.run(self._steps.size_for(self._taken), kind)
        for each in drafted:
            each.session.stored += len(each.tokens)
        self._path_counts[EnginePath.VERIFIED] += 1
        told = None if kind.tops is None else self._steps.told(self._taken, kind.tops)
        return self._steps.read_back(self._taken), told

    def clear(self) -> None:
        """Upload all rows anew, since nobody knows what the device has of them."""
        self._taken = len(self._rows.tokens)

    def _upload(self, drafted: Sequence[Drafted]) -> None:
        rows = self._rows
        tokens: list[int] = []
        flat: list[int] = []
        for session, params, seed, own in drafted:
            fields = SlotFields.of(params, seed)
            table = rows.table_of(session)
            for length in range(session.stored, session.stored + len(own)):
                flat += [len(tokens) + length - session.stored, *fields._replace(length=length)]
                flat += table
            tokens += own
        before, self._taken = self._taken, len(tokens)
        for row in range(self._taken, before):
            flat += [row, *rows.padding]
        rows.put(flat, max(before, self._taken))
        rows.begin_with(tokens)


def _kind_of(asked: Sequence[SamplingParams]) -> StepKind:
    tops = tops_told(
        told=any(params.logprobs for params in asked),
        tops=any(params.top_logprobs for params in asked),
    )
    return StepKind(greedy=not any(params.temperature for params in asked), tops=tops)


def _ladder(most: int) -> list[int]:
    """Return the sizes of steps, each twice the last, so that few graphs are captured."""
    sizes = [_LEAST_ROWS]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
