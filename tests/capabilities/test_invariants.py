"""Every invariant passes observations of right caches, and fails for those of broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import KVCacheAdapter
from tests.capabilities.invariants import books, receives, stored
from tests.capabilities.invariants import return_values as return_values

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Invariant, Observation
    from tests.capabilities.invariants.observations import Right, Wrong

RIGHT: Right = {**books.RIGHT, **stored.RIGHT, **return_values.RIGHT, **receives.RIGHT}
WRONG: Wrong = [*books.WRONG, *stored.WRONG, *return_values.WRONG, *receives.WRONG]


def test_every_invariant_has_right_and_wrong_observations() -> None:
    tested = {check.name for check in RIGHT}
    invariants = [invariant for own in KVCacheAdapter.capabilities for invariant in own.invariants]
    assert (
        tested
        == {check.name for check, _, _ in WRONG}
        == {invariant.name for invariant in invariants}
    )


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.name)
def test_invariant_passes_right_observations(check: Invariant) -> None:
    assert [check(observation) for observation in RIGHT[check]] == [None] * len(RIGHT[check])


@pytest.mark.parametrize(
    ("check", "observation", "message"), WRONG, ids=[case[2][:40] for case in WRONG]
)
def test_invariant_fails_for_a_wrong_observation(
    check: Invariant, observation: Observation, message: str
) -> None:
    finding = check(observation)
    assert finding is not None
    assert message in finding.summary
