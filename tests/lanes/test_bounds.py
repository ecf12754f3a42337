"""Every kernel stays within its tensors, and one that does not is found, whatever it answers."""

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
from tests.lanes.bounds import OutOfBounds, judging, outside
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
"""They write to the memory of other GPUs, whose addresses they read."""


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OVER_RANKS])
@torch.inference_mode()
def test_a_kernel_stays_within_its_tensors(name: str) -> None:
    call, kernels = CALLS[name]
    with judging() as judged:
        call()
    assert sorted(judged.launches) == sorted(kernels)


@pytest.mark.parametrize("name", OVER_RANKS)
@torch.inference_mode()
def test_a_sum_over_ranks_leaves_its_tensors_to_send_alone(name: str) -> None:
    with judging() as judged, pytest.raises(OutOfBounds):
        CALLS[name][0]()
    (sent,) = judged.findings
    assert sent.verb == "writes"
    assert sent.where.startswith("norm.py:")


def test_a_read_and_a_write_are_planted_in_every_family() -> None:
    families = {getattr(calls, name).__name__ for name in FAMILIES}
    modules = {
        module.__name__
        for module in vars(calls).values()
        if getattr(module, "__name__", "").startswith("roseinfer.kernels.triton.")
    }
    assert families == modules
    verbs = [[each.verb for each in planted] for planted in FAMILIES.values()]
    assert all(each.count("reads") == each.count("writes") > 0 for each in verbs)


@pytest.mark.parametrize(("family", "planted"), PLANTED)
@torch.inference_mode()
def test_what_is_planted_is_found(
    family: str, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, family, module_with(planted, family, tmp_path))
    with judging() as judged, pytest.raises(OutOfBounds):
        CALLS[planted.call][0]()
    assert {access.verb for access in judged.findings} == {planted.verb}
    assert planted.parameter in {access.parameter for access in judged.findings}
    file = tmp_path / f"{family}.py"
    lines = file.read_text().splitlines()
    for access in judged.findings:
        name, _, line = access.where.partition(":")
        assert name == file.name
        assert "tl.load" in lines[int(line) - 1] or "tl.store" in lines[int(line) - 1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what is not stored
@pytest.mark.parametrize(("family", "planted"), READS)
def test_what_is_read_changes_no_answer(
    family: str, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no comparison of answers finds it."""
    right = after(planted.call)
    monkeypatch.setattr(calls, family, module_with(planted, family, tmp_path))
    for own, wrong in zip(right, after(planted.call), strict=True):
        torch.testing.assert_close(wrong, own, rtol=0, atol=0)


@torch.inference_mode()
def after(name: str) -> list[torch.Tensor]:
    """Return what every tensor holds that the kernels of a call are handed, when they have run."""
    handed: list[torch.Tensor] = []

    def launched(launch: Launch) -> None:
        handed.extend(each for each in launch.arguments.values() if isinstance(each, torch.Tensor))

    torch.manual_seed(0)
    with interpreted_launches(launched, nullcontext):
        CALLS[name][0]()
    return handed


@triton.jit  # type: ignore[untyped-decorator]
def _move_kernel(source, target, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, tile)
    tl.store(target + n, tl.load(source + n), n < count)


@triton.jit
def _wild_kernel(target, address):  # type: ignore[no-untyped-def]
    tl.store(target, tl.load(tl.cast(address, tl.pointer_type(tl.int64))))


def test_what_lies_in_another_part_of_a_storage_is_out_of_bounds() -> None:
    """And it is not written."""
    both = torch.zeros(2, 4)
    with judging(), pytest.raises(OutOfBounds, match="writes outside of target"):
        _move_kernel[(1,)](torch.ones(8), both[0], 8, 8)
    assert both.tolist() == [[1.0] * 4, [0.0] * 4]


def test_a_finding_tells_how_far_it_was() -> None:
    words = (
        r"^_move_kernel reads outside of source \(test_bounds.py:\d+\): lanes: 2, the first "
        r"24 bytes from the beginning of \(6,\) with strides \(1,\) in torch.float32$"
    )
    with judging(), pytest.raises(OutOfBounds, match=words):
        _move_kernel[(1,)](torch.ones(6), torch.zeros(6), 6, 8)


def test_an_address_that_no_parameter_gave_is_out_of_bounds() -> None:
    there, target = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with judging(), pytest.raises(OutOfBounds, match="reads outside of every parameter"):
        _wild_kernel[(1,)](target, there.data_ptr())
    assert target.item() == 0


def test_launches_are_not_judged_twice() -> None:
    with judging(), pytest.raises(RuntimeError, match="judged already"), judging():
        pass


def test_the_elements_of_a_view_are_its_own() -> None:
    """Every place about a view is asked for, and its elements are those that torch writes."""
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
    places = np.arange(200, dtype=np.uint64) * np.uint64(4) + np.uint64(storage.data_ptr())
    for view in views:
        storage.zero_()
        view.fill_(1)
        assert outside(view, places, 4).tolist() == (storage == 0).tolist()


def test_an_access_that_is_wider_than_an_element_leaves_the_last_one() -> None:
    tensor = torch.zeros(3, dtype=torch.int32)
    places = np.arange(3, dtype=np.uint64) * np.uint64(4) + np.uint64(tensor.data_ptr())
    assert outside(tensor, places, 8).tolist() == [False, False, True]
    assert outside(tensor, places + np.uint64(2), 4).tolist() == [False, False, True]


def test_elements_that_overlap_are_refused() -> None:
    tensor = torch.zeros(9).as_strided((3, 3), (2, 1))
    with pytest.raises(ValueError, match="overlap"):
        outside(tensor, np.zeros(1, dtype=np.uint64), 4)
