"""Every invariant passes an observation of a right cache, and finds its fault in a wrong one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.capabilities.observation import INVARIANTS
from tests.plugin.invariants import answers, books, stored

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Observation
    from tests.plugin.invariants.observed import Check, Right, Wrong

RIGHT: Right = {**books.RIGHT, **stored.RIGHT, **answers.RIGHT}
WRONG: Wrong = [*books.WRONG, *stored.WRONG, *answers.WRONG]


def test_every_invariant_is_tried_here() -> None:
    tried = {check.__name__ for check in RIGHT}
    assert tried == {check.__name__ for check, _, _ in WRONG} == {each.name for each in INVARIANTS}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_what_is_right_passes(check: Check) -> None:
    assert [check(seen) for seen in RIGHT[check]] == [None] * len(RIGHT[check])


@pytest.mark.parametrize(("check", "seen", "said"), WRONG, ids=[case[2][:40] for case in WRONG])
def test_what_is_wrong_is_found(check: Check, seen: Observation, said: str) -> None:
    finding = check(seen)
    assert finding is not None
    assert said in finding.what
