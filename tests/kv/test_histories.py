"""Random histories of appends, forks, frees and prompts, under changing policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer import OutOfBlocks
from tests.kv.test_policy_switches import COMBINATIONS
from tests.kv.twins import Snapshot, Twins, random_words

if TYPE_CHECKING:
    from roseinfer import AppendPolicy

SEQUENCES = 5

appends = st.tuples(
    st.just("append"),
    st.lists(st.integers(0, SEQUENCES - 1), min_size=1, unique=True),
    st.sampled_from(COMBINATIONS),
)
forks = st.tuples(st.just("fork"), st.permutations(range(SEQUENCES)), st.none())
frees = st.tuples(st.just("free"), st.integers(0, SEQUENCES - 1), st.none())
prompts = st.tuples(st.just("prompt"), st.integers(0, SEQUENCES - 1), st.integers(1, 9))
histories = st.lists(st.one_of(appends, appends, appends, forks, frees, prompts), max_size=14)


class History(Twins):
    """History of five sequences in two caches."""

    def __init__(self, device: str) -> None:
        super().__init__(device, lengths=[0] * SEQUENCES, max_blocks_per_layer=10)

    def step(self, kind: str, rows: Any, argument: Any) -> None:
        if kind == "append":
            self.step_append(rows, argument)
        elif kind == "fork":
            self.refill(rows[0], from_row=rows[1])
        elif kind == "free":
            self.free(rows)
        else:
            self.step_prompt(rows, argument)

    def step_append(self, rows: list[int], policy: AppendPolicy) -> None:
        """Append a batch; one that does not fit must leave both caches unchanged."""
        self.fast.policy = policy
        before = Snapshot.of(self.fast)
        try:
            self.append(rows)
        except OutOfBlocks:
            before.assert_unchanged(self.fast)

    def refill(self, row: int, from_row: int) -> None:
        self.free(row)
        for kv, lists in ((self.fast, self.fast_lists), (self.slow, self.slow_lists)):
            kv.incref_blocks(lists[from_row])
            lists[row][:] = lists[from_row]

    def step_prompt(self, row: int, length: int) -> None:
        self.free(row)
        shape = (1, self.fast.num_heads, length, self.fast.head_dim)
        key, value = (
            random_words(shape, self.fast.dtype, length + seed).to(self.fast.device)
            for seed in (0, 100)
        )
        try:
            self.fast_lists[row][:] = self.fast.register_prefill_layer(self.layer, key, value)
        except OutOfBlocks:
            return
        for token in range(length):
            self.slow.append_token(
                self.layer, self.slow_lists[row], key[0, :, token], value[0, :, token]
            )


@settings(max_examples=60, deadline=None, database=None)
@given(history=histories)
def test_random_histories_match_append_token(
    device: str, history: list[tuple[str, Any, Any]]
) -> None:
    twins = History(device)
    for step in history:
        twins.step(*step)
        assert twins.fast_lists == twins.slow_lists
    twins.check()
    free_all(twins)


def free_all(twins: Twins) -> None:
    """Free all sequences; assert that no block leaks."""
    for row in range(SEQUENCES):
        twins.free(row)
    assert twins.fast.num_free_blocks(twins.layer) == twins.fast.max_blocks_per_layer - 1
    twins.check()


@pytest.mark.parametrize("rows", [[0, 1], [1, 0]])
def test_history_that_runs_out_of_blocks(device: str, rows: list[int]) -> None:
    """This history certainly runs out; random ones may not."""
    twins = History(device)
    for _ in range(40):
        twins.step("append", rows, COMBINATIONS[0])
    assert twins.fast.num_free_blocks(twins.layer) in (0, 1)
    twins.check()
