"""Launching kernels: Triton's private way and its public one end alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer.kernels.runtime import KernelLauncher, is_interpreted, unusable_reason

if TYPE_CHECKING:
    from collections.abc import Callable

SCALARS, SHAPE = (3, 5), (7, 11)
GRID = (2, 1, 1)


class Compiled:
    """A kernel in the form that Triton's first launch returns, noting how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launches.append(("public", grid, args))

    def run(self, x: int, y: int, z: int, _stream: int, *rest: Any) -> None:
        assert rest[:5] == ("function", "metadata", None, None, None)
        self.launches.append(("private", (x, y, z), rest[5:]))


class Kernel:
    """A kernel as Triton's decorator makes it."""

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.launches = compiled, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*_: Any, num_warps: int) -> Any:
            assert (grid, num_warps) == (GRID, 4)
            self.launches += 1
            return self.compiled

        return launch


def launcher_of(compiled: Any, hooks: list[Any]) -> tuple[KernelLauncher, Kernel]:
    kernel = Kernel(compiled)
    launcher: Any = KernelLauncher(kernel)
    launcher._hooks = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=hooks),
        launch_exit_hook=SimpleNamespace(calls=[]),
    )
    active = SimpleNamespace(get_current_stream=lambda _: 0)
    launcher._driver = SimpleNamespace(active=active)
    return launcher, kernel


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.zeros(4), torch.zeros(4, dtype=torch.int64)]


def test_both_ways_are_handed_the_same(tensors: list[torch.Tensor]) -> None:
    launches: list[tuple[Any, ...]] = []
    hooks: list[Any] = []
    launcher, kernel = launcher_of(Compiled(launches), hooks)
    launcher(GRID, tensors, SCALARS, SHAPE, 4)
    assert (kernel.launches, launches) == (1, [])
    launcher(GRID, tensors, SCALARS, SHAPE, 4)
    hooks.append(print)
    launcher(GRID, tensors, SCALARS, SHAPE, 4)
    (private, *by_private), (public, *by_public) = launches
    assert (private, public) == ("private", "public")
    assert str(by_private) == str(by_public) == str([GRID, (*tensors, *SCALARS, *SHAPE)])
    assert kernel.launches == 1


def test_a_triton_without_the_private_way_is_launched_by_the_public_one(
    tensors: list[torch.Tensor],
) -> None:
    launcher, kernel = launcher_of(SimpleNamespace(run=print), [])
    for _ in range(3):
        launcher(GRID, tensors, SCALARS, SHAPE, 4)
    assert kernel.launches == 3


def test_unaligned_tensors_take_the_public_way(tensors: list[torch.Tensor]) -> None:
    launches: list[tuple[Any, ...]] = []
    launcher, kernel = launcher_of(Compiled(launches), [])
    for _ in range(2):
        launcher(GRID, [torch.zeros(5)[1:], tensors[1]], SCALARS, SHAPE, 4)
    assert (kernel.launches, launches) == (2, [])


@pytest.mark.skipif("not torch.cuda.is_available()", reason="the interpreter compiles nothing")
def test_both_ways_write_the_same_bits(device: str) -> None:
    from roseinfer.kernels.triton import append

    keys = torch.randn(6, 2, 8, device=device)
    blocks = torch.arange(1, 7, device=device)
    written = []
    for hooks in ([], [lambda *_: None]):
        cache = torch.zeros(2, 8, 2, 4, 8, device=device)
        for _ in range(2):  # the first compiles
            append.launch_full_batch(cache[0], cache[1], keys, keys, blocks, 1)
        launcher: Any = append._full_batch
        assert launcher._compiled
        listening = SimpleNamespace(
            launch_enter_hook=SimpleNamespace(calls=hooks),
            launch_exit_hook=SimpleNamespace(calls=[]),
        )
        real, launcher._hooks = launcher._hooks, listening
        try:
            append.launch_full_batch(cache[0], cache[1], keys, keys, blocks, 2)
        finally:
            launcher._hooks = real
        written.append(cache)
    assert written[0].any()
    assert torch.equal(*written)


def test_where_kernels_can_run() -> None:
    assert (unusable_reason(torch.device("cpu")) == "") == is_interpreted()
    assert unusable_reason(torch.device("cuda")) == ""
    assert "Triton compiles nothing for meta" in unusable_reason(torch.device("meta"))
