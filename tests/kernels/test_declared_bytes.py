"""Every kernel declares the bytes that it touches, neither more nor fewer."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from roseinfer.kernels import triton
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
    names = iter_modules(triton.__path__, f"{triton.__name__}.")
    modules = [import_module(each.name) for each in names]
    there = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert there == {kernel for _, called in CALLS.values() for kernel in called}


def test_a_declaration_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    function = linear._whole_kernel.fn
    right = function.traffic
    monkeypatch.setattr(function, "traffic", lambda given: right(given) | {"weight": 70 * 40 * 2})
    found = touched_by(CALLS["linear"][0])
    assert found.differing == ["_whole_kernel touches 11200 bytes of weight, and declares 5600"]
