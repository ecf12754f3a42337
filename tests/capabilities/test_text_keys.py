"""Keys of texts: equal token ids are found and shared only where no part of the keys differs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    KeyPart,
    KeySpan,
    Oracle,
    ShardedAdapter,
    TextKey,
    conformance,
    run_history,
)
from pytest_roseinfer import settings as harness_settings
from pytest_roseinfer.capabilities.text_keys import keys_by_part, simpler_keys
from pytest_roseinfer.capabilities.writes import Prefill
from pytest_roseinfer.histories.keyed_texts import text_keys
from pytest_roseinfer.oracle.texts import WHOLE, Texts, repeat_with_keys
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from pytest_roseinfer.suite.exhaustive import every_texts
from tests.capabilities.caches import keyed_caches
from tests.capabilities.caches.keyed_caches import BROKEN, KEY_PARTS, RIGHT, ChainCache, KeyedCache
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.text_cache import TextCache
from tests.histories.drawn_histories import check_drawn_histories
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=2)
SALT_C, SALT_BC = TextKey({"salt": "c"}), TextKey({"salt": "bc"})


def with_image(value: str, begin: int = 3, end: int = 5) -> TextKey:
    return TextKey({"salt": "c"}, (KeySpan("image", begin, end, value),))


def history(keys: Sequence[TextKey], *steps: Operation) -> History:
    return History(SPEC, steps, texts=repeat_with_keys(((0, 0),), keys))


def oracle_of(*keys: TextKey) -> Oracle:
    return Oracle(2, 9, branches=repeat_with_keys(((0, 0),), keys))


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", RIGHT)
@few_or_many_examples(8, 60)
def test_cache_that_knows_all_parts_passes(cache: type[KVCacheAdapter], examples: int) -> None:
    harness_settings.set_current(harness_settings.Settings(examples=examples, steps=20, seed=1))
    conformance(cache)().test_histories()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("seed_number", range(3))
def test_cache_that_confuses_keys_fails(broken: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 500, seed_number, lambda each: run_history(broken, each))


# Texts


def test_texts_of_two_keys_have_equal_ids_and_no_equal_tokens() -> None:
    oracle = oracle_of(SALT_C, SALT_BC, SALT_C)
    one, other, again = oracle.text_slices([(0, 3), (1, 3), (2, 3)])
    assert one.tokens == other.tokens == again.tokens
    assert (one.key, other.key) == (SALT_C, SALT_BC)
    tokens = [oracle.text_tokens(text, 3) for text in range(3)]
    assert tokens[0] == tokens[2]
    assert not set(tokens[0]) & set(tokens[1])


def test_texts_differ_from_the_first_token_of_a_span_on() -> None:
    oracle = oracle_of(with_image("x"), with_image("y"), SALT_C)
    tokens = [oracle.text_tokens(text, 8) for text in range(3)]
    for other in tokens[1:]:
        assert [a == b for a, b in zip(tokens[0], other, strict=True)] == [True] * 3 + [False] * 5


def test_rows_get_the_spans_that_have_begun() -> None:
    oracle = oracle_of(with_image("x"))
    keys = [oracle.text_slices([(0, count)])[0].key for count in (3, 4, 6)]
    assert keys == [SALT_C, with_image("x"), with_image("x")]


@pytest.mark.parametrize(("length", "branches_off"), [(2, 2), (3, 5), (4, 5), (5, 5)])
def test_fork_within_a_span_branches_off_after_it(length: int, branches_off: int) -> None:
    oracle = oracle_of(with_image("x"))
    Prefill(0, length).apply(oracle)
    oracle.fork(0, 1)
    oracle.append([(1, 8 - length)], oracle.new_tokens([(1, 8 - length)]))
    assert oracle.stored_text(1)[0].key == with_image("x")
    assert oracle.text_tokens(0, branches_off) == oracle.tokens(1)[:branches_off]
    assert oracle.text_tokens(0, 8)[branches_off] != oracle.tokens(1)[branches_off]
    ids = [1] * branches_off + [2] + [1] * (7 - branches_off)
    assert oracle.stored_text(1)[0].tokens == ids


def test_text_that_branches_off_within_a_span_does_so_after_it() -> None:
    texts = repeat_with_keys(((0, 0), (0, 4)), (with_image("x"), with_image("y", 5, 7)))
    assert [length for _, length, _ in texts] == [0, WHOLE, 7, WHOLE]  # type: ignore[misc]
    assert [parent for parent, *_ in texts] == [0, 0, 0, 2]


def test_differences_of_keys_are_ordered_by_position() -> None:
    one, other = with_image("x"), TextKey({"salt": None, "adapter": "a"})
    assert [*map(str, one.differences(other))] == [
        "salt: 'c' and None",
        "adapter: None and 'a'",
        "image at token 3: 'x' and None",
    ]
    assert not TextKey({"salt": None}).differences(TextKey())


# Draws


def drawn_keys(parts: Sequence[KeyPart], examples: int = 300) -> list[tuple[TextKey, ...]]:
    drawn = []

    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(1)
    @given(text_keys(parts, block_size=2))
    def note(keys: tuple[TextKey, ...]) -> None:
        drawn.append(keys)

    note()
    return drawn


def test_drawn_keys_differ_in_each_part_alone() -> None:
    differ = [
        first.differences(other) for first, *others in drawn_keys(KEY_PARTS) for other in others
    ]
    alone = {each[0].part for each in differ if len(each) == 1}
    assert alone == {part.name for part in KEY_PARTS}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("names", [("adapter", "salt"), ("salt", "adapter")])
@pytest.mark.parametrize("separator", ["", ":"])
def test_drawn_keys_are_spelled_alike_where_parts_are_joined(
    names: tuple[str, str], separator: str
) -> None:
    def spelled(key: TextKey) -> str:
        return separator.join(str(key.parts[name]) for name in names if key.parts[name] is not None)

    parts = [KeyPart("adapter"), KeyPart("salt")]
    pairs = [(keys[0], keys[1]) for keys in drawn_keys(parts) if len(keys) > 1]
    both_given = [pair for pair in pairs if None not in {**pair[0].parts, **pair[1].parts}.values()]
    assert any(spelled(one) == spelled(other) for one, other in both_given)


def test_drawn_values_are_none_and_empty_and_names_of_other_parts() -> None:
    keys = [key for keys in drawn_keys(KEY_PARTS) for key in keys]
    salts = {key.parts["salt"] for key in keys}
    assert salts >= {None, "", "a", "adapter", "image"}
    assert "salt" not in salts
    assert {key.parts["weights"] for key in keys} == {"v1", "v2"}
    assert all(key.parts["revision"] is None for key in keys if key.parts["adapter"] is None)


def test_drawn_spans_cross_the_edge_of_a_block_and_come_twice() -> None:
    spans = [key.spans for keys in drawn_keys(KEY_PARTS) for key in keys]
    assert any(span.begin // 2 != (span.end - 1) // 2 for each in spans for span in each)
    assert any([span.part for span in each] == ["image", "image"] for each in spans)
    assert {span.value for each in spans for span in each if span.part == "embeddings mask"} == {
        "mask"
    }


def test_each_part_has_a_pair_of_texts_in_the_walk() -> None:
    pairs = [Texts(texts) for texts in every_texts(KeyedCache) if len(texts) == 2]
    differ = [texts.key(0).differences(texts.key(1)) for texts in pairs]  # type: ignore[union-attr,arg-type]
    assert [each[0].part for each in differ if each] == [part.name for part in KEY_PARTS]
    assert every_texts(TextCache) == [((0, 0),), *(((0, 0), (0, at)) for at in (2, 1, 3))]


def test_keys_are_simplified_part_by_part() -> None:
    parts = (KeyPart("adapter"), KeyPart("revision", of="adapter"), KeyPart("image", spans=True))
    key, *_ = keys_by_part(parts, 1, 3)
    texts = repeat_with_keys(((0, 0),), (key,))
    simpler = [texts[0][2] for texts in simpler_keys(parts, texts)]  # type: ignore[misc]
    assert simpler == [
        TextKey(key.parts),
        TextKey({"adapter": None, "revision": None}, key.spans),
        TextKey({"adapter": "a", "revision": None}, key.spans),
    ]


# Histories, messages and conditions


def test_history_describes_and_saves_its_keys() -> None:
    steps = history((with_image("x"), TextKey()), Prefill(0, 4), Prefill(1, 4))
    assert History.from_json(json.loads(json.dumps(steps.to_json()))) == steps
    described = steps.describe()
    assert "text 0 has salt 'c', image 'x' at tokens 3 to 4\n" in described
    assert "text 1 is equal to text 0, but has no key\n" in described


def failure_of(cache: type[KVCacheAdapter], *keys: TextKey) -> str:
    steps = [Prefill(seq, 6) for seq in range(len(keys))]
    with pytest.raises(Divergence) as failure:
        run_history(cache, history(keys, *steps))
    return failure.value.summary


def test_lookup_that_ignores_a_part_is_told_its_name() -> None:
    assert failure_of(keyed_caches.LeavesTheSaltOut, SALT_C, SALT_BC).startswith(
        "match_prefix() of text 1 (salt 'bc'), 6 tokens long, found 6, and only 0 of them may be "
        "found now; block 0 also has token ids [1, 1], from token 0 of text 0 on, in texts that "
        "differ in their salt: 'bc' and 'c'; sequence 0"
    )


def test_block_that_is_shared_without_its_image_is_told_the_part() -> None:
    keys = with_image("x", 1, 2), with_image("y", 1, 2)
    assert "in texts that differ in their image at token 1: 'y' and 'x'" in failure_of(
        keyed_caches.HashesAnImageWhereItBegins, *keys
    )


def test_conditions_are_counted_for_each_part() -> None:
    steps = Prefill(0, 4), Prefill(1, 4), Prefill(2, 4)
    counts = run_history(ChainCache, history((SALT_C, with_image("x"), with_image("y")), *steps))
    assert counts["texts_differ_in_salt"] == 0
    assert counts["texts_differ_in_image"] == 4  # texts 0 and 1, and then each two of three
    assert counts["lookup_missed_by_key"] == 4  # texts 1 and 2, and then 2 in place of 0 and 1


def test_conditions_are_required_for_each_part_that_a_cache_has() -> None:
    required = [f"texts_differ_in_{part.name}" for part in KEY_PARTS]
    assert coverage.Coverage().of(KeyedCache).conditions[-8:] == ["lookup_missed_by_key", *required]
    assert not {"lookup_missed_by_key"} & {*coverage.Coverage().of(TextCache).conditions}


def test_unmet_condition_of_a_part_is_not_taken_for_a_misspelt_one() -> None:
    target = coverage.Coverage().of(KeyedCache)
    target.searched, target.histories = True, 1
    target.eligible_examples.update(dict.fromkeys(target.conditions, coverage.CONCLUSIVE_EXAMPLES))
    problems = TargetVerdict(target).problems(require_paths=True)
    (problem,) = (each for each in problems if "texts_differ_in_salt" in each)
    assert "did you mean" not in problem


class ShardedKeys(ShardedAdapter):
    of = KeyedCache


def test_all_ranks_get_the_keys() -> None:
    run_history(
        ShardedKeys,
        History(CacheSpec(num_heads=2, block_size=2), (Prefill(0, 3),), texts=((0, 0, SALT_C),)),
    )


# Refusals


class Receives(TextCache):
    def use_text_keys(self, keys: Sequence[TextKey]) -> None: ...


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "defines use_text_keys and must then define key_parts too"),
        (("salt",), "key_parts is ('salt',): list parts, as in (KeyPart(\"salt\"),)"),
        ((KeyPart("salt"), KeyPart("salt")), "'salt' is listed twice: name each part once"),
        (
            (KeyPart("revision", of="adapter"),),
            "'revision' belongs to 'adapter': list that part too",
        ),
        ((KeyPart("salt", values=("a",)),), "'salt' has the values ('a',): list two or more"),
    ],
)
def test_parts_that_cannot_be_drawn_are_refused(parts: Sequence[KeyPart], message: str) -> None:
    wrong = type("Wrong", (Receives,), {"key_parts": parts})
    with pytest.raises(TypeError, match=re.escape(message)):
        conformance(wrong)


class PartsWithoutAMethod(ListCache):
    key_parts: ClassVar = (KeyPart("salt"),)


class KeysAndNamespaces(Receives):
    key_parts = PartsWithoutAMethod.key_parts

    def use_namespaces(self, namespaces: Sequence[int]) -> None: ...


def test_keys_need_their_method_and_exclude_namespaces() -> None:
    with pytest.raises(TypeError, match="defines key_parts and must then define use_text_keys too"):
        conformance(PartsWithoutAMethod)
    with pytest.raises(TypeError, match="make the namespace a part of keys"):
        conformance(KeysAndNamespaces)
