"""What text a request must show, from its tokens decoded together and its stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_roseinfer.adapters.mix import Asked

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for a character of which bytes are missing."""
_NEVER = "\N{NULL}"
"""No text goes on with this character."""


def stop_strings(asked: Asked, text: str) -> tuple[str, ...]:
    """Return the request's stop strings, given its text without any.

    One that would go beyond the end begins like the text and never becomes complete.
    """
    found = []
    for begins, length in asked.stops:
        at = begins % len(text) if text else 0
        inside = text[at : at + length]
        found.append(inside if len(inside) == length else inside + _NEVER)
    return tuple(each for each in found if INCOMPLETE not in each)


def stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return where the stop string begins and ends that is complete first, the longest of these."""
    for end in range(1, len(text) + 1):
        complete = [len(each) for each in stops if text[:end].endswith(each)]
        if complete:
            return end - max(complete), end
    return None


def shown(text: str, stops: Sequence[str]) -> str:
    """Return a whole text up to the stop string that ends it, if one does."""
    found = stop(text, stops)
    return text[: found[0]] if found else text


def up_to_stop(
    tokens: Sequence[int], stops: Sequence[str], decoded: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return the tokens up to the one that completes a stop string."""
    counts = range(1, len(tokens) + 1)
    enough = (n for n in counts if stops and stop(decoded(tokens[:n]), stops))
    return list(tokens[: next(enough, len(tokens))])
