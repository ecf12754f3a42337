"""Texts of sequences, for caches with prefix reuse: their shared prefixes and these lengths.

A text is infinite; a sequence holds a prefix of one. Texts branch off each other like a tree, so
that equality of two prefixes is known without a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_roseinfer.oracle.pages import EPOCHS, text_place, text_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_roseinfer.oracle.pages import TextPlace

# Keys of texts


KeyValue = str | int | None
"""Value of a part of a key; None for a request without that part."""


class KeySpan(NamedTuple):
    """A part of a text's key that applies to some consecutive tokens, such as an image.

    Their token ids are placeholders, which are equal whatever the value is.
    """

    part: str
    begin: int
    """Position of its first token."""
    end: int
    """Position after its last token."""
    value: KeyValue


class KeyDifference(NamedTuple):
    """A part in which two keys differ."""

    part: str
    position: int
    """Position of the first token that it changes."""
    values: tuple[KeyValue, KeyValue]

    def __str__(self) -> str:
        place = f" at token {self.position}" if self.position else ""
        return f"{self.part}{place}: {self.values[0]!r} and {self.values[1]!r}"


@dataclass(frozen=True)
class TextKey:
    """Named parts of a text in addition to its token ids, such as an adapter and a salt.

    Two texts of equal token ids have different keys and values from the first token on to which a
    part applies that differs.
    """

    parts: Mapping[str, KeyValue] = field(default_factory=dict)
    """Values that apply to the whole text, by the name of the part."""
    spans: Sequence[KeySpan] = ()
    """Parts that apply to some tokens, in the order of their positions."""

    def up_to(self, end: int) -> TextKey:
        """Return the key of the first ``end`` tokens, with the spans that begin there."""
        return replace(self, spans=tuple(each for each in self.spans if each.begin < end))

    def describe(self) -> str:
        """Describe the parts that it has, as in "adapter 'a', salt 'b'"."""
        words = [f"{name} {value!r}" for name, value in self.parts.items() if value is not None]
        words += [
            f"{span.part} {span.value!r} at tokens {span.begin} to {span.end - 1}"
            for span in self.spans
        ]
        return ", ".join(words) or "no key"

    def differences(self, other: TextKey) -> list[KeyDifference]:
        """List the parts in which it differs from another key, in the order of their positions."""
        wholes, others = self._values(), other._values()
        names = dict.fromkeys(chain(wholes, others))
        pairs = {name: (wholes.get(name), others.get(name)) for name in names}
        differ = [KeyDifference(*name, pair) for name, pair in pairs.items() if pair[0] != pair[1]]
        return sorted(differ, key=lambda each: each.position)

    def _values(self) -> dict[tuple[str, int], KeyValue]:
        """Return the values by part and position of the first token to which they apply."""
        spans = {(span.part, span.begin): span.value for span in self.spans}
        return {(name, 0): value for name, value in self.parts.items()} | spans


# Texts


Branch = tuple[int, int] | tuple[int, int, int] | tuple[int, int, TextKey]
"""The parent of a text, the length of the prefix that it shares with it, and its key.

The first text is its own parent. A key may be a number, the namespace of a cache without parts of
keys; it is 0 if it is left out. Texts with different keys may have equal token ids, but they have
different keys and values.
"""
WHOLE = 1 << 16
"""Length of a shared prefix that makes two texts equal: more tokens than any sequence has."""
_COMMON = 1
"""Token id of all tokens but the first one after a branch."""


class TextSlice(NamedTuple):
    """Token ids of one row of a write, or of a lookup."""

    tokens: list[int]
    namespace: int
    """Namespace of its first token."""
    key: TextKey | None = None
    """Key of the text up to the end of the row; None for a cache without parts of keys."""


def duplicate_in_namespaces(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """Insert a copy in another namespace after each text."""
    both: list[Branch] = []
    for text, (parent, length, *_) in enumerate(branches):
        both += [(2 * parent, length), (2 * text, WHOLE, 1)]
    return tuple(both)


def repeat_with_keys(branches: tuple[Branch, ...], keys: Sequence[TextKey]) -> tuple[Branch, ...]:
    """Replace each text by texts of equal token ids, one with each key.

    A text that branches off within a span does so after it, since the token ids there are equal.
    """
    every: list[Branch] = []
    for text, (parent, length, *_) in enumerate(branches):
        every.append((len(keys) * parent, _after_spans(length, keys), keys[0]))
        every += [(len(keys) * text, WHOLE, key) for key in keys[1:]]
    return tuple(every)


def _after_spans(position: int, keys: Iterable[TextKey]) -> int:
    """Return the first position from ``position`` on that lies in no span."""
    for span in sorted(chain.from_iterable(key.spans for key in keys), key=lambda each: each.begin):
        if span.begin <= position < span.end:
            position = span.end
    return position


def branch_from_json(parent: int, length: int, *key: Any) -> Branch:
    """Return the branch that ``branch_to_json`` has encoded."""
    if key and isinstance(key[0], Mapping):
        spans = tuple(KeySpan(*span) for span in key[0]["spans"])
        return parent, length, TextKey(key[0]["parts"], spans)
    return (parent, length, *key)


def branch_to_json(branch: Branch) -> list[Any]:
    return [asdict(each) if isinstance(each, TextKey) else each for each in branch]


@dataclass(slots=True)
class Texts:
    """The texts of one history, and the branches that forks add to them."""

    initial_branches: tuple[Branch, ...]
    _branches: list[tuple[int, int]] = field(init=False)
    _keys: list[TextKey | int] = field(init=False)
    """Key of each text, as in ``Branch``."""
    _namespaces: list[Sequence[tuple[int, int]]] = field(init=False)
    """Namespaces of each text, and the first position of each, the last one first."""
    _keys_of_namespaces: list[TextKey] = field(default_factory=list, init=False)
    """Key of the tokens in each namespace; empty for a cache without parts of keys."""
    _forked: dict[int, int] = field(default_factory=dict, init=False)
    """Texts of the sequences that began as forks."""
    epoch: int = field(default=0, init=False)
    """Number of times that equal token ids have got other keys and values."""
    _epochs: list[int | None] = field(init=False)
    """Epoch of each text, as in ``TextPlace``; None for the present one, whichever that is."""
    _mixtures: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    """Epoch of texts with tokens of several epochs, by their epoch before the latest one, and the
    number of tokens from before it."""
    _tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False)
    """First tokens of each text in each epoch, as far as they were needed."""

    def __post_init__(self) -> None:
        self._branches = [(parent, length) for parent, length, *_ in self.initial_branches]
        self._keys = [[*key, 0][0] for _, _, *key in self.initial_branches]
        self._namespaces = [*map(self._number, self._keys)]
        self._epochs = [None] * len(self._branches)

    def _number(self, key: TextKey | int) -> Sequence[tuple[int, int]]:
        """Return the namespaces of a text: one up to its first span, and one from each span on."""
        if not isinstance(key, TextKey):
            return [(0, key)]
        numbers = []
        for spans in range(len(key.spans) + 1):
            begun = replace(key, spans=key.spans[:spans])
            known = (
                number
                for number, other in enumerate(self._keys_of_namespaces)
                if not begun.differences(other)
            )
            number = next(known, len(self._keys_of_namespaces))
            if number == len(self._keys_of_namespaces):
                self._keys_of_namespaces.append(begun)
            numbers.append((begun.spans[-1].begin if spans else 0, number))
        return numbers[::-1]

    def of(self, seq: int, life: int) -> int:
        """Return the text of a sequence whose name had ``life`` earlier sequences."""
        return self._forked.get(seq, (seq + life) % len(self.initial_branches))

    def fork(self, parent: int, child: int, length: int) -> None:
        """Give the sequence ``child`` a new text that branches off the text ``parent``."""
        self.assign(child, self.branch(parent, length))

    def branch(self, parent: int, length: int) -> int:
        """Add a text that branches off the text ``parent``, and return its number.

        Within a span, it does so after it.
        """
        key = self._keys[parent]
        if isinstance(key, TextKey):
            length = _after_spans(length, [key])
        return self._add(parent, length, self._epochs[parent])

    def _branch_off(self, parent: int, child: int, length: int, epoch: int | None) -> None:
        self.assign(child, self._add(parent, length, epoch))

    def _add(self, parent: int, length: int, epoch: int | None) -> int:
        self._branches.append((parent, length))
        self._keys.append(self._keys[parent])
        self._namespaces.append(self._namespaces[parent])
        self._epochs.append(epoch)
        return len(self._branches) - 1

    def assign(self, seq: int, text: int) -> None:
        """Give a sequence a text that exists."""
        self._forked[seq] = text

    def copied(self) -> Texts:
        """Return a copy, whose new texts this one does not get."""
        other = copy(self)
        for name in ("_branches", "_keys", "_namespaces", "_epochs", "_forked"):
            setattr(other, name, copy(getattr(self, name)))
        other._tokens = {}
        return other

    def forget(self, seq: int) -> None:
        """Forget the text of a sequence that began as a fork."""
        self._forked.pop(seq, None)

    def begin_epoch(self, stored: Mapping[int, tuple[int, int]]) -> None:
        """Begin an epoch: from now on, equal token ids have other keys and values.

        ``stored`` has the text of each sequence that keeps its tokens, and their number. Its later
        tokens depend on them: they equal those of a sequence that keeps equal ones, and no others.
        """
        mixtures = {seq: (self.epoch_of(text), length) for seq, (text, length) in stored.items()}
        self.epoch += 1
        for seq, mixture in mixtures.items():
            number = len(self._mixtures) + 1
            epoch = self._mixtures.setdefault(mixture, number * EPOCHS + self.epoch)
            self._branch_off(stored[seq][0], seq, WHOLE, epoch)

    def write_again(self, seq: int, text: int) -> None:
        """Give a sequence the same text in the present epoch, if its text has older tokens."""
        if self._epochs[text] is not None:
            self._branch_off(text, seq, WHOLE, None)

    def mixes_epochs(self, text: int) -> bool:
        """Return True if a text has tokens from several epochs."""
        return self._epochs[text] is not None

    def epoch_of(self, text: int) -> int:
        """Return the epoch of the next token of a text, as in ``TextPlace``."""
        epoch = self._epochs[text]
        return self.epoch if epoch is None else epoch

    def owner(self, text: int, position: int) -> int:
        """Return the text nearest to the root that equals this one up to and including a position.

        Two texts are equal up to a position if their owners there are equal.
        """
        parent, length = self._branches[text]
        while parent != text and position < length:
            text = parent
            parent, length = self._branches[text]
        return text

    def namespace(self, text: int, position: int = 0) -> int:
        """Return the number of the key of a token, equal for equal keys up to its position."""
        return next(number for begin, number in self._namespaces[text] if begin <= position)

    def key(self, text: int) -> TextKey | int:
        """Return the key of a text, as in ``Branch``."""
        return self._keys[text]

    def key_differences(self, one: int, other: int) -> list[KeyDifference]:
        """List the parts in which the keys of two namespaces differ."""
        if not self._keys_of_namespaces:
            return []
        return self._keys_of_namespaces[one].differences(self._keys_of_namespaces[other])

    def tokens(self, text: int, begin: int, end: int) -> list[int]:
        """List the tokens of a text from ``begin`` to ``end``, as they are written now."""
        epoch = self.epoch_of(text)
        tokens = self._tokens.setdefault((text, epoch), [])
        tokens += [
            text_token(self.owner(text, at), at, self.namespace(text, at), epoch)
            for at in range(len(tokens), end)
        ]
        return tokens[begin:end]

    def text_slice(self, text: int, begin: int, end: int) -> TextSlice:
        """Return the token ids of a text from ``begin`` to ``end``.

        A text has a token id of its own where it branches off, and the common one after that. So
        equal token ids occur after different prefixes, and at different positions.
        """
        tokens = [self.token(self.owner(text, at), at) for at in range(begin, end)]
        key = self._keys[text]
        up_to_end = key.up_to(end) if isinstance(key, TextKey) else None
        return TextSlice(tokens, self.namespace(text), up_to_end)

    def token(self, owner: int, position: int) -> int:
        """Return the token id of a text at a position that it owns."""
        _, branches_off = self._branches[owner]
        return owner + 1 if position == branches_off else _COMMON


# Explanations of wrong prefix hits


class _TextToken(NamedTuple):
    """A token of a text, and its token id."""

    place: TextPlace
    token_id: int

    @property
    def text(self) -> int:
        return self.place.text

    @property
    def position(self) -> int:
        return self.place.position


def explain_equal_token(texts: Texts, want: int, got: int, wrote: Mapping[int, int]) -> str:
    """Describe how the prefixes of two tokens of equal id differ; empty if the ids differ."""
    expected, actual = _text_tokens(texts, [want]), _text_tokens(texts, [got])
    if want == got or not (expected and actual) or expected[0].token_id != actual[0].token_id:
        return ""
    differ = _describe_prefix_difference(texts, expected[0], actual[0])
    return (
        f"; both have token id {expected[0].token_id}, {differ}{_describe_first_writer(wrote, got)}"
    )


def explain_equal_block(
    texts: Texts, want: Sequence[int], blocks: Mapping[int, Sequence[int]], wrote: Mapping[int, int]
) -> str:
    """Describe a block of equal token ids after another prefix; empty without one."""
    expected = _text_tokens(texts, want)
    ids = [each.token_id for each in expected]
    others = {block: tokens for block, tokens in blocks.items() if list(tokens) != list(want)}
    texts_of_blocks = {block: _text_tokens(texts, tokens) for block, tokens in others.items()}
    same = {
        block: tokens
        for block, tokens in texts_of_blocks.items()
        if [each.token_id for each in tokens] == ids
    }
    if not same:
        return ""
    # A block of the nearest position is the most likely one to be mistaken for the wanted block.
    block = min(same, key=lambda block: abs(same[block][0].position - expected[0].position))
    first, last = same[block][0], same[block][-1]
    description = f"block {block} also has token ids {ids}, from token {first.position} of "
    description += f"text {first.text} on"
    differ = _describe_prefix_difference(texts, expected[-1], last)
    return f"; {description}, {differ}{_describe_first_writer(wrote, blocks[block][0])}"


def _text_tokens(texts: Texts, tokens: Sequence[int]) -> list[_TextToken]:
    places = [text_place(token) for token in tokens]
    return [_TextToken(place, texts.token(*place[:2])) for place in places if place]


def _describe_prefix_difference(texts: Texts, one: _TextToken, other: _TextToken) -> str:
    if one.position != other.position:
        return f"as tokens {one.position} and {other.position} of their texts"
    for at in range(one.position):
        owners = [texts.owner(each.text, at) for each in (one, other)]
        if owners[0] != owners[1]:
            ids = [texts.token(owner, at) for owner in owners]
            return (
                f"after prefixes that first differ at token {at}, which is {ids[0]} in text "
                f"{one.text} and {ids[1]} in text {other.text}"
            )
    if one.place.namespace == other.place.namespace:
        return f"in {one.place.space or 'epoch 0'} and in {other.place.space or 'epoch 0'}"
    if differ := texts.key_differences(one.place.namespace, other.place.namespace):
        return f"in texts that differ in their {', and in their '.join(map(str, differ))}"
    return f"in namespaces {one.place.namespace} and {other.place.namespace}"


def _describe_first_writer(wrote: Mapping[int, int], token: int) -> str:
    return f"; sequence {wrote[token]} was the first to write it" if token in wrote else ""
