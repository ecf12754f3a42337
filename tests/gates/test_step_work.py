"""What each counter counts, what it leaves out, and that none of them counts itself."""

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


def counted(step: Callable[[], object], **more: Any) -> Mapping[str, Mapping[str, int]]:
    return measure_work(Step(step, 1, **more), OWN, "cpu").groups


# ------------------------------------------------------------------------------------ tensors


def test_operations_by_name() -> None:
    ones = torch.ones((2, 2))
    assert tensors(lambda: ones.add(ones).add_(1).mul_(2))["operations"] == {
        "add": 1,
        "add_": 1,
        "mul_": 1,
    }


def test_new_memory_and_neither_views_nor_results_in_place() -> None:
    ones = torch.ones((2, 2))
    assert tensors(lambda: ones[0].add_(1).view(2))["operations"]
    assert "allocations" not in tensors(lambda: ones[0].add_(1).view(2))
    assert tensors(lambda: (ones + 1, ones.sum(0)))["allocations"] == {"tensors": 2}
    assert "allocations" not in tensors(lambda: torch.add(ones, ones, out=ones))
    assert "allocations" not in tensors(lambda: ones.new_empty(0))
    assert tensors(lambda: torch.tensor([1]))["allocations"] == {"tensors": 1}


def test_what_is_sparse_is_counted_like_all_else() -> None:
    found = tensors(lambda: torch.ones((2, 2)).to_sparse())["operations"]
    assert found["ones"] == 1
    assert len(found) > 1


FROM_HOST: dict[str, Callable[[], object]] = {
    "tensor": lambda: torch.tensor([1, 2, 3]),
    "as_tensor": lambda: torch.as_tensor([1, 2, 3]),
    "asarray": lambda: torch.asarray([1, 2, 3]),
    "LongTensor": lambda: torch.LongTensor([1, 2, 3]),
    "new_tensor": lambda: torch.ones((), dtype=torch.int64).new_tensor([1, 2, 3]),
    "from_numpy": lambda: torch.from_numpy(np.arange(3)),
}


@pytest.mark.parametrize("name", FROM_HOST)
def test_a_tensor_made_of_data_of_the_host_is_a_copy_to_the_device(name: str) -> None:
    assert tensors(FROM_HOST[name])["host_to_device"] == {"copies": 1, "bytes": 24}


def test_a_tensor_made_on_the_device_is_none() -> None:
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
def test_reading_values_is_a_copy_to_the_host_and_waits(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        found = tensors(READS[name])
    assert found["device_to_host"] == {"copies": 1, "bytes": 8}
    assert found["synchronisations"] == {name: 1}


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
def test_what_only_the_device_knows_is_waited_for(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        assert sum(tensors(SHAPES[name])["synchronisations"].values()) == 1


def test_an_index_without_a_mask_waits_for_nothing() -> None:
    assert "synchronisations" not in tensors(lambda: torch.ones(2)[torch.arange(2)])


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_between_devices_wait_unless_they_say_otherwise(
    non_blocking: bool, inference: bool
) -> None:
    """torch's device without memory takes the part of a GPU, and then that of its host."""

    def crossing(device: str, step: Callable[[], object]) -> list[Any]:
        with torch.inference_mode(inference):
            found = tensors(step, device)
        groups = ("host_to_device", "device_to_host", "synchronisations")
        return [found.get(group) for group in groups]

    here, there = torch.ones(2), torch.ones(2, device="meta")
    waits = None if non_blocking else {"a copy that does not say non_blocking": 1}
    once = {"copies": 1, "bytes": 8}
    for copy in (
        lambda: there.copy_(here, non_blocking),
        lambda: here.to("meta", non_blocking=non_blocking),
        lambda: here.to("meta", torch.float32, non_blocking),
    ):
        assert crossing("meta", copy) == [once, None, waits]
        assert crossing("cpu", copy) == [None, once, waits]


# -------------------------------------------------------------------- calls that leave no operation


def test_waiting_for_the_device_counts_whoever_took_hold_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def synchronize() -> None:
        """A CPU's torch has no device to wait for."""

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    taken = torch.cuda.synchronize
    assert counted(lambda: [taken() for _ in range(2)])["synchronisations"] == {
        "torch.cuda.synchronize": 2
    }


@triton.jit  # type: ignore[untyped-decorator]
def _double(numbers, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.arange(0, TILE)
    tl.store(numbers + at, 2 * tl.load(numbers + at))


def test_a_kernel_is_one_launch_and_nothing_that_its_interpreter_does(device: str) -> None:
    if device != "cpu":
        pytest.skip("with a GPU there is no interpreter")
    numbers = torch.ones(4)

    def step() -> None:
        _double[(2,)](numbers, 4)

    found = counted(step)
    assert found["triton_launches"] == {"_double": 1}
    assert found["operations"] == {}
    (call,) = found["python_calls"]
    assert call.endswith(".step")


# --------------------------------------------------------------------------------- Python's calls


class Mine:
    def method(self) -> int:
        return len([1])


def test_calls_of_own_functions_and_of_others_by_them() -> None:
    mine = Mine()
    calls = counted(lambda: [mine.method() for _ in range(3)])["python_calls"]
    assert calls["len"] == 3
    (method,) = (name for name in calls if name.endswith("method"))
    assert calls[method] == 3


def test_what_libraries_do_among_themselves_is_left_out() -> None:
    layer = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(5)])
    calls = counted(lambda: layer(torch.ones(2)))["python_calls"]
    assert sum(calls.values()) == 3, "the step, torch.ones and the layer"


def test_code_that_is_not_installed_is_own_unless_packages_are_named() -> None:
    own = OwnCode()
    assert own.is_own("tests.gates.test_step_work")
    assert not any(map(own.is_own, ("torch", "numpy.core", "json", "sys", "pytest_roseinfer", "")))
    assert not OWN.is_own("roseinfer")


# -------------------------------------------------------------- what has no business in the counts


def busy() -> object:
    return torch.ones(2).add(len([1]))


def test_tracers_and_profilers_of_others_are_neither_counted_nor_lost() -> None:
    alone = counted(busy)

    def trace(*_: object) -> None:
        len("of a tracer, as coverage is one")

    def profile(*_: object) -> None:
        len("of a profiler")

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        beside = counted(busy)
        assert sys.getprofile() is profile
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert beside == alone


def test_a_run_is_profiled_on_behind_a_count() -> None:
    def behind() -> None: ...

    with cProfile.Profile() as profiler:
        assert counted(busy)
        behind()
    profiled = {name for _, _, name in Stats(profiler).stats}  # type: ignore[attr-defined]
    assert "behind" in profiled


class Garbage:
    """Holds itself, so that only a collection finds it, whenever there is one."""

    finalised = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Garbage.finalised += 1


def test_to_count_imports_no_compiler_of_torch() -> None:
    """It takes a hundred times as long to import as a step takes to be counted."""
    found = run_python("""
        import sys

        import torch

        from pytest_roseinfer.gates.step_work import TensorWork

        work = TensorWork("cpu")
        work.count(lambda: torch.ones(2) + 1)
        print(work.counts["operations"]["add"], "torch._dynamo" in sys.modules)
    """)
    assert found.split() == ["1", "False"]


def test_garbage_is_not_collected_in_the_step() -> None:
    def step() -> None:
        Garbage()
        [[] for _ in range(100)]  # makes Python look for garbage, and is no call that it reports

    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        calls = counted(step)["python_calls"]
    finally:
        gc.set_threshold(*threshold)
    assert not [name for name in calls if name.endswith("__del__")]
    assert gc.isenabled()
    assert Garbage.finalised, "there was something to collect"


@pytest.mark.skipif(not is_interpreted(), reason="it looks at Triton's interpreter")
def test_counting_leaves_everything_as_it_was() -> None:
    interpreter: Any = sys.modules["triton.runtime.interpreter"]
    before = interpreter.InterpretedFunction.run, sys.getprofile()

    def fail() -> None:
        raise RuntimeError("in the middle of a step")

    calls = iter([busy, busy, fail])
    with pytest.raises(RuntimeError, match="in the middle"):
        counted(lambda: next(calls)())
    assert (interpreter.InterpretedFunction.run, sys.getprofile()) == before
    assert gc.isenabled()


# ------------------------------------------------------------------------ steps without a number


def test_a_step_that_does_not_repeat_itself_has_no_number() -> None:
    numbers: list[int] = []

    def growing() -> None:
        numbers.append(0)
        for number in numbers:
            abs(number)

    with pytest.raises(CannotCompare, match=r"Python calls, abs: 3 and 5"):
        counted(growing)


def test_a_step_without_a_call_of_its_own_has_none() -> None:
    with pytest.raises(CannotCompare, match="no call of elsewhere; set packages="):
        measure_work(Step(busy, 1), OwnCode(["elsewhere"]), "cpu")


def test_its_own_counters_are_counted_for_the_step_alone() -> None:
    counts = {"kept": 7, "steps": 0}

    def step() -> None:
        counts["steps"] += 1

    work = measure_work(replace(Step(step, 1), counters=lambda: counts), OWN, "cpu")
    assert work.groups["counters"] == {"kept": 0, "steps": 1}
