"""Prompts of few tokens stored as rows that decode, so that their step can be a graph.

Launching the kernels of a short prompt one by one takes longer than they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.decode.token_rows import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.decode.readback import Arrival
    from roseinfer.decode.token_rows import TokenRows
    from roseinfer.engine.request import Request

_LONGEST = 1024
"""Tokens of a text. Each row reads the keys and values of all in front of it."""


class PromptRows:
    """Stores the prompts of a step, if they are short and ask for nothing that rows lack."""

    def __init__(self, rows: TokenRows, most: int) -> None:
        self._rows = rows
        self._most = most

    @property
    def tokens(self) -> Tensor:
        """The tokens that the last step chooses, row by row, on the device."""
        return self._rows.tokens

    def fit(self, chunks: Sequence[tuple[Request, int]]) -> bool:
        return 0 < sum(count for _, count in chunks) <= self._most and all(
            request.session.stored + count <= _LONGEST
            and request.guide is None
            and not request.params.penalised
            and not request.wants_prompt
            for request, count in chunks
        )

    def launch(
        self, chunks: Sequence[tuple[Request, int]]
    ) -> tuple[list[Request], list[int], Arrival, Arrival | None]:
        """Store so many more tokens of each request.

        This returns those whose prompts are whole, the rows of their next tokens, those tokens and
        what is told of them.
        """
        spans: list[Span] = []
        due: list[Request] = []
        rows: list[int] = []
        end = 0
        for request, count in chunks:
            session = request.session
            tokens = session.token_ids[session.stored : session.stored + count]
            spans.append(Span(session, request.params, request.seed, tokens))
            end += count
            if request.pending == count:
                due.append(request)
                rows.append(end - 1)
        return due, rows, *self._rows.launch(spans)

    def clear(self) -> None:
        """Upload all rows anew, since nobody knows what the device has of them."""
        self._rows.clear()
