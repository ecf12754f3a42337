"""The text of a request's tokens, up to a stop string if it has any."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from roseinfer.errors import BadArgument, UnsupportedModel
from roseinfer.text.decoder_chain import DecoderChain
from roseinfer.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.text.detokenizer import Decodes, DecodesInPieces

# Tries a tokenizer that decodes by code of its own: what comes in pieces must be the whole text.
#
# Nothing is known of such code. So it decodes some tokens drawn at random, and a tokenizer is
# refused where its text in pieces is another than that of all tokens at once.


_TEXTS = 48
_LENGTH = 24
_FIRST = 300
"""Bytes and punctuation are mostly among so many first tokens."""


def decodes_by_its_own_code(tokenizer: Any) -> bool:
    """Return whether more than the decoder that was saved with a tokenizer makes its texts."""
    usual, kind = PreTrainedTokenizerFast, type(tokenizer)
    names = ("decode", "_decode")
    return any(getattr(kind, name, None) is not getattr(usual, name) for name in names)


def require_agreement(tokenizer: Any, new_detokenizer: Callable[[], DecodesInPieces]) -> None:
    """Raise if a text that comes in pieces differs from the one that the tokenizer decodes."""
    draw = Random(0)
    for at in range(_TEXTS):
        below = min(len(tokenizer), _FIRST) if at % 2 else len(tokenizer)
        tokens = [draw.randrange(below) for _ in range(_LENGTH)]
        try:
            whole = tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            detokenizer = new_detokenizer()
            pieces = [*map(detokenizer.add, tokens), detokenizer.flush()]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise _refused(tokenizer, f"cannot decode tokens ({error})") from error
        if "".join(pieces) != whole:
            raise _refused(tokenizer, "decodes tokens otherwise when more follow")


def _refused(tokenizer: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer ({type(tokenizer).__name__}) {why}, so its texts cannot come in pieces: "
        "give another tokenizer, or a model without one and token ids"
    )


# Ends a text at the first stop string, wherever the text was cut into pieces.
#
# The stop strings form Aho and Corasick's automaton, which every character moves once: the cost is
# linear in the text, however it is cut and however alike the stop strings are.


_START = 0


class StopStrings:
    """Watches one text, which ends at the stop string that is complete first.

    Where several are complete at the same character, the longest counts, so that none of it is
    shown. One that began earlier but ends later cannot win: while the text grows, nobody knows
    whether it will ever be complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise BadArgument(
                f"stop strings are {stops!r}; they must be a list of texts, not empty"
            )
        # A state is the longest end of the text that begins a stop string. These have an item
        # for each state:
        self._longer: list[dict[str, int]] = [{}]
        """The characters that lead on, each with the state it leads to."""
        self._shorter = [_START]
        """The state of the next shorter end of the text that begins a stop string."""
        self._begun = [0]
        """How many characters of a stop string are there."""
        self._complete = [0]
        """The length of the longest stop string that ends there, or 0."""
        for stop in stops:
            self._add(stop)
        self._connect()
        self._state = _START
        self._held = ""
        self._met = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown by now, and whether a stop string ended it.

        Only what could be the beginning of a stop string is held back.
        """
        if self._met:
            return "", True
        before = len(self._held)
        self._held += text
        for at, character in enumerate(text, before + 1):
            self._state = self._after(self._state, character)
            if matched := self._complete[self._state]:
                shown = self._held[: at - matched]
                self._held, self._met = "", True
                return shown, True
        certain = len(self._held) - self._begun[self._state]
        shown, self._held = self._held[:certain], self._held[certain:]
        return shown, False

    def flush(self) -> str:
        """Return what was held back, now that the text has ended and completes no stop string."""
        self._state = _START
        shown, self._held = self._held, ""
        return shown

    def _after(self, state: int, character: str) -> int:
        while state != _START and character not in self._longer[state]:
            state = self._shorter[state]
        return self._longer[state].get(character, _START)

    def _add(self, stop: str) -> None:
        state = _START
        for length, character in enumerate(stop, 1):
            if character not in self._longer[state]:
                self._longer[state][character] = len(self._begun)
                self._longer.append({})
                self._shorter.append(_START)
                self._begun.append(length)
                self._complete.append(0)
            state = self._longer[state][character]
        self._complete[state] = len(stop)

    def _connect(self) -> None:
        """Give each state its next shorter one, which the states of shorter ends already have."""
        waiting = deque(self._longer[_START].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self._longer[state].items():
                shorter = self._after(self._shorter[state], character)
                self._shorter[longer] = shorter
                self._complete[longer] = self._complete[longer] or self._complete[shorter]
                waiting.append(longer)


def detokenizers(tokenizer: Decodes) -> Callable[[], DecodesInPieces]:
    """Return what makes a detokenizer for each text, and raise if none would decode it exactly."""
    make: Callable[[], DecodesInPieces] = partial(Detokenizer, tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        make = DecoderChain(tokenizer).detokenizer
    if decodes_by_its_own_code(tokenizer):
        require_agreement(tokenizer, make)
    return make


@dataclass(slots=True)
class RequestText:
    """A text that grows token by token. What was returned once never changes."""

    _new_detokenizer: Callable[[], DecodesInPieces]
    """Called when the first token comes."""
    _stops: StopStrings | None
    _detokenizer: DecodesInPieces | None = None
    _parts: list[str] = field(default_factory=list)

    @property
    def so_far(self) -> str:
        return "".join(self._parts)

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that became certain, and whether a stop string ended it."""
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer()
        text, stopped = self._detokenizer.add(token), False
        if self._stops:
            text, stopped = self._stops.feed(text)
        self._parts.append(text)
        return text, stopped

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text after the last token, and whether a stop string ended it."""
        if self._detokenizer is None:
            return "", False
        text, stopped = self._detokenizer.flush(), False
        if self._stops:
            text, stopped = self._stops.feed(text)
            if not stopped:
                text += self._stops.flush()
        self._parts.append(text)
        return text, stopped
