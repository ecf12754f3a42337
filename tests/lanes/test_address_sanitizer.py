"""Kernels in CUDA C++ under AddressSanitizer: correct ones, and planted accesses."""

from __future__ import annotations

import pytest

from tests.lanes.address_sanitizer import ALL_IN_BOUNDS, run_with_sanitizer, unavailable_reason

pytestmark = [
    pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason()),
    pytest.mark.parametrize(
        "module", ["tests.lanes.whole_step", "tests.lanes.streamed", "tests.lanes.paired"]
    ),
]
OVERFLOW = "AddressSanitizer: heap-buffer-overflow"


@pytest.mark.slow
def test_accesses_are_in_bounds(module: str) -> None:
    output = run_with_sanitizer(module)
    assert "ERROR" not in output
    assert output.rstrip().endswith(ALL_IN_BOUNDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "access"), [("reads", "READ of size"), ("writes", "WRITE of size")]
)
def test_planted_access_is_found(module: str, verb: str, access: str) -> None:
    output = run_with_sanitizer(module, verb)
    assert OVERFLOW in output
    assert access in output
    assert ALL_IN_BOUNDS not in output
