"""What a text must have in common with the one that its request gets alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.endpoint.text_stream import Streamed

_NEAR = 0.25
"""Where the log-probabilities of the two likeliest tokens lie nearer, rounding may choose the
other: between two logits of a dozen, in bfloat16, another batch moved the distance by 0.19."""
_COUNTED = ("prompt_tokens", "completion_tokens")
"""How much of a prompt was known before may differ."""


def broken_promise(stream: Streamed, alone: Streamed) -> str:
    """Say what is wrong with a stream that has ended; nothing is right."""
    if stream.error:
        return f"failed: {stream.error}"
    at = _parted(stream.text, alone.text)
    if at is not None:
        if near_tie(alone, at):
            return ""
        return f"got {stream.text!r}; alone it gets {alone.text!r}"
    if stream.finish_reason != alone.finish_reason:
        return f"ended by {stream.finish_reason!r}; alone by {alone.finish_reason!r}"
    counts = [(stream.usage.get(name), alone.usage.get(name)) for name in _COUNTED]
    if any(found != right for found, right in counts):
        return f"has the usage {stream.usage}; alone it has {alone.usage}"
    if stream.usage and stream.usage["total_tokens"] != sum(found or 0 for found, _ in counts):
        return f"has a usage that does not add up: {stream.usage}"
    return ""


def _parted(found: str, right: str) -> int | None:
    """Return the first character in which two texts differ; None if they are the same."""
    if found == right:
        return None
    pairs = enumerate(zip(found, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(found), len(right)))


def near_tie(alone: Streamed, at: int) -> bool:
    """Return True if the token that has a character was nearly another one.

    So it is with the token in front: two tokens may begin with the same characters.
    """
    begins, before = 0, float("inf")
    for token, gap in zip(alone.tokens, alone.gaps, strict=True):
        begins += len(token)
        if begins > at:
            return min(gap, before) < _NEAR
        before = gap
    return before < _NEAR
