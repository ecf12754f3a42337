"""Every kernel declares the bytes that it touches, neither more nor fewer."""

from __future__ import annotations

import pytest
import torch

from roseinfer.kernels.triton import linear
from tests.interpreted import interpreted
from tests.kernels.accessed_bytes import touched_by
from tests.kernels.calls import CALLS, all_kernels

pytestmark = interpreted


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_a_kernel_declares_what_it_touches(name: str) -> None:
    call, called = CALLS[name]
    found = touched_by(call)
    assert found.kernels == called
    assert found.differing == []


def test_every_kernel_is_among_them() -> None:
    names = {kernel.name for kernel in all_kernels()}
    assert names == {kernel for _, called in CALLS.values() for kernel in called}


def test_a_declaration_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    function = linear._whole_kernel.jit.fn
    right = function.traffic
    wrong = lambda arguments: right(arguments) | {"weight": 70 * 40 * 2}  # noqa: E731
    monkeypatch.setattr(function, "traffic", wrong)
    found = touched_by(CALLS["linear"][0])
    assert found.differing == ["_whole_kernel touches 11200 bytes of weight, and declares 5600"]
