"""Holds the tokens that an engine generated to what transformers makes of the same texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sweep.outcome import Kind, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roseinfer import RequestOutput
    from tests.sweep.reference import Reference


@dataclass(frozen=True, slots=True)
class _Token:
    """One token of the engine's, beside a plain forward pass on all before it."""

    behind: int
    """How many tokens were before it."""
    token: int
    likeliest: int
    less_likely: float
    """How far its log-probability is below the likeliest token's."""
    apart: float
    """How far the log-probability that the engine said is from the reference's."""

    @property
    def off(self) -> float:
        return max(self.less_likely, self.apart)

    def __str__(self) -> str:
        return (
            f"behind {self.behind} tokens comes {self.token} instead of {self.likeliest}, which is "
            f"likelier by {self.less_likely:.2g}; its log-probability is off by {self.apart:.2g}"
        )


def compare(outputs: Sequence[RequestOutput], reference: Reference) -> Outcome:
    """Return whether plain forward passes agree with every token and log-probability."""
    found = [token for output in outputs for token in _tokens(output, reference)]
    worst = max(found, key=lambda token: token.off)
    if not worst.off <= reference.tolerance:
        return Outcome(Kind.WRONG, str(worst))
    apart = max(token.apart for token in found)
    return Outcome(Kind.AGREES, _of_generate(outputs, reference), apart)


def _tokens(output: RequestOutput, reference: Reference) -> Iterator[_Token]:
    tokens = [*output.prompt]
    for at, token in enumerate(output.token_ids):
        wanted = reference.logprobs(tokens)
        likely = float(wanted[token])
        said = output.logprobs[at] if output.logprobs else likely
        yield _Token(
            len(tokens),
            token,
            int(wanted.argmax()),
            float(wanted.max()) - likely,
            abs(said - likely),
        )
        tokens.append(token)


def _of_generate(outputs: Sequence[RequestOutput], reference: Reference) -> str:
    """Say where transformers disagrees with itself, since the engine agrees with the one side."""
    try:
        for output in outputs:
            if output.logprobs is None:
                continue  # its prompt is among the others
            if _differs(reference.generated([*output.prompt]), output, reference):
                return "its own `generate` differs from its plain forward pass"
    except Exception as error:  # of any kind, and none of ours
        return f"its own `generate` fails: {type(error).__name__}"
    return ""


def _differs(generated: list[int], output: RequestOutput, reference: Reference) -> bool:
    """Return True if plain forward passes make the first other token less likely."""
    text = [*output.prompt]
    for token, ours in zip(generated, output.token_ids, strict=True):
        if token != ours:
            wanted = reference.logprobs(text)
            return float(wanted.max() - wanted[token]) > reference.tolerance
        text.append(token)
    return False
