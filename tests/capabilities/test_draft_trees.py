"""Trees of drafts: one path is accepted, the others are dropped, and neither is found too early."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer import settings as harness_settings
from pytest_roseinfer.capabilities.capability import required_conditions
from pytest_roseinfer.capabilities.draft_trees import (
    AcceptPaths,
    AppendTrees,
    DraftTrees,
    FreeWithDrafts,
    Parents,
    PreemptWithDrafts,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.preemption import Preempted, Resume
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.oracle.pages import State, text_token, token_of
from pytest_roseinfer.search.shrink import keep_valid_steps, simpler_steps
from tests.capabilities.caches import draft_tree_caches
from tests.capabilities.caches.draft_tree_caches import BROKEN, RIGHT, TextTreeCache, TreeCache
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=4)
TWO_BRANCHES = (-1, -1, 0, 1, 3)


def history(*steps: Operation, texts: bool = False) -> History:
    return History(SPEC, steps, texts=((0, 0),) if texts else ())


def oracle_after(*steps: Operation, texts: bool = False) -> Oracle:
    states: dict[type[State], State] = {Preempted: Preempted(), DraftTrees: DraftTrees()}
    oracle = Oracle(4, 9, branches=((0, 0),) if texts else (), states=states)
    for step in steps:
        assert step.possible(oracle)
        assert step.apply(oracle)
    return oracle


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", RIGHT)
def test_cache_with_trees_passes(cache: type[KVCacheAdapter]) -> None:
    harness_settings.set_current(
        harness_settings.Settings(examples=12, steps=12, seed=1, require_paths=False)
    )
    tests = conformance(cache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
def test_broken_trees_fail(broken: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 500, 1, lambda each: run_history(broken, each))


def test_accepted_path_replaces_the_drafts() -> None:
    tree = AppendTrees((0,), (TWO_BRANCHES,))
    oracle = oracle_after(Prefill(0, 3), tree)
    drafts = oracle.tokens(0)[3:]
    assert drafts == [
        token_of(0, 3),
        token_of(0, 3, 1),
        token_of(0, 4),
        token_of(0, 4, 1),
        token_of(0, 5, 1),
    ]
    assert (oracle.length(0), oracle.unwritten(0), oracle.usable) == (8, 5, [])
    assert oracle.pages_free() == 7
    AcceptPaths((0,), ((1, 3),)).apply(oracle)
    assert oracle.tokens(0)[3:] == [drafts[1], drafts[3]]
    assert (oracle.length(0), oracle.unwritten(0), oracle.pages_free()) == (5, 0, 7)
    Append((0,)).apply(oracle)
    assert oracle.tokens(0)[-1] not in drafts


def test_accepted_chain_is_continued_as_if_it_had_been_appended() -> None:
    for texts in (False, True):
        steps = AppendTrees((0,), ((-1, 0),)), AcceptPaths((0,), ((0, 1),))
        oracle = oracle_after(Prefill(0, 3), *steps, Append((0,)), texts=texts)
        assert oracle.tokens(0) == oracle_after(Prefill(0, 6), texts=texts).tokens(0)


def test_first_drafts_continue_a_text_and_others_branch_off() -> None:
    tree = AppendTrees((0,), (TWO_BRANCHES,))
    oracle = oracle_after(Prefill(0, 3), texts=True)
    (row,) = tree.text_slices(oracle)
    assert row.tokens == [1, 2, 1, 1, 1]
    assert tree.tokens(oracle) == tree.tokens(oracle)
    tree.apply(oracle)
    drafts = oracle.tokens(0)[3:]
    assert drafts[0] == text_token(0, 3)
    assert drafts[1] == text_token(1, 3)
    AcceptPaths((0,), ((1,),)).apply(oracle)
    (row,) = oracle.text_slices([(0, 2)])
    assert row.tokens == [3, 1]
    assert oracle.stored_text(0)[0].tokens == [1, 1, 1, 2]


def test_sequence_with_drafts_is_freed_or_preempted() -> None:
    tree = AppendTrees((0,), (TWO_BRANCHES,))
    oracle = oracle_after(Prefill(0, 3), tree, FreeWithDrafts(0), Append((0,)))
    assert oracle.unwritten(0) == 0
    assert oracle.pages_free() == 8
    oracle = oracle_after(Prefill(0, 3), tree, PreemptWithDrafts(0))
    assert oracle.pages_free() == 9
    Resume(0, 3).apply(oracle)
    assert oracle.tokens(0) == [token_of(0, at) for at in range(3)]
    assert not AcceptPaths((0,), ((),)).possible(oracle)


def test_only_paths_of_the_tree_are_accepted() -> None:
    oracle = oracle_after(Prefill(0, 3), Prefill(1, 1), AppendTrees((0,), (TWO_BRANCHES,)))
    right: list[Parents] = [(), (0,), (0, 2), (1, 3, 4)]
    wrong: list[Parents] = [(2,), (0, 1), (1, 4), (5,), (1, 3, 4, 4)]
    assert all(AcceptPaths((0,), (path,)).possible(oracle) for path in right)
    assert not any(AcceptPaths((0,), (path,)).possible(oracle) for path in wrong)
    assert AcceptPaths((0,), ((1, 3, 7),)).fill_in_numbers(oracle) == AcceptPaths((0,), ((1, 3),))
    assert not AcceptPaths((1,), ((),)).possible(oracle)
    assert not Append((0,)).possible(oracle)
    assert not AppendTrees((1,), ((-1, 1),)).possible(oracle)
    assert not AppendTrees((2,), ((-1,),)).possible(oracle)


def test_conditions_of_trees_are_counted() -> None:
    steps = (
        *(Prefill(0, 3), Fork(0, 1)),
        AppendTrees((0, 1), (TWO_BRANCHES, (-1, 0))),
        AcceptPaths((0, 1), ((1, 3), ())),
        AppendTrees((0,), ((-1,),)),
        FreeWithDrafts(0),
    )
    counts = run_history(TreeCache, history(*steps))
    assert counts == {
        "draft_branches": 1,
        "drafts_after_shared_block": 1,
        "path_moved": 1,
        "path_over_blocks": 1,
        "no_draft_accepted": 1,
        "freed_with_drafts": 1,
    }
    assert required_conditions(TreeCache) == [
        name for name in required_conditions(TreeCache) if name in counts
    ]
    assert len(required_conditions(TreeCache)) == len(counts)


def test_history_with_trees_is_saved_described_and_shrunk() -> None:
    tree, path = AppendTrees((0, 1), (TWO_BRANCHES, (-1,))), AcceptPaths((0, 1), ((1, 3), ()))
    steps = history(Prefill(0, 3), Prefill(1, 3), tree, path)
    assert History.from_json(json.loads(json.dumps(steps.to_json()))) == steps
    words = steps.describe()
    assert "3. append drafts with these parents: [-1, -1, 0, 1, 3] to sequence 0, [-1] to" in words
    assert "accept these drafts, and drop the others: [1, 3] of sequence 0, none of seq" in words
    simpler = [*simpler_steps(tree, {})]
    assert AppendTrees((0,), (TWO_BRANCHES,)) in simpler
    assert AppendTrees((0, 1), ((-1, 0, 1, 2, 3), (-1,))) in simpler
    assert AppendTrees((0, 1), (TWO_BRANCHES[:-1], (-1,))) in simpler
    assert [*simpler_steps(path, {})][-1] == AcceptPaths((0, 1), ((1,), ()))
    shorter = history(Prefill(0, 3), AppendTrees((0,), ((-1, -1),)), AcceptPaths((0,), ((1, 3),)))
    assert keep_valid_steps(TreeCache, shorter).operations[-1] == AcceptPaths((0,), ((1,),))
    unfinished = history(Prefill(0, 3), AppendTrees((0,), (TWO_BRANCHES,)))
    assert keep_valid_steps(TreeCache, unfinished).operations[-1] == AcceptPaths((0,), ((1, 3, 4),))


def test_messages_name_the_draft_in_place_of_the_accepted_one() -> None:
    steps = Prefill(0, 3), AppendTrees((0,), ((-1, -1),)), AcceptPaths((0,), ((1,),))
    with pytest.raises(Divergence, match=r"position 3, .*found sequence 0, token 3"):
        run_history(draft_tree_caches.KeepsTheFirstDrafts, history(*steps))
    with pytest.raises(Divergence, match=r"found 4, and only 0 of them may be found now"):
        run_history(
            draft_tree_caches.FindsDrafts,
            history(Prefill(0, 3), AppendTrees((0,), ((-1,),)), texts=True),
        )


class TreesAndResets(TextTreeCache):
    def reset(self) -> None: ...


def test_trees_that_cannot_be_judged_are_refused() -> None:
    message = r"TreesAndResets defines append_trees, which cannot be judged with reset yet"
    with pytest.raises(TypeError, match=message):
        conformance(TreesAndResets)
