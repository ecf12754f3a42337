"""Bounds of every kernel's accesses, and detection of accesses out of bounds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pytest_roseinfer.gates.step_work import interpreted_launches
from tests.interpreted import interpreted
from tests.kernels import calls
from tests.kernels.calls import CALLS
from tests.lanes.bounds import OutOfBounds, checking_bounds, outside
from tests.lanes.planted import FAMILIES, Planted, module_with

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_roseinfer.gates.step_work import Launch

pytestmark = interpreted
PLANTED = [
    pytest.param(family, each, id=f"{each.call} {each.verb} {each.parameter}")
    for family, planted in FAMILIES.items()
    for each in planted
]
READS = [
    pytest.param(family, each, id=f"{each.call} {each.parameter}")
    for family, planted in FAMILIES.items()
    for each in planted
    if each.verb == "reads"
]


OVER_RANKS = sorted(name for name in CALLS if "over ranks" in name)
"""Calls that write to memory of other GPUs, at addresses that they read."""


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OVER_RANKS])
@torch.inference_mode()
def test_kernel_accesses_are_in_bounds(name: str) -> None:
    call, kernels = CALLS[name]
    with checking_bounds() as report:
        call()
    assert sorted(report.launches) == sorted(kernels)


@pytest.mark.parametrize("name", OVER_RANKS)
@torch.inference_mode()
def test_all_reduce_leaves_its_tensors_only_to_send(name: str) -> None:
    with checking_bounds() as report, pytest.raises(OutOfBounds):
        CALLS[name][0]()
    (access,) = report.findings
    assert access.verb == "writes"
    assert access.where.startswith("all_reduce.py:")


def test_every_family_has_a_planted_read_and_write() -> None:
    families = {getattr(calls, name).__name__ for name in FAMILIES}
    modules = {
        module.__name__
        for module in vars(calls).values()
        if getattr(module, "__name__", "").startswith("roseinfer.kernels.triton.")
    }
    assert families == modules
    verbs = [[each.verb for each in planted] for planted in FAMILIES.values()]
    assert all(each.count("reads") == each.count("writes") > 0 for each in verbs)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("family", "planted"), PLANTED)
@torch.inference_mode()
def test_planted_access_is_found(
    family: str, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, family, module_with(planted, family, tmp_path))
    with checking_bounds() as report, pytest.raises(OutOfBounds):
        CALLS[planted.call][0]()
    assert {access.verb for access in report.findings} == {planted.verb}
    assert planted.parameter in {access.parameter for access in report.findings}
    file = tmp_path / f"{family}.py"
    lines = file.read_text().splitlines()
    for access in report.findings:
        name, _, line = access.where.partition(":")
        assert name == file.name
        assert "tl.load" in lines[int(line) - 1] or "tl.store" in lines[int(line) - 1]


@pytest.mark.sampled_cases
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from values that are not stored
@pytest.mark.parametrize(("family", "planted"), READS)
def test_planted_read_does_not_change_results(
    family: str, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No comparison of results would find it."""
    right = tensors_after(planted.call)
    monkeypatch.setattr(calls, family, module_with(planted, family, tmp_path))
    for own, wrong in zip(right, tensors_after(planted.call), strict=True):
        torch.testing.assert_close(wrong, own, rtol=0, atol=0)


@torch.inference_mode()
def tensors_after(name: str) -> list[torch.Tensor]:
    """Return all tensors that the kernels of a call get, with their final values."""
    tensors: list[torch.Tensor] = []

    def on_launch(launch: Launch) -> None:
        tensors.extend(each for each in launch.arguments.values() if isinstance(each, torch.Tensor))

    torch.manual_seed(0)
    with interpreted_launches(on_launch, nullcontext):
        CALLS[name][0]()
    return tensors


@triton.jit  # type: ignore[untyped-decorator]
def _move_kernel(source, target, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, tile)
    tl.store(target + n, tl.load(source + n), n < count)


@triton.jit
def _wild_kernel(target, address):  # type: ignore[no-untyped-def]
    tl.store(target, tl.load(tl.cast(address, tl.pointer_type(tl.int64))))


def test_another_part_of_the_storage_is_out_of_bounds() -> None:
    """The write is not carried out."""
    both = torch.zeros(2, 4)
    with checking_bounds(), pytest.raises(OutOfBounds, match="writes outside of target"):
        _move_kernel[(1,)](torch.ones(8), both[0], 8, 8)
    assert both.tolist() == [[1.0] * 4, [0.0] * 4]


def test_finding_has_the_offset_in_bytes() -> None:
    message = (
        r"^_move_kernel reads outside of source \(test_bounds.py:\d+\): lanes: 2, the first "
        r"24 bytes from the beginning of \(6,\) with strides \(1,\) in torch.float32$"
    )
    with checking_bounds(), pytest.raises(OutOfBounds, match=message):
        _move_kernel[(1,)](torch.ones(6), torch.zeros(6), 6, 8)


def test_address_from_no_parameter_is_out_of_bounds() -> None:
    value, target = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with checking_bounds(), pytest.raises(OutOfBounds, match="reads outside of every parameter"):
        _wild_kernel[(1,)](target, value.data_ptr())
    assert target.item() == 0


def test_nested_checks_are_refused() -> None:
    with checking_bounds(), pytest.raises(RuntimeError, match="checked already"), checking_bounds():
        pass


def test_bounds_of_a_view_are_its_elements() -> None:
    """Compares all addresses in and near a view with the elements that torch writes."""
    storage = torch.zeros(200)
    views = [
        storage[40:160].view(3, 8, 5)[:, 2:6],
        storage[40:160].view(3, 8, 5)[:, 2:6].transpose(0, 2),
        storage[40:160].view(3, 8, 5)[1, :, 3],
        storage[40:160].view(3, 8, 5)[::2, ::3, ::2],
        storage[40:45].expand(3, 5),
        storage[40:40],
        storage[40:41].view(()),
    ]
    addresses = np.arange(200, dtype=np.uint64) * np.uint64(4) + np.uint64(storage.data_ptr())
    for view in views:
        storage.zero_()
        view.fill_(1)
        assert outside(view, addresses, 4).tolist() == (storage == 0).tolist()


def test_access_wider_than_an_element_leaves_the_last_one() -> None:
    tensor = torch.zeros(3, dtype=torch.int32)
    addresses = np.arange(3, dtype=np.uint64) * np.uint64(4) + np.uint64(tensor.data_ptr())
    assert outside(tensor, addresses, 8).tolist() == [False, False, True]
    assert outside(tensor, addresses + np.uint64(2), 4).tolist() == [False, False, True]


def test_overlapping_elements_are_refused() -> None:
    tensor = torch.zeros(9).as_strided((3, 3), (2, 1))
    with pytest.raises(ValueError, match="overlap"):
        outside(tensor, np.zeros(1, dtype=np.uint64), 4)
