"""Every kernel declares the bytes that it touches, neither more nor fewer."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from roseinfer.kernels import triton
from roseinfer.kernels.kernel import TritonKernel
from roseinfer.kernels.triton import linear
from tests.interpreted import interpreted
from tests.kernels.accessed_bytes import touched_by
from tests.kernels.calls import CALLS

pytestmark = interpreted


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_a_kernel_declares_what_it_touches(name: str) -> None:
    call, called = CALLS[name]
    found = touched_by(call)
    assert found.kernels == called
    assert found.differing == []


def test_every_kernel_is_among_them() -> None:
    found = iter_modules(triton.__path__, f"{triton.__name__}.")
    modules = [import_module(each.name) for each in found]
    values = [value for module in modules for value in vars(module).values()]
    names = {value.name for value in values if isinstance(value, TritonKernel)}
    assert names == {kernel for _, called in CALLS.values() for kernel in called}


def test_a_declaration_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    function = linear._whole_kernel.jit.fn
    right = function.traffic
    wrong = lambda arguments: right(arguments) | {"weight": 70 * 40 * 2}  # noqa: E731
    monkeypatch.setattr(function, "traffic", wrong)
    found = touched_by(CALLS["linear"][0])
    assert found.differing == ["_whole_kernel touches 11200 bytes of weight, and declares 5600"]
