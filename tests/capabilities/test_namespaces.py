"""Texts in namespaces: equal tokens in two namespaces are different texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer.capabilities.payload import describe_token
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.pages import token_label
from pytest_roseinfer.oracle.texts import WHOLE, duplicate_in_namespaces
from tests.capabilities.caches.namespaced_caches import BROKEN, NamespacedCache
from tests.capabilities.caches.paged_cache import PagedCache
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

SPEC = CacheSpec(block_size=2)
TEXTS_IN_TWO_NAMESPACES = duplicate_in_namespaces(((0, 0), (0, 3)))


@pytest.mark.parametrize(
    ("cache", "seed_number"), [*((cache, n) for cache in BROKEN for n in range(3))]
)
def test_cache_that_mixes_namespaces_fails(cache: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        search(cache, seed_number, examples=300)


@few_or_many_examples(8, 60)
def test_cache_that_separates_namespaces_passes(examples: int) -> None:
    search(NamespacedCache, 1, examples)


def search(cache: type[KVCacheAdapter], seed_number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(seed_number)
    @given(histories(cache))
    def check(history: History) -> None:
        run_history(cache, history)

    check()


def test_each_text_is_duplicated_in_a_second_namespace() -> None:
    assert TEXTS_IN_TWO_NAMESPACES == ((0, 0), (0, WHOLE, 1), (0, 3), (2, WHOLE, 1))
    oracle = Oracle(2, 9, branches=TEXTS_IN_TWO_NAMESPACES)
    rows = [(seq, 4) for seq in range(4)]
    first, first_in_namespace, second, second_in_namespace = oracle.text_slices(rows)
    assert first.tokens == first_in_namespace.tokens != second.tokens == second_in_namespace.tokens
    assert [each.namespace for each in oracle.text_slices(rows)] == [0, 1, 0, 1]
    oracle.append(rows, oracle.new_tokens(rows))
    assert not set(oracle.tokens(0)) & set(oracle.tokens(1))
    assert oracle.tokens(0)[:3] == oracle.tokens(2)[:3]
    assert oracle.tokens(1)[:3] == oracle.tokens(3)[:3]


def test_fork_has_the_namespace_of_its_parent() -> None:
    oracle = Oracle(2, 9, branches=TEXTS_IN_TWO_NAMESPACES)
    oracle.append([(1, 3)], oracle.new_tokens([(1, 3)]))
    oracle.fork(1, 2)
    assert oracle.text_slices([(2, 1)])[0].namespace == 1


def test_history_describes_and_saves_its_namespaces() -> None:
    history = History(
        SPEC, (Prefill(0, 3), Prefill(1, 3), Append((0, 1))), texts=TEXTS_IN_TWO_NAMESPACES
    )
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert "text 1 is equal to text 0, but has namespace 1" in history.describe()
    run_history(NamespacedCache, history)
    token = Oracle(2, 9, branches=TEXTS_IN_TWO_NAMESPACES).text_tokens(3, 4)[3]
    assert describe_token(token) == "text 2 in namespace 1, token 3"
    assert token_label(token) == "t2(namespace 1).3"


class NamespacesWithoutTexts(PagedCache):
    def use_namespaces(self, names: object) -> None: ...


def test_namespaces_without_texts_are_refused() -> None:
    with pytest.raises(
        TypeError, match="defines use_namespaces and must then define use_tokens too"
    ):
        conformance(NamespacesWithoutTexts)
