"""Kernels in CUDA C++ stay within their tensors, and those that do not are found."""

from __future__ import annotations

import pytest

from tests.lanes.address_sanitizer import ALL_RIGHT, under_the_sanitizer, why_impossible

pytestmark = [
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible()),
    pytest.mark.parametrize(
        "module", ["tests.lanes.whole_step", "tests.lanes.streamed", "tests.lanes.paired"]
    ),
]
FOUND = "AddressSanitizer: heap-buffer-overflow"


@pytest.mark.many_alike
def test_all_stays_within_its_tensors(module: str) -> None:
    output = under_the_sanitizer(module)
    assert "ERROR" not in output
    assert output.rstrip().endswith(ALL_RIGHT)


@pytest.mark.many_alike
@pytest.mark.parametrize(("verb", "said"), [("reads", "READ of size"), ("writes", "WRITE of size")])
def test_what_is_planted_is_found(module: str, verb: str, said: str) -> None:
    output = under_the_sanitizer(module, verb)
    assert FOUND in output
    assert said in output
    assert ALL_RIGHT not in output
