"""Smallest example that reveals each of some planted bugs, counted by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutants.jobs import Outcome


class Size(NamedTuple):
    """Size of a history or a mix of requests."""

    steps: int
    """Steps of a history, or requests of a mix."""
    tokens: int
    """Tokens that steps write; of a mix, prompt tokens and most completion tokens."""

    def __str__(self) -> str:
        return f"{self.steps} of {self.tokens} tokens"

    @classmethod
    def parse(cls, text: str) -> Size:
        steps, _, tokens, _ = text.split()
        return cls(int(steps), int(tokens))


class Shortest(NamedTuple):
    bug: str
    size: Size
    """Smallest size: no example with fewer steps, or as many and fewer tokens, reveals the bug."""
    example: str
    """Example of that size, in words."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Failures that searches shrank, on bugs whose smallest example is known."""

    counted: Sequence[Shortest]
    outcomes: Sequence[Outcome]

    def of(self, bug: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.mutant == bug]

    def small_enough(self, outcome: Outcome) -> bool:
        (size,) = (each.size for each in self.counted if each.bug == outcome.mutant)
        return outcome.killed and Size.parse(outcome.message.partition("\n")[0]) <= size

    @property
    def smallest(self) -> list[str]:
        """Bugs whose failures every seed shrinks to the smallest size."""
        return [each.bug for each in self.counted if all(map(self.small_enough, self.of(each.bug)))]

    @property
    def nearly_all(self) -> bool:
        """True if these are nine in ten of the bugs."""
        return 10 * len(self.smallest) >= 9 * len(self.counted)


def _counted(bug: str, steps: int, tokens: int, example: str) -> Shortest:
    return Shortest(bug, Size(steps, tokens), example)


HISTORIES = (
    _counted("freed-twice", 3, 3, "one token; free it; two tokens in blocks of one"),
    _counted("last-block-never-used", 1, 2, "two tokens in a pool of two blocks of one"),
    _counted("recycled-block-forgets-start", 3, 3, "a token to 0 and 1; free 1; roll 0 over"),
    _counted("copy-on-write-keeps-its-reference", 3, 2, "one token; fork; one token to either"),
    _counted("copy-not-entered-in-the-table", 3, 2, "one token; fork; one token to either"),
    _counted("copied-the-wrong-way", 3, 2, "one token; fork; one token to either"),
    _counted("last-holder-copies-too", 3, 3, "one token; fork; one token to both"),
    _counted("second-holder-writes-in-place", 4, 3, "one token; fork; fork; one token to two"),
    _counted(
        "rollover-drops-the-full-block", 3, 2, "one token that fills a block; fork; roll over"
    ),
    _counted("tail-counted-too-high", 1, 2, "two tokens in a pool of two blocks of one"),
    _counted("tail-starts-too-early", 1, 2, "two tokens in blocks of one"),
    _counted("constant-by-first-two-rows", 1, 3, "one token to 0 and two to 1"),
    _counted("padding-needs-a-block", 1, 1, "one token and two rows of padding, two blocks"),
    _counted("padding-moves-other-rows", 2, 3, "one token to 0; one to 0, 1 and padding"),
    _counted("truncated-and-still-held", 2, 1, "one token; cut to none"),
    _counted("truncated-in-place-though-shared", 3, 2, "two tokens; fork; cut to one"),
    _counted("only-the-first-layer-copied", 3, 2, "two layers: one token; fork; one to either"),
    _counted("values-not-copied", 3, 2, "no Triton: one token; fork; one token to either"),
    _counted("keys-stored-as-values", 1, 1, "one token"),
    _counted("keeps-the-old-length", 3, 2, "one token; preempt; resume with it"),
    _counted("brings-back-one-layer", 5, 1, "two layers: one token; all four steps of a swap"),
    _counted("returns-a-token-too-many", 1, 1, "one token, in a window of one"),
    _counted("finds-a-partial-block", 2, 2, "two tokens in a block of two; free them"),
)
MIXES = (
    _counted("logits-of-the-first-token", 1, 3, "a prompt of two tokens gets one"),
    _counted("seed-of-the-row", 2, 4, "two prompts of a token get one each, the second sampled"),
    _counted(
        "parameters-of-an-earlier-batch", 2, 5, "a sampled request starts while another decodes"
    ),
    _counted(
        "preempted-and-not-requeued", 2, 6, "two prompts of a token get two each, room for three"
    ),
    _counted("ended-without-freeing", 1, 2, "a prompt of a token gets one"),
    _counted(
        "greedy-by-the-first-resident",
        2,
        6,
        "two prompts of a token get two each, the second sampled",
    ),
)
SHORTEST = HISTORIES + MIXES
