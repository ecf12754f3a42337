"""Keys of texts: named parts in addition to token ids, in which texts of equal ids may differ."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    RankPolicy,
    Run,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import Prefill
from pytest_roseinfer.oracle.texts import WHOLE, KeySpan, TextKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.observation import Observation
    from pytest_roseinfer.oracle.texts import Branch, KeyDifference, KeyValue, Texts

# Parts of keys


@dataclass(frozen=True)
class KeyPart:
    """A part of the keys that a cache distinguishes."""

    name: str
    """Name by which a ``TextKey`` has it."""
    of: str = ""
    """Part that it belongs to, as a revision belongs to an adapter: where that one is None, so is
    it; empty for a part of its own."""
    spans: bool = False
    """True if it applies to some consecutive tokens, as an image or an embeddings mask does."""
    values: Sequence[KeyValue] = ()
    """Values that it takes, two or more, None for a request without it; empty for any string, and
    also for None unless it applies to spans."""

    def all_values(self, names: Sequence[str] = ()) -> Sequence[KeyValue]:
        """Return its values; the ``names`` of other parts are among them if it takes any string."""
        if self.values:
            return self.values
        return ("a", "b", "ab") if self.spans else (None, "a", "b", "ab", "", *names)

    def other_value(self, value: KeyValue) -> KeyValue:
        """Return its first value that differs from ``value``; None only without another one."""
        others = [each for each in self.all_values() if each != value]
        return next((each for each in others if each is not None), None)


class TextKeyMethods:
    """Adapter method that receives the keys of texts."""

    key_parts: ClassVar[Sequence[KeyPart]] = ()
    """Parts of the keys that ``use_text_keys`` receives, as in ``(KeyPart("adapter"),
    KeyPart("revision", of="adapter"), KeyPart("image", spans=True))``."""

    @optional
    def use_text_keys(self, keys: Sequence[Any]) -> None:
        """Receive the key of each row of the next write, or of the next lookup: a ``TextKey``.

        It is called before ``use_tokens``, or before the lookup. Texts of equal token ids have
        equal keys and values up to the first token to which a part applies that differs, and other
        ones from there on: no block from there on is shared or found. A ``KeySpan`` counts its
        positions from the first token of the sequence. It may have begun in an earlier row, and may
        end in a later one; spans that begin after the row are left out. A fork has the key of its
        parent.
        """


def keys_by_part(parts: Sequence[KeyPart], begin: int, end: int) -> list[TextKey]:
    """Return a key with all parts, and for each of these a key that differs in it alone.

    Spans are from ``begin`` to ``end``.
    """
    usual = {part.name: part.other_value(None) for part in parts}

    def make_key(values: Mapping[str, KeyValue]) -> TextKey:
        wholes = {part.name: values[part.name] for part in parts if not part.spans}
        spans = [part.name for part in parts if part.spans and values[part.name] is not None]
        return TextKey(wholes, tuple(KeySpan(name, begin, end, values[name]) for name in spans))

    changes = [{part.name: part.other_value(usual[part.name])} for part in parts]
    return [make_key({**usual, **change}) for change in ({}, *changes)]


def simpler_keys(parts: Sequence[KeyPart], texts: Sequence[Branch]) -> Iterator[tuple[Branch, ...]]:
    """Yield the texts without one of their spans, or with the usual value of one part in all."""
    keys = [key for *_, key in texts if isinstance(key, TextKey)]
    simplified = []
    for place in dict.fromkeys((span.part, span.begin) for key in keys for span in key.spans):
        spans = [tuple(span for span in key.spans if span[:2] != place) for key in keys]
        simplified.append([TextKey(key.parts, each) for key, each in zip(keys, spans, strict=True)])
    for part in parts:
        usual = part.all_values()[0]
        changed = {part.name: usual}
        if usual is None:
            changed |= {each.name: None for each in parts if each.of == part.name}
        if not part.spans:
            simplified.append([TextKey({**key.parts, **changed}, key.spans) for key in keys])
    for simpler in simplified if keys else ():
        yield tuple((*text[:2], key) for text, key in zip(texts, simpler, strict=True))


def refuse_key_parts(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for parts of keys that cannot be drawn, or that no method receives."""
    name, parts = adapter.__name__, adapter.key_parts
    if bool(parts) != ("use_text_keys" in adapter.abilities):
        raise TypeError(
            f"{name} defines {'key_parts' if parts else 'use_text_keys'} and must then define "
            f"{'use_text_keys' if parts else 'key_parts'} too"
        )
    if not parts:
        return
    if "use_namespaces" in adapter.abilities:
        raise TypeError(
            f"{name} defines use_namespaces and use_text_keys: make the namespace a part of keys, "
            'as in KeyPart("namespace")'
        )
    if not all(isinstance(part, KeyPart) for part in parts):
        raise TypeError(f'{name}.key_parts is {parts!r}: list parts, as in (KeyPart("salt"),)')
    names = [part.name for part in parts]
    for part in parts:
        problem = ""
        if names.count(part.name) > 1:
            problem = "is listed twice: name each part once"
        elif part.of and (part.of not in names or part.of == part.name):
            problem = f"belongs to {part.of!r}: list that part too"
        elif part.values and len({*part.values}) < 2:
            problem = f"has the values {part.values!r}: list two or more, or none for any string"
        if problem:
            raise TypeError(f"{name}.key_parts: {part.name!r} {problem}")


# Conditions


TEXTS_DIFFER_IN = "texts_differ_in_"
"""Condition of one part of keys, without the part's name."""


def _required_conditions(adapter: type[Any]) -> list[str]:
    """Return the conditions that are required of a cache for each part of its keys."""
    finds_texts = {"match_prefix", "prefill"} <= adapter.abilities
    return [TEXTS_DIFFER_IN + part.name for part in adapter.key_parts if finds_texts]


class DifferentKeys(Observer):
    """Counter of texts of equal token ids that differ in one part of their keys."""

    any_of = ("use_text_keys",)
    conditions: ClassVar = {
        f"{TEXTS_DIFFER_IN}PART": "Lookups find two texts of equal token ids that differ in this "
        "part alone, both beyond the token from which they differ; PART is the name of a "
        "``KeyPart``, as in ``texts_differ_in_salt``. Required for each part of a cache that "
        "defines ``match_prefix`` and ``prefill``.",
        "lookup_missed_by_key": "A lookup finds no token beyond the one from which its key differs "
        "in one part from that of another text, which has equal token ids and is found. Required "
        "of the same caches.",
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        texts = run.oracle.texts
        self._pairs = [*_pairs_of_equal_ids(texts)] if texts else []

    def after(self, observation: Observation) -> Mapping[str, int]:
        counts, found = Counter[str](), observation.after.matches
        longest = max((count for _, count in found), default=0)
        for pair, ((part, position, _), *others) in self._pairs:
            hits = [found.get((text, longest)) for text in pair]
            beyond = sum(isinstance(hit, int) and hit > position for hit in hits)
            counts[TEXTS_DIFFER_IN + part] += beyond == 2 and not others
            counts["lookup_missed_by_key"] += beyond == 1 and not others
        return counts


def _pairs_of_equal_ids(
    texts: Texts,
) -> Iterator[tuple[tuple[int, int], list[KeyDifference]]]:
    """Yield pairs of texts of equal token ids, and the parts in which their keys differ."""
    for pair in combinations(range(len(texts.initial_branches)), 2):
        one, other = map(texts.key, pair)
        if isinstance(one, TextKey) and isinstance(other, TextKey):
            differences = one.differences(other)
            equal_ids = texts.owner(pair[0], WHOLE - 1) == texts.owner(pair[1], WHOLE - 1)
            if differences and equal_ids:
                yield pair, differences


# Prelude


def write_equal_ids(writer: operation.Writer) -> None:
    """Open with two texts of equal token ids and different keys; or add no steps.

    They reach up to one block beyond that of the first token whose key differs. The first one is
    freed or not before the second is written.
    """
    if writer.oracle.texts and not writer.live and writer.pick((True, True, False)):
        operation.add_while_fitting(writer, _write_equal_ids(writer))


def _write_equal_ids(writer: operation.Writer) -> Iterator[operation.Operation]:
    texts, size, can = writer.oracle.texts, writer.oracle.block_size, writer.adapter.abilities
    assert texts
    if not Prefill.needs <= can:
        return
    names = {writer.oracle.text_of(seq): seq for seq in writer.fresh(len(texts.initial_branches))}
    blocks, more = writer.pick((1, 2, 2)), writer.adapter.prefixes.recomputed_tokens
    rows = [
        [(names[text], (position // size + blocks) * size + more) for text in pair]
        for pair, position in _closest_pairs(texts)
    ]
    choices = [pair for pair in rows if writer.oracle.fits(pair[:1])]
    if not choices:
        return
    first, second = writer.shuffle(writer.pick(choices))
    yield Prefill(*first, writer.layout())
    if Free.needs <= can and (writer.between(0, 1) or not writer.oracle.fits([second])):
        yield Free(first[0])
    yield Prefill(*second, writer.layout())


def _closest_pairs(texts: Texts) -> list[tuple[tuple[int, int], int]]:
    """List pairs of texts of equal token ids, and the first position at which their keys differ.

    Only pairs that differ in one part, if each text is in such a pair.
    """
    pairs = [*_pairs_of_equal_ids(texts)]
    closest = [(pair, differences) for pair, differences in pairs if len(differences) == 1]
    if {text for pair, _ in closest for text in pair} < {
        text for pair, _ in pairs for text in pair
    }:
        closest = pairs
    return [(pair, differences[0].position) for pair, differences in closest]


TEXT_KEYS = Capability(
    methods=TextKeyMethods,
    preludes=(Prelude(("use_text_keys",), 9, write_equal_ids),),
    needs={"use_text_keys": ("use_tokens",)},
    refuse=(refuse_key_parts,),
    observers=(DifferentKeys,),
    required_conditions=_required_conditions,
    sharded={"use_text_keys": RankPolicy.SAME},
)
