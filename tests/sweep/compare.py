"""Comparison of an engine's tokens with transformers on the same texts."""

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
    """Token of the engine, compared with a plain forward pass on its prefix."""

    prefix_length: int
    """Number of tokens before it."""
    token: int
    argmax: int
    margin: float
    """Log-probability of the argmax minus that of the token."""
    difference: float
    """Absolute difference of the engine's log-probability from the reference's."""

    @property
    def off(self) -> float:
        return max(self.margin, self.difference)

    def __str__(self) -> str:
        return (
            f"after {self.prefix_length} tokens, {self.token} instead of {self.argmax}, which has "
            f"{self.margin:.2g} more log-probability; its log-probability is off by "
            f"{self.difference:.2g}"
        )


def compare(outputs: Sequence[RequestOutput], reference: Reference) -> Outcome:
    """Return whether plain forward passes agree with every token and log-probability."""
    tokens = [token for output in outputs for token in _tokens(output, reference)]
    worst = max(tokens, key=lambda token: token.off)
    if not worst.off <= reference.tolerance:
        return Outcome(Kind.WRONG, str(worst))
    difference = max(token.difference for token in tokens)
    return Outcome(Kind.AGREES, _generate_differences(outputs, reference), difference)


def _tokens(output: RequestOutput, reference: Reference) -> Iterator[_Token]:
    tokens = [*output.prompt]
    for at, token in enumerate(output.token_ids):
        logprobs = reference.logprobs(tokens)
        expected = float(logprobs[token])
        actual = output.logprobs[at] if output.logprobs else expected
        yield _Token(
            len(tokens),
            token,
            int(logprobs.argmax()),
            float(logprobs.max()) - expected,
            abs(actual - expected),
        )
        tokens.append(token)


def _generate_differences(outputs: Sequence[RequestOutput], reference: Reference) -> str:
    """Return how transformers' ``generate`` differs from its forward pass; empty if it does not."""
    try:
        for output in outputs:
            if output.logprobs is None:
                continue  # its prompt was compared before
            if _differs(reference.generated([*output.prompt]), output, reference):
                return "its own `generate` differs from its plain forward pass"
    except Exception as error:  # of any type, from transformers
        return f"its own `generate` fails: {type(error).__name__}"
    return ""


def _differs(generated: list[int], output: RequestOutput, reference: Reference) -> bool:
    """Return True if the first different token has a lower log-probability in a forward pass."""
    text = [*output.prompt]
    for token, ours in zip(generated, output.token_ids, strict=True):
        if token != ours:
            logprobs = reference.logprobs(text)
            return float(logprobs.max() - logprobs[token]) > reference.tolerance
        text.append(token)
    return False
