"""Completion text: incremental detokenization up to a stop string."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from roseinfer.errors import BadArgument, UnsupportedModel
from roseinfer.text.decoder_chain import DecoderChain
from roseinfer.text.detokenizer import TextMayChange, WholeTextDetokenizer, WindowDetokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.text.detokenizer import IncrementalDetokenizer, TokenDecoder

# Check of tokenizers with their own decoding code.
#
# Such code may do anything. So it decodes some random tokens, and texts are returned at their end
# alone if the incremental text differs from that of all tokens at once.


_TEXTS = 48
_LENGTH = 24
_FIRST = 300
"""Number of first token ids, among which most bytes and punctuation are."""


def has_custom_decode(tokenizer: Any) -> bool:
    """Return True if a tokenizer decodes by code other than its saved decoder."""
    default_decode, kind = PreTrainedTokenizerFast, type(tokenizer)
    names = ("decode", "_decode")
    return any(getattr(kind, name, None) is not getattr(default_decode, name) for name in names)


def require_incremental_decode(
    tokenizer: Any, new_detokenizer: Callable[[], IncrementalDetokenizer]
) -> None:
    """Raise ``TextMayChange`` if incremental text differs from the text of all tokens at once."""
    draw = Random(0)
    for at in range(_TEXTS):
        below = min(len(tokenizer), _FIRST) if at % 2 else len(tokenizer)
        tokens = [draw.randrange(below) for _ in range(_LENGTH)]
        try:
            full_text = tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            detokenizer = new_detokenizer()
            texts = [*map(detokenizer.add, tokens), detokenizer.flush()]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise UnsupportedModel(
                f"the tokenizer ({type(tokenizer).__name__}) cannot decode tokens ({error}): give "
                "another tokenizer, or a model without one and token ids"
            ) from error
        if "".join(texts) != full_text:
            raise TextMayChange(
                f"the tokenizer ({type(tokenizer).__name__}) decodes tokens otherwise when more "
                "follow"
            )


# Stop strings, which may be split over several pieces of the text.
#
# They form an Aho-Corasick automaton, with one transition for each character: the cost is linear in
# the length of the text, however it is split and however similar the stop strings are.


_START = 0


class StopStringMatcher:
    """A matcher for one text, which ends at the stop string that is complete first.

    If several are complete at the same character, the longest counts, so that no part of it is
    returned. One that began earlier but ends later does not count: while the text grows, it is
    unknown if it will ever be complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise BadArgument(
                f"stop strings are {stops!r}; they must be a list of texts, not empty"
            )
        # A state is the longest suffix of the text that is a prefix of a stop string. These lists
        # have an item for each state:
        self._transitions: list[dict[str, int]] = [{}]
        """Next state by next character."""
        self._suffix_state = [_START]
        """State of the next shorter suffix that is a prefix of a stop string."""
        self._match_length = [0]
        """Number of characters in the suffix."""
        self._matched_stop_length = [0]
        """Length of the longest stop string that ends in this state, or 0."""
        for stop in stops:
            self._add(stop)
        self._connect()
        self._state = _START
        self._held_text = ""
        self._is_stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text; return the part that is final now, and True if a stop string ended it.

        Only text that could be the prefix of a stop string is held back.
        """
        if self._is_stopped:
            return "", True
        before = len(self._held_text)
        self._held_text += text
        for at, character in enumerate(text, before + 1):
            self._state = self._next_state(self._state, character)
            if matched := self._matched_stop_length[self._state]:
                shown = self._held_text[: at - matched]
                self._held_text, self._is_stopped = "", True
                return shown, True
        certain = len(self._held_text) - self._match_length[self._state]
        shown, self._held_text = self._held_text[:certain], self._held_text[certain:]
        return shown, False

    def flush(self) -> str:
        """Return the text held back, after the end of a text without a stop string."""
        self._state = _START
        shown, self._held_text = self._held_text, ""
        return shown

    def _next_state(self, state: int, character: str) -> int:
        while state != _START and character not in self._transitions[state]:
            state = self._suffix_state[state]
        return self._transitions[state].get(character, _START)

    def _add(self, stop: str) -> None:
        state = _START
        for length, character in enumerate(stop, 1):
            if character not in self._transitions[state]:
                self._transitions[state][character] = len(self._match_length)
                self._transitions.append({})
                self._suffix_state.append(_START)
                self._match_length.append(length)
                self._matched_stop_length.append(0)
            state = self._transitions[state][character]
        self._matched_stop_length[state] = len(stop)

    def _connect(self) -> None:
        """Set the suffix state of each state, shorter suffixes first."""
        waiting = deque(self._transitions[_START].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self._transitions[state].items():
                shorter = self._next_state(self._suffix_state[state], character)
                self._suffix_state[longer] = shorter
                self._matched_stop_length[longer] = (
                    self._matched_stop_length[longer] or self._matched_stop_length[shorter]
                )
                waiting.append(longer)


def new_detokenizer_factory(
    tokenizer: TokenDecoder, report: Callable[[str], None] = lambda _: None
) -> Callable[[], IncrementalDetokenizer]:
    """Return a factory of detokenizers.

    Where a later token may change all of a text, they return it at its end. ``report`` gets the
    reason then.
    """
    make: Callable[[], IncrementalDetokenizer] = partial(WindowDetokenizer, tokenizer)
    try:
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            make = DecoderChain(tokenizer).detokenizer
        if has_custom_decode(tokenizer):
            require_incremental_decode(tokenizer, make)
    except TextMayChange as reason:
        report(f"texts are shown, and searched for stop strings, at their end alone: {reason}")
        return partial(WholeTextDetokenizer, tokenizer)
    return make


@dataclass(slots=True)
class CompletionText:
    """A text that grows token by token. Text that was returned never changes."""

    _new_detokenizer: Callable[[], IncrementalDetokenizer]
    """Factory of the detokenizer, called at the first token."""
    _stops: StopStringMatcher | None
    _detokenizer: IncrementalDetokenizer | None = None
    _parts: list[str] = field(default_factory=list)

    @property
    def text_so_far(self) -> str:
        return "".join(self._parts)

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that became final, and True if a stop string ended it."""
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer()
        text, stopped = self._detokenizer.add(token), False
        if self._stops:
            text, stopped = self._stops.feed(text)
        self._parts.append(text)
        return text, stopped

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text after the last token, and True if a stop string ended it."""
        if self._detokenizer is None:
            return "", False
        text, stopped = self._detokenizer.flush(), False
        if self._stops:
            text, stopped = self._stops.feed(text)
            if not stopped:
                text += self._stops.flush()
        self._parts.append(text)
        return text, stopped
