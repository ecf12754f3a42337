"""The smallest example that shows each of some planted bugs, counted by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutants.jobs import Outcome


class Size(NamedTuple):
    """How large a history or a mix of requests is."""

    steps: int
    """Of a mix, requests."""
    tokens: int
    """Those that its steps write; of a mix, prompts and what its requests may get."""

    def __str__(self) -> str:
        return f"{self.steps} of {self.tokens} tokens"

    @classmethod
    def said(cls, text: str) -> Size:
        steps, _, tokens, _ = text.split()
        return cls(int(steps), int(tokens))


class Shortest(NamedTuple):
    bug: str
    size: Size
    """Nothing with fewer steps, or as many and fewer tokens, shows the bug."""
    example: str
    """One of that size, in short."""


@dataclass(frozen=True, slots=True)
class Made:
    """What searches made of what failed on bugs whose smallest example is known."""

    known: Sequence[Shortest]
    outcomes: Sequence[Outcome]

    def of(self, bug: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.mutant == bug]

    def small_enough(self, outcome: Outcome) -> bool:
        (size,) = (each.size for each in self.known if each.bug == outcome.mutant)
        return outcome.killed and Size.said(outcome.what.partition("\n")[0]) <= size

    @property
    def as_small(self) -> list[str]:
        """The bugs whose failures are made as small as can be by every seed."""
        return [each.bug for each in self.known if all(map(self.small_enough, self.of(each.bug)))]

    @property
    def nearly_all(self) -> bool:
        """Nine in ten are."""
        return 10 * len(self.as_small) >= 9 * len(self.known)


def _known(bug: str, steps: int, tokens: int, example: str) -> Shortest:
    return Shortest(bug, Size(steps, tokens), example)


HISTORIES = (
    _known("freed-twice", 3, 3, "one token; free it; two tokens in blocks of one"),
    _known("last-block-never-used", 1, 2, "two tokens in a pool of two blocks of one"),
    _known("recycled-block-forgets-start", 3, 3, "a token to 0 and 1; free 1; roll 0 over"),
    _known("copy-on-write-keeps-its-hold", 3, 2, "one token; fork; one token to either"),
    _known("copy-not-entered-in-the-list", 3, 2, "one token; fork; one token to either"),
    _known("copied-the-wrong-way", 3, 2, "one token; fork; one token to either"),
    _known("last-sharer-copies-too", 3, 3, "one token; fork; one token to both"),
    _known("second-sharer-writes-in-place", 4, 3, "one token; fork; fork; one token to two"),
    _known("rollover-drops-the-full-block", 3, 2, "one token that fills a block; fork; roll over"),
    _known("tail-counted-too-high", 1, 2, "two tokens in a pool of two blocks of one"),
    _known("tail-starts-too-early", 1, 2, "two tokens in blocks of one"),
    _known("constant-by-first-neighbours", 1, 3, "one token to 0 and two to 1"),
    _known("padding-needs-a-block", 1, 1, "one token and two rows of padding, two blocks"),
    _known("padding-moves-the-others", 2, 3, "one token to 0; one to 0, 1 and padding"),
    _known("truncated-and-still-held", 2, 1, "one token; cut to none"),
    _known("truncated-in-place-though-shared", 3, 2, "two tokens; fork; cut to one"),
    _known("only-the-first-layer-copied", 3, 2, "two layers: one token; fork; one to either"),
    _known("values-not-copied", 3, 2, "no Triton: one token; fork; one token to either"),
    _known("keys-stored-as-values", 1, 1, "one token"),
    _known("keeps-the-old-length", 3, 2, "one token; preempt; resume with it"),
    _known("brings-back-one-layer", 5, 1, "two layers: one token; all four steps of a swap"),
    _known("returns-a-token-too-many", 1, 1, "one token, in a window of one"),
    _known("finds-a-partial-block", 2, 2, "two tokens in a block of two; free them"),
)
MIXES = (
    _known("logits-of-the-first-token", 1, 3, "a prompt of two tokens gets one"),
    _known("seed-of-the-row", 2, 4, "two prompts of a token get one each, the second drawn"),
    _known("parameters-of-an-earlier-batch", 2, 5, "one begins, drawn, while another goes on"),
    _known("preempted-and-forgotten", 2, 6, "two prompts of a token get two each, room for three"),
    _known("ended-with-its-blocks", 1, 2, "a prompt of a token gets one"),
    _known("greedy-as-the-first-is", 2, 6, "two prompts of a token get two each, the second drawn"),
)
SHORTEST = HISTORIES + MIXES
