"""Every invariant passes an observation of a right cache, and finds its fault in a wrong one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import KVCacheAdapter
from tests.capabilities.invariants import books, stored
from tests.capabilities.invariants import return_values as answers

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Invariant, Observation
    from tests.capabilities.invariants.observations import Right, Wrong

RIGHT: Right = {**books.RIGHT, **stored.RIGHT, **answers.RIGHT}
WRONG: Wrong = [*books.WRONG, *stored.WRONG, *answers.WRONG]


def test_every_invariant_is_tried_here() -> None:
    tried = {check.name for check in RIGHT}
    every = [each for own in KVCacheAdapter.capabilities for each in own.invariants]
    assert tried == {check.name for check, _, _ in WRONG} == {each.name for each in every}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.name)
def test_what_is_right_passes(check: Invariant) -> None:
    assert [check(seen) for seen in RIGHT[check]] == [None] * len(RIGHT[check])


@pytest.mark.parametrize(("check", "seen", "said"), WRONG, ids=[case[2][:40] for case in WRONG])
def test_what_is_wrong_is_found(check: Invariant, seen: Observation, said: str) -> None:
    finding = check(seen)
    assert finding is not None
    assert said in finding.what
