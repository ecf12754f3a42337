"""Several tokens of a text stored in one step: a row for each.

A row decodes as the one of a resident sequence does, so what comes behind a token has the bits that
it has where tokens come one at a time, and a step can be a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from roseinfer.decode.row_steps import RowSteps
from roseinfer.decode.slot_rows import BLOCKS_BEGIN, SlotFields, SlotRows
from roseinfer.decode.step_kind import StepKind, tops_told
from roseinfer.kv.sequence import reserve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.decode.readback import Arrival
    from roseinfer.engine_paths import EnginePath
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.models.causal import CausalModel
    from roseinfer.sampling_params import SamplingParams

_LEAST_ROWS = 16
"""Tensor cores take no fewer, so fewer would take as long."""


class Span(NamedTuple):
    """A sequence, and tokens that come behind those it has stored."""

    session: InferenceSession
    params: SamplingParams
    seed: int
    tokens: Sequence[int]


class TokenRows:
    """Stores tokens of several sequences, and chooses the token behind each."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        most_rows: int,
        path: EnginePath,
        *,
        captured: int = 0,
    ) -> None:
        """``path`` counts its steps. Those of up to ``captured`` rows become graphs now.

        If there are some, larger ones become graphs when they are first run.
        """
        self._kv = attention.kv
        self._path_counts = attention.path_counts
        self._path = path
        sizes = _ladder(most_rows)
        rows = SlotRows.of(sizes[-1], model, attention.kv, attention.staging)
        self._rows = rows
        self._steps = RowSteps(model, attention, rows, sizes, drafts=True)
        self._taken = 0
        """How many rows the last step had."""
        self.tokens: Tensor = self._steps.tokens
        """Those that the last step chooses, row by row, on the device."""
        if captured:
            largest = self._steps.size_for(captured)
            self._steps.capture([size for size in sizes if size <= largest], required=False)

    def launch(self, spans: Sequence[Span]) -> tuple[Arrival, Arrival | None]:
        """Store the tokens of all, and choose the one behind each, sequence by sequence.

        This returns the tokens, and what is told of them if some request wants that.
        """
        counts = [len(each.tokens) for each in spans]
        reserve(self._kv, [each.session for each in spans], counts)
        self._upload(spans)
        kind = _kind_of([each.params for each in spans])
        self._steps.run(self._steps.size_for(self._taken), kind)
        for each in spans:
            each.session.stored += len(each.tokens)
        self._path_counts[self._path] += 1
        told = None if kind.tops is None else self._steps.told(self._taken, kind.tops)
        return self._steps.read_back(self._taken), told

    def clear(self) -> None:
        """Upload all rows anew, since nobody knows what the device has of them."""
        self._taken = len(self._rows.tokens)

    def _upload(self, spans: Sequence[Span]) -> None:
        rows = self._rows
        tokens: list[int] = []
        flat: list[int] = []
        width = self._width_of(spans)
        for session, params, seed, own in spans:
            fields = SlotFields.of(params, seed)
            table = rows.table_of(session, width)
            for length in range(session.stored, session.stored + len(own)):
                flat += [len(tokens) + length - session.stored, *fields._replace(length=length)]
                flat += table
            tokens += own
        before, self._taken = self._taken, len(tokens)
        for row in range(self._taken, before):
            flat += [row, *rows.padding[: BLOCKS_BEGIN + width * rows.groups]]
        rows.put(flat, max(before, self._taken))
        rows.begin_with(tokens)

    def _width_of(self, spans: Sequence[Span]) -> int:
        """Return how many blocks each row is given: no others are looked at.

        Where there are several groups of layers, those of the second have their own columns.
        """
        if self._rows.groups > 1:
            return self._rows.width
        return max(len(each.session.block_lists[0]) for each in spans)


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
