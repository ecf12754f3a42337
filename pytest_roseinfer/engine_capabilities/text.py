"""Text: the pieces that are shown of it as tokens come, and stop strings that end it."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.answers import is_text, list_of, returns
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    RequestCore,
    SamplingCore,
    change,
)
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest
else:
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True)
class StopFields(SamplingCore):
    """The strings that end a request."""

    stop: tuple[str, ...] = ()
    """Strings that end the request; its text ends where the first complete one begins."""


@dataclass(frozen=True, kw_only=True)
class StopSpanFields(RequestCore):
    """The stop strings of a request, as parts of the text that it gets without any."""

    stop_spans: tuple[tuple[int, int], ...] = ()
    """Stop strings, as parts of the text that the request gets without any: pairs of a first
    character and a length. One that goes beyond the end of the text is never complete."""


class TextMethods:
    """The methods that show text."""

    @optional
    @returns(list_of(is_text), "a list of texts")
    def pieces(self, request: Any) -> Sequence[str]:
        """Return the pieces of text that the engine has shown by now. Some may be empty.

        Some requests then get stop strings, out of the text that they get without.
        """

    @optional
    @returns(is_text, "a text")
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a whole request's tokens, by the tokenizer alone."""


# The text that a request must show, from its tokens decoded together and its stop strings.


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders write where bytes of one are missing."""
_NEVER = "\N{NULL}"
"""No text goes on with this character."""


def stop_strings(spec: StopSpanFields, text: str) -> tuple[str, ...]:
    """Return the request's stop strings, given its text without any.

    One that would go beyond the end begins like the text and never becomes complete.
    """
    found = []
    for begins, length in spec.stop_spans:
        at = begins % len(text) if text else 0
        inside = text[at : at + length]
        found.append(inside if len(inside) == length else inside + _NEVER)
    return tuple(each for each in found if INCOMPLETE not in each)


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return where the stop string begins and ends that is complete first, the longest of these."""
    for end in range(1, len(text) + 1):
        complete = [len(each) for each in stops if text[:end].endswith(each)]
        if complete:
            return end - max(complete), end
    return None


def cut_text(text: str, stops: Sequence[str]) -> str:
    """Return a whole text up to the stop string that ends it, if one does."""
    found = find_stop(text, stops)
    return text[: found[0]] if found else text


def cut_tokens(
    tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return the tokens up to the one that completes a stop string."""
    counts = range(1, len(tokens) + 1)
    enough = (n for n in counts if stops and find_stop(decode(tokens[:n]), stops))
    return list(tokens[: next(enough, len(tokens))])


class ShownText(MixObserver):
    """Holds the pieces of a text, joined, to its tokens, and lets none be taken back."""

    any_of = ("pieces",)

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._pieces: dict[int, list[str]] = {}
        """Pieces of each request when it was last looked at, by its number."""

    def judge(self, served: ServedRequest) -> str:
        certain = served.finished or served.tied is not None
        text = self.run.adapter.decode(served.tokens if certain else served.expected)
        before = self._pieces.get(served.number, [])
        pieces = self._pieces[served.number] = list(self.run.adapter.pieces(served.request))
        if pieces[: len(before)] != before:
            return f"{served.name} had shown the pieces {before}, and now {pieces}"
        found, right = "".join(pieces), cut_text(text, served.spec.sampling.stop)
        is_whole = served.finished and not served.cancelled
        if found == right or (not is_whole and right.startswith(found)):
            return ""
        return f"{served.name} shows {found!r}; its tokens decode to {right!r}"


def draw_stop_spans(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    if not (adapter.defines("pieces") and draw(st.sampled_from((False, False, False, True)))):
        return spec
    span = st.tuples(st.integers(0, 12), st.integers(1, 4))
    return change(spec, stop_spans=tuple(draw(st.lists(span, min_size=1, max_size=2))))


def words(spec: Any) -> Iterator[str]:
    for text in spec.sampling.stop:
        yield f"stopped by {text!r}"
    for begins, length in spec.stop_spans:
        yield f"stopped by {some(length, 'character')} of its text, from {begins} on"


def settle_stop(
    adapter: Any,
    spec: Any,
    expected: list[int],
    mix: Any,  # noqa: ARG001
) -> tuple[Any, list[int]]:
    """Make stop strings of the text that a request gets alone, and end it there."""
    if spec.stop_spans and adapter.defines("pieces"):
        stops = stop_strings(spec, adapter.decode(expected))
        spec, expected = change(spec, stop=stops), cut_tokens(expected, stops, adapter.decode)
    return change(spec, stop_spans=()), expected


TEXT_OUTPUT = EngineCapability(
    methods=TextMethods,
    renamed={"decoded": "decode(tokens)"},
    needs={"pieces": ("decode",)},
    fields=(StopFields, StopSpanFields),
    draw=draw_stop_spans,
    words=words,
    settle=settle_stop,
    observers=(ShownText,),
)
