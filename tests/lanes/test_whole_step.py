"""The kernel of a whole step stays within its tensors, and one that does not is found."""

from __future__ import annotations

import pytest

from tests.lanes.whole_step import ALL_RIGHT, under_the_sanitizer, why_impossible

pytestmark = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())
FOUND = "AddressSanitizer: heap-buffer-overflow"


def test_every_step_stays_within_its_tensors() -> None:
    output = under_the_sanitizer()
    assert "ERROR" not in output
    assert output.rstrip().endswith(ALL_RIGHT)


@pytest.mark.parametrize(("verb", "said"), [("reads", "READ of size"), ("writes", "WRITE of size")])
def test_what_is_planted_is_found(verb: str, said: str) -> None:
    output = under_the_sanitizer(verb)
    assert FOUND in output
    assert said in output
    assert ALL_RIGHT not in output
