"""Counters of a step's work: what they count and omit, and that they do not count themselves."""

from __future__ import annotations

import cProfile
import gc
import sys
from dataclasses import replace
from pstats import Stats
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.step_work import OwnCode, Step, TensorWork, measure_work
from roseinfer.kernels.runtime import is_interpreted
from tests.python_process import run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OWN = OwnCode(["tests"])


def tensors(step: Callable[[], object], device: str = "cpu") -> dict[str, dict[str, int]]:
    work = TensorWork(device)
    work.count(step)
    return {group: dict(counts) for group, counts in work.counts.items()}


def measured_groups(
    step: Callable[[], object], **attributes: Any
) -> Mapping[str, Mapping[str, int]]:
    return measure_work(Step(step, 1, **attributes), OWN, "cpu").groups


# ------------------------------------------------------------------------------------ tensors


def test_operations_are_counted_by_name() -> None:
    ones = torch.ones((2, 2))
    assert tensors(lambda: ones.add(ones).add_(1).mul_(2))["operations"] == {
        "add": 1,
        "add_": 1,
        "mul_": 1,
    }


def test_allocations_exclude_views_and_in_place_results() -> None:
    ones = torch.ones((2, 2))
    assert tensors(lambda: ones[0].add_(1).view(2))["operations"]
    assert "allocations" not in tensors(lambda: ones[0].add_(1).view(2))
    assert tensors(lambda: (ones + 1, ones.sum(0)))["allocations"] == {"tensors": 2}
    assert "allocations" not in tensors(lambda: torch.add(ones, ones, out=ones))
    assert "allocations" not in tensors(lambda: ones.new_empty(0))
    assert tensors(lambda: torch.tensor([1]))["allocations"] == {"tensors": 1}


def test_sparse_operations_are_counted() -> None:
    counts = tensors(lambda: torch.ones((2, 2)).to_sparse())["operations"]
    assert counts["ones"] == 1
    assert len(counts) > 1


FROM_HOST: dict[str, Callable[[], object]] = {
    "tensor": lambda: torch.tensor([1, 2, 3]),
    "as_tensor": lambda: torch.as_tensor([1, 2, 3]),
    "asarray": lambda: torch.asarray([1, 2, 3]),
    "LongTensor": lambda: torch.LongTensor([1, 2, 3]),
    "new_tensor": lambda: torch.ones((), dtype=torch.int64).new_tensor([1, 2, 3]),
    "from_numpy": lambda: torch.from_numpy(np.arange(3)),
}


@pytest.mark.parametrize("name", FROM_HOST)
def test_tensor_from_host_data_counts_as_a_copy_to_the_device(name: str) -> None:
    assert tensors(FROM_HOST[name])["host_to_device"] == {"copies": 1, "bytes": 24}


def test_tensor_created_on_the_device_is_no_copy() -> None:
    assert "host_to_device" not in tensors(lambda: torch.arange(3) + torch.zeros(3))


ONE = torch.ones((), dtype=torch.int64)
READS: dict[str, Callable[[], object]] = {
    "item": lambda: ONE.item(),
    "tolist": lambda: ONE.tolist(),
    "numpy": lambda: ONE.numpy(),
    "__array__": lambda: np.asarray(ONE),
    "__bool__": lambda: bool(ONE),
    "__int__": lambda: int(ONE),
    "__float__": lambda: float(ONE),
    "__index__": lambda: [1, 2][ONE],
    "a tensor used as a number": lambda: torch.ones(3)[ONE],
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", READS)
def test_reading_values_counts_as_copy_and_synchronisation(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        counts = tensors(READS[name])
    assert counts["device_to_host"] == {"copies": 1, "bytes": 8}
    assert counts["synchronisations"] == {name: 1}


MASK = torch.tensor([True, False])
SHAPES: dict[str, Callable[[], object]] = {
    "nonzero": MASK.nonzero,
    "mask": lambda: torch.ones(2)[MASK],
    "assignment to a mask": lambda: torch.ones(2).index_put_((MASK,), torch.ones(())),
    "masked_select": lambda: torch.ones(2).masked_select(MASK),
    "unique": lambda: torch.unique(MASK),
    "equal": lambda: torch.equal(MASK, MASK),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_data_dependent_shapes_count_as_synchronisation(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        assert sum(tensors(SHAPES[name])["synchronisations"].values()) == 1


def test_index_without_a_mask_is_no_synchronisation() -> None:
    assert "synchronisations" not in tensors(lambda: torch.ones(2)[torch.arange(2)])


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_synchronise_unless_non_blocking(non_blocking: bool, inference: bool) -> None:
    """The meta device, which has no memory, stands for a GPU, and then for its host."""

    def transfer_counts(device: str, step: Callable[[], object]) -> list[Any]:
        with torch.inference_mode(inference):
            counts = tensors(step, device)
        groups = ("host_to_device", "device_to_host", "synchronisations")
        return [counts.get(group) for group in groups]

    here, there = torch.ones(2), torch.ones(2, device="meta")
    waits = None if non_blocking else {"a copy that does not say non_blocking": 1}
    one_copy = {"copies": 1, "bytes": 8}
    for copy in (
        lambda: there.copy_(here, non_blocking),
        lambda: here.to("meta", non_blocking=non_blocking),
        lambda: here.to("meta", torch.float32, non_blocking),
    ):
        assert transfer_counts("meta", copy) == [one_copy, None, waits]
        assert transfer_counts("cpu", copy) == [None, one_copy, waits]


# -------------------------------------------------------------------- calls without operations


def test_synchronize_is_counted_through_an_alias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def synchronize() -> None:
        """Do nothing, as torch does without a device."""

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    synchronize_alias = torch.cuda.synchronize
    assert measured_groups(lambda: [synchronize_alias() for _ in range(2)])["synchronisations"] == {
        "torch.cuda.synchronize": 2
    }


@triton.jit  # type: ignore[untyped-decorator]
def _double(numbers, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.arange(0, TILE)
    tl.store(numbers + at, 2 * tl.load(numbers + at))


def test_kernel_counts_as_one_launch_without_its_interpreter(device: str) -> None:
    if device != "cpu":
        pytest.skip("with a GPU there is no interpreter")
    numbers = torch.ones(4)

    def step() -> None:
        _double[(2,)](numbers, 4)

    counts = measured_groups(step)
    assert counts["triton_launches"] == {"_double": 1}
    assert counts["operations"] == {}
    (call,) = counts["python_calls"]
    assert call.endswith(".step")


# --------------------------------------------------------------------------------- Python calls


class OwnClass:
    def method(self) -> int:
        return len([1])


def test_calls_of_and_from_own_functions_are_counted() -> None:
    instance = OwnClass()
    calls = measured_groups(lambda: [instance.method() for _ in range(3)])["python_calls"]
    assert calls["len"] == 3
    (method,) = (name for name in calls if name.endswith("method"))
    assert calls[method] == 3


def test_calls_within_libraries_are_not_counted() -> None:
    layer = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(5)])
    calls = measured_groups(lambda: layer(torch.ones(2)))["python_calls"]
    assert sum(calls.values()) == 3, "expected the step, torch.ones and the layer"


def test_uninstalled_code_is_own_unless_packages_are_named() -> None:
    own = OwnCode()
    assert own.is_own("tests.gates.test_step_work")
    assert not any(map(own.is_own, ("torch", "numpy.core", "json", "sys", "pytest_roseinfer", "")))
    assert not OWN.is_own("roseinfer")


# -------------------------------------------------------------- calls that must not be counted


def busy() -> object:
    return torch.ones(2).add(len([1]))


def test_other_tracers_and_profilers_are_kept_and_not_counted() -> None:
    expected = measured_groups(busy)

    def trace(*_: object) -> None:
        len("of a tracer, as coverage is one")

    def profile(*_: object) -> None:
        len("of a profiler")

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        with_tracers = measured_groups(busy)
        assert sys.getprofile() is profile
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert with_tracers == expected


def test_profiling_continues_after_a_count() -> None:
    def later_call() -> None: ...

    with cProfile.Profile() as profiler:
        assert measured_groups(busy)
        later_call()
    profiled = {name for _, _, name in Stats(profiler).stats}  # type: ignore[attr-defined]
    assert "later_call" in profiled


class Garbage:
    """An object in a reference cycle, which only the garbage collector frees."""

    finalised = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Garbage.finalised += 1


def test_counting_does_not_import_the_torch_compiler() -> None:
    """Importing the compiler takes a hundred times as long as counting a step."""
    counts = run_python("""
        import sys

        import torch

        from pytest_roseinfer.gates.step_work import TensorWork

        work = TensorWork("cpu")
        work.count(lambda: torch.ones(2) + 1)
        print(work.counts["operations"]["add"], "torch._dynamo" in sys.modules)
    """)
    assert counts.split() == ["1", "False"]


def test_garbage_collection_is_not_counted() -> None:
    def step() -> None:
        Garbage()
        [[] for _ in range(100)]  # triggers the garbage collector, which is not reported as a call

    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        calls = measured_groups(step)["python_calls"]
    finally:
        gc.set_threshold(*threshold)
    assert not [name for name in calls if name.endswith("__del__")]
    assert gc.isenabled()
    assert Garbage.finalised, "expected a collection"


@pytest.mark.skipif(not is_interpreted(), reason="needs Triton's interpreter")
def test_counting_restores_interpreter_and_profiler() -> None:
    interpreter: Any = sys.modules["triton.runtime.interpreter"]
    before = interpreter.InterpretedFunction.run, sys.getprofile()

    def fail() -> None:
        raise RuntimeError("in the middle of a step")

    calls = iter([busy, busy, fail])
    with pytest.raises(RuntimeError, match="in the middle"):
        measured_groups(lambda: next(calls)())
    assert (interpreter.InterpretedFunction.run, sys.getprofile()) == before
    assert gc.isenabled()


# --------------------------------------------------------------------- steps without a figure


def test_growing_step_cannot_be_compared() -> None:
    numbers: list[int] = []

    def growing() -> None:
        numbers.append(0)
        for number in numbers:
            abs(number)

    with pytest.raises(CannotCompare, match=r"Python calls, abs: 3 and 5"):
        measured_groups(growing)


def test_step_without_own_calls_cannot_be_compared() -> None:
    with pytest.raises(CannotCompare, match="no call of elsewhere; set packages="):
        measure_work(Step(busy, 1), OwnCode(["elsewhere"]), "cpu")


def test_counters_of_the_engine_are_counted_per_step() -> None:
    counts = {"kept": 7, "steps": 0}

    def step() -> None:
        counts["steps"] += 1

    work = measure_work(replace(Step(step, 1), counters=lambda: counts), OWN, "cpu")
    assert work.groups["counters"] == {"kept": 0, "steps": 1}
