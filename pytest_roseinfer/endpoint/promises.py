"""What a text must have in common with the one that its request gets alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.endpoint.text_stream import Streamed

_NEAR = 0.25
"""Where the log-probabilities of the two likeliest tokens lie nearer, rounding may choose the
other: between two logits of a dozen, in bfloat16, another batch moved the distance by 0.19."""
_MOST = 400
"""A longer text is not shown whole, but so many characters of it around where it parts."""
_COUNTED = ("prompt_tokens", "completion_tokens")
"""How much of a prompt was known before may differ."""


def broken_promise(stream: Streamed, alone: Streamed) -> str:
    """Say what is wrong with a stream that has ended; nothing is right."""
    if stream.error:
        return f"failed: {stream.error}, behind {_around(stream.text, len(stream.text))}"
    at = _parted(stream.text, alone.text)
    if at is not None:
        if near_tie(alone, at):
            return ""
        got, right = _around(stream.text, at), _around(alone.text, at)
        return f"parts at character {at} from what it gets alone: got {got}; alone it gets {right}"
    if stream.finish_reason != alone.finish_reason:
        return f"ended by {stream.finish_reason!r}; alone by {alone.finish_reason!r}"
    counts = [(stream.usage.get(name), alone.usage.get(name)) for name in _COUNTED]
    if any(found != right for found, right in counts):
        return f"has the usage {stream.usage}; alone it has {alone.usage}"
    if stream.usage and stream.usage["total_tokens"] != sum(found or 0 for found, _ in counts):
        return f"has a usage that does not add up: {stream.usage}"
    return ""


def goes_wrong(begun: str, alone: Streamed) -> bool:
    """Return True if a text that goes on is no longer what its request gets alone."""
    at = _parted(begun, alone.text[: len(begun)])
    return at is not None and not near_tie(alone, at)


def _around(text: str, at: int) -> str:
    if len(text) <= _MOST:
        return repr(text)
    begin = max(0, at - _MOST // 2)
    shown = text[begin : begin + _MOST]
    return f"{shown!r} (from character {begin} on, of {len(text)})"


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
