"""Texts in namespaces: what is equal in two of them is not the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer.capabilities.payload import token_words
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.pages import token_label
from pytest_roseinfer.oracle.texts import WHOLE, duplicate_in_namespaces
from tests.capabilities.caches.namespaced_caches import BROKEN, NamespacedCache
from tests.capabilities.caches.paged_cache import PagedCache

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

SPEC = CacheSpec(block_size=2)
TWO = duplicate_in_namespaces(((0, 0), (0, 3)))


@pytest.mark.parametrize(("cache", "number"), [*((cache, n) for cache in BROKEN for n in range(3))])
def test_one_that_mixes_namespaces_is_found(cache: type[KVCacheAdapter], number: int) -> None:
    with pytest.raises(Divergence):
        search(cache, number, examples=300)


def test_one_that_keeps_them_apart_passes() -> None:
    search(NamespacedCache, 1, examples=60)


def search(cache: type[KVCacheAdapter], number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(number)
    @given(histories(cache))
    def look(history: History) -> None:
        run_history(cache, history)

    look()


def test_each_text_lies_in_two_namespaces() -> None:
    assert TWO == ((0, 0), (0, WHOLE, 1), (0, 3), (2, WHOLE, 1))
    oracle = Oracle(2, 9, branches=TWO)
    rows = [(seq, 4) for seq in range(4)]
    here, there, also_here, also_there = oracle.text_slices(rows)
    assert here.tokens == there.tokens != also_here.tokens == also_there.tokens
    assert [each.namespace for each in oracle.text_slices(rows)] == [0, 1, 0, 1]
    oracle.append(rows, oracle.new_tokens(rows))
    assert not set(oracle.tokens(0)) & set(oracle.tokens(1))
    assert oracle.tokens(0)[:3] == oracle.tokens(2)[:3]
    assert oracle.tokens(1)[:3] == oracle.tokens(3)[:3]


def test_a_fork_lies_where_its_parent_does() -> None:
    oracle = Oracle(2, 9, branches=TWO)
    oracle.append([(1, 3)], oracle.new_tokens([(1, 3)]))
    oracle.fork(1, 2)
    assert oracle.text_slices([(2, 1)])[0].namespace == 1


def test_a_history_says_and_saves_its_namespaces() -> None:
    history = History(SPEC, (Prefill(0, 3), Prefill(1, 3), Append((0, 1))), texts=TWO)
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert "text 1 is equal to text 0, but has namespace 1" in history.describe()
    run_history(NamespacedCache, history)
    token = Oracle(2, 9, branches=TWO).text_tokens(3, 4)[3]
    assert token_words(token) == "text 2 in namespace 1, token 3"
    assert token_label(token) == "t2(namespace 1).3"


class Unheard(PagedCache):
    def use_namespaces(self, names: object) -> None: ...


def test_namespaces_of_no_texts_are_refused() -> None:
    with pytest.raises(
        TypeError, match="defines use_namespaces and must then define use_tokens too"
    ):
        conformance(Unheard)
