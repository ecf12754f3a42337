"""Every kernel stays within its tensors, and one that does not is found, whatever it answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl

from pytest_roseinfer.gates.work.triton_launches import Launch, interpreted_launches
from roseinfer.kernels import runtime
from tests.kernels import calls
from tests.kernels.calls import CALLS
from tests.lanes.bounds import OutOfBounds, judging
from tests.lanes.planted import FAMILIES, Planted, module_with

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="its kernels are those of the interpreter"
)
PLANTED = [
    pytest.param(family, each, id=f"{family}-{each.verb}")
    for family, both in FAMILIES.items()
    for each in both
]


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_a_kernel_stays_within_its_tensors(name: str) -> None:
    call, kernels = CALLS[name]
    with judging() as judged:
        call()
    assert sorted(judged.launches) == sorted(kernels)


@pytest.mark.parametrize(("family", "planted"), PLANTED)
@torch.inference_mode()
def test_what_is_planted_is_found(
    family: str, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, family, module_with(planted, family, tmp_path))
    line = planted.find.count("\n") and 1
    words = rf"_kernel {planted.verb} outside of {planted.parameter} \({family}.py:\d+\)"
    with judging() as judged, pytest.raises(OutOfBounds, match=words):
        CALLS[planted.call][0]()
    assert len(judged.findings) == 1, line
