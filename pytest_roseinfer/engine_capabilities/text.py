"""Text: the pieces that an engine streams, and stop strings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.capabilities.return_values import is_text, list_of, returns
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    RequestCore,
    SamplingCore,
    change,
)
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest
else:
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True)
class StopFields(SamplingCore):
    """Parameter of stop strings."""

    stop: tuple[str, ...] = ()
    """Strings that end the request; its text ends where the first one to be complete begins."""


@dataclass(frozen=True, kw_only=True)
class StopSpanFields(RequestCore):
    """Stop strings of a request, before they are settled."""

    stop_spans: tuple[tuple[int, int], ...] = ()
    """Stop strings, as spans of the text that the request gets without any: pairs of a first
    character and a length. A span past the end of the text makes a string that never occurs."""


class TextMethods:
    """Adapter methods for text."""

    @optional
    @returns(list_of(is_text), "a list of texts")
    def pieces(self, request: Any) -> Sequence[str]:
        """Return the pieces of text that the engine has streamed so far; some may be empty.

        With this method, some requests get stop strings, taken from the text that they get without
        any.
        """

    @optional
    @returns(is_text, "a text")
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens of a completion, by the tokenizer alone."""


# Expected text, decoded from all tokens at once, and stop strings


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders write for an incomplete UTF-8 sequence."""
FLUSHED = "ended_by_flushed_stop_string"
"""Condition for whose sake a stop string may end with an incomplete character: an adapter names it
in ``conditions`` if its engine finds stop strings in the text that is flushed at the end."""
_NEVER = "\N{NULL}"
"""Character that no text contains."""


def stop_strings(
    spec: StopSpanFields, text: str, earlier_texts: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the stop strings of a request whose text without any is ``text``.

    A span past the end of the text makes a string that begins like the text and never occurs.
    ``earlier_texts`` are those of fewer tokens. With them a string may end with an incomplete
    character at the end of the text, unless an earlier text has that string too: later tokens could
    complete that character.
    """
    strings = []
    for begins, length in spec.stop_spans:
        at = begins % len(text) if text else 0
        inside = text[at : at + length]
        strings.append(inside if len(inside) == length else inside + _NEVER)
    return tuple(
        each
        for each in strings
        if INCOMPLETE not in each
        or (
            earlier_texts is not None
            and INCOMPLETE not in each[:-1]
            and text.endswith(each)
            and not any(each in earlier for earlier in earlier_texts)
        )
    )


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return the span of the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [len(each) for each in stops if text[:end].endswith(each)]
        if complete:
            return end - max(complete), end
    return None


def cut_text(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the stop string that ends it; all of it if none occurs."""
    span = find_stop(text, stops)
    return text[: span[0]] if span else text


def cut_tokens(
    tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return the tokens up to the one that completes a stop string; all if none does."""
    counts = range(1, len(tokens) + 1)
    enough = (n for n in counts if stops and find_stop(decode(tokens[:n]), stops))
    return list(tokens[: next(enough, len(tokens))])


def is_certain(adapter: Any, tokens: Sequence[int], span: tuple[int, int]) -> bool:
    """Return True if no later token could change the text up to the end of a span."""
    return span[1] <= len(adapter.decode(tokens).rstrip(INCOMPLETE))


class ShownText(MixObserver):
    """Judge of streamed text: joined pieces must equal the decoded tokens, and none may change."""

    any_of = ("pieces",)

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._pieces: dict[int, list[str]] = {}
        """Pieces of each request after the latest step, by its number."""

    def judge(self, served: ServedRequest) -> str:
        certain = served.finished or served.near_tie_index is not None
        text = self.run.adapter.decode(served.tokens if certain else served.expected)
        before = self._pieces.get(served.number, [])
        pieces = self._pieces[served.number] = list(self.run.adapter.pieces(served.request))
        if pieces[: len(before)] != before:
            return f"{served.name} had shown the pieces {before}, and now {pieces}"
        actual, right = "".join(pieces), cut_text(text, served.spec.sampling.stop)
        is_whole = served.finished and not served.cancelled
        if actual == right or (not is_whole and right.startswith(actual)):
            return ""
        return f"{served.name} shows {actual!r}; its tokens decode to {right!r}"


def draw_stop_spans(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    """Draw stop spans for some requests of an adapter class with ``pieces``."""
    if not (adapter.defines("pieces") and draw(st.sampled_from((False, False, True)))):
        return spec
    begin, length = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    spans = draw(
        st.sampled_from(
            (
                [(begin, length)],
                [(begin, length), (begin // 2, 1)],
                [(0, length)],
                # The second is inside the first, at its end, in its middle or at its start.
                [(begin, length + 2), (begin + 1, length)],
                [(begin, length + 1), (begin + 1, length)],
                [(begin, length + 1), (begin, length)],
                # The end of the text, which may be an incomplete character.
                [(-1, 1)],
                [(-length, length)],
            )
        )
    )
    return change(spec, stop_spans=tuple(spans))


def describe(spec: Any) -> Iterator[str]:
    """Describe the stop strings of a request."""
    for text in spec.sampling.stop:
        yield f"stopped by {text!r}"
    for begins, length in spec.stop_spans:
        yield f"stopped by {format_count(length, 'character')} of its text, from {begins} on"


def settle_stop(
    adapter: Any,
    spec: Any,
    expected: list[int],
    mix: Any,  # noqa: ARG001
) -> tuple[Any, list[int]]:
    """Turn stop spans into strings from the text of the slow twin, and cut its tokens there.

    For an adapter with the condition ``FLUSHED``, a request with a span of the end of the text gets
    its tokens up to the first incomplete character.
    """
    if spec.stop_spans and adapter.defines("pieces"):
        earlier_texts = None
        if FLUSHED in adapter.conditions and min(spec.stop_spans)[0] < 0:
            texts = [adapter.decode(expected[:end]) for end in range(1, len(expected) + 1)]
            ends = (at for at, text in enumerate(texts, 1) if text.endswith(INCOMPLETE))
            if (end := next(ends, None)) is not None:
                spec, expected = change(spec, max_new_tokens=end), expected[:end]
                earlier_texts = texts[: end - 1]
        stops = stop_strings(spec, adapter.decode(expected), earlier_texts)
        spec, expected = change(spec, stop=stops), cut_tokens(expected, stops, adapter.decode)
    return change(spec, stop_spans=()), expected


TEXT_OUTPUT = EngineCapability(
    methods=TextMethods,
    renamed={"decoded": "decode(tokens)"},
    needs={"pieces": ("decode",)},
    fields=(StopFields, StopSpanFields),
    draw=draw_stop_spans,
    describe=describe,
    settle=settle_stop,
    observers=(ShownText,),
)
