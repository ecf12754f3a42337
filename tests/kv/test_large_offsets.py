"""Offsets of 2**31 elements and more, where 32-bit arithmetic would wrap.

The tensors are a few elements scattered over eight gigabytes, almost none of which are ever
touched. They begin in the middle, so that an offset that wraps to a negative number is still
inside: the test then fails instead of crashing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer.kernels.triton.clone import kv_clone_triton
from tests.kernels.triton.append_calls import Pair, index, run
from tests.kv.twins import assert_same_bits, random_words

if TYPE_CHECKING:
    from collections.abc import Iterator

MIDDLE = 2**31
FAR = 2**31
"""Distance of the last index of the dimension under test from its first.

Where the dimension has five indices its stride still fits 32 bits, and only the product does
not.
"""
ARENA = 2**32 + 2**22
VALUES_OFFSET = 2**14
AXES = {"layer": -5, "block": -4, "head": -3, "token": -2, "dim": -1}


@pytest.fixture(scope="module")
def arena(device: str) -> Iterator[torch.Tensor]:
    needed = ARENA * 2
    if device == "cuda" and torch.cuda.mem_get_info()[0] < needed + 2**28:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    try:
        flat = torch.empty(ARENA, dtype=torch.float16, device=device)
    except RuntimeError as reason:
        pytest.skip(f"cannot reserve {needed >> 30} GiB of address space: {reason}")
    yield flat
    del flat
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class WideView:
    """View of the arena that spans ``FAR`` in one dimension."""

    view: torch.Tensor
    axis: int

    @classmethod
    def make(cls, arena: torch.Tensor, shape: tuple[int, ...], axis: int, start: int) -> WideView:
        strides = list(torch.empty(shape, device="meta").stride())
        assert FAR % (shape[axis] - 1) == 0
        strides[axis] = FAR // (shape[axis] - 1)
        return cls(arena.as_strided(shape, strides, start), axis)

    def offsets_in_arena(self) -> torch.Tensor:
        """Return the arena offsets of the first, last and last but one index along the axis."""
        offsets = torch.tensor(self.view.storage_offset())
        for axis, (size, stride) in enumerate(
            zip(self.view.shape, self.view.stride(), strict=True)
        ):
            near = torch.arange(size)
            if axis == self.axis % self.view.dim():
                near = torch.tensor(sorted({0, size - 2, size - 1}))
            offsets = offsets[..., None] + near * stride
        return offsets.flatten()

    def wrapped_offsets(self) -> torch.Tensor:
        """Return the arena offsets at which 32-bit arithmetic would put the same elements."""
        start = int(self.view.storage_offset())
        relative = self.offsets_in_arena() - start
        return torch.remainder(relative + 2**31, 2**32) - 2**31 + start


def distinct(offsets: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(set(offsets.tolist())))


class Watch:
    """Check of all elements that a correct or wrapped write can reach, filled with random bits."""

    def __init__(self, arena: torch.Tensor, *views: WideView) -> None:
        offsets_in_arena = [s.offsets_in_arena() for s in views] + [
            s.wrapped_offsets() for s in views
        ]
        self.offsets_in_arena = distinct(torch.cat(offsets_in_arena)).to(arena.device)
        self.arena = arena
        self.start = random_words((len(self.offsets_in_arena),), torch.float16, 5).to(arena.device)
        self.reset()

    def reset(self) -> None:
        self.arena[self.offsets_in_arena] = self.start

    def read(self) -> torch.Tensor:
        return self.arena[self.offsets_in_arena].clone()


def wide_caches(
    arena: torch.Tensor, shape: tuple[int, ...], axis: int
) -> tuple[WideView, WideView]:
    keys = WideView.make(arena, shape, axis, MIDDLE)
    values = WideView.make(arena, shape, axis, MIDDLE + VALUES_OFFSET)
    return keys, values


CACHES = {
    "block": (2, 3, 4, 5),
    "many_blocks": (2049, 3, 4, 5),
    "head": (2, 5, 4, 5),
    "token": (2, 3, 5, 5),
    "dim": (2, 3, 4, 5),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("kernel", ["gather", "identity_pos", "full_batch"])
def test_append_at_large_cache_offsets(
    device: str, arena: torch.Tensor, name: str, kernel: str
) -> None:
    shape = CACHES[name]
    views = wide_caches(arena, shape, AXES[name.replace("many_blocks", "block")])
    watch = Watch(arena, *views)
    keys, values = (cache.view for cache in views)
    tokens = tuple(
        random_words((2, shape[1], shape[3]), torch.float16, seed).to(device) for seed in (1, 2)
    )
    block, position = shape[0] - 1, shape[2] - 1
    append_twice(kernel, (keys, values), (tokens[0], tokens[1]), block, position)
    actual = watch.read()
    watch.reset()
    for cache, new in zip((keys, values), tokens, strict=True):
        cache[block, :, position] = new[0]
        cache[block - 1, :, position] = new[1]
    assert_same_bits(actual, watch.read(), "reachable elements")


def append_twice(kernel: str, caches: Pair, tokens: Pair, block: int, position: int) -> None:
    """Append row 0 to the last block and row 1 to the one before it."""
    device = caches[0].device
    arguments = {"block_idx": index((block, block - 1), device)}
    if kernel == "full_batch":
        run(kernel, caches, tokens, pos=position, **arguments)
        return
    arguments["pos"] = index((position, position), device)
    if kernel == "gather":
        arguments["batch_idx"] = index((0, 1), device)
    run(kernel, caches, tokens, **arguments)


INPUTS = {"row": ((5, 3, 5), 0), "head": ((2, 5, 5), 1), "dim": ((2, 3, 5), 2)}


@pytest.mark.parametrize("name", INPUTS)
def test_append_from_large_input_offsets(device: str, arena: torch.Tensor, name: str) -> None:
    shape, axis = INPUTS[name]
    views = wide_caches(arena, shape, axis)
    watch = Watch(arena, *views)
    key, value = (new.view for new in views)
    caches = torch.zeros(2, 3, shape[1], 4, shape[2], dtype=torch.float16, device=device)
    last = shape[0] - 1
    rows, blocks = index((last, last - 1), device), index((0, 2), device)
    arguments = {"batch_idx": rows, "block_idx": blocks}
    run("gather", (caches[0], caches[1]), (key, value), pos=index((1, 3), device), **arguments)
    expected = torch.zeros_like(caches)
    for cache, new in zip(expected, (key, value), strict=True):
        cache[0, :, 1] = new[last]
        cache[2, :, 3] = new[last - 1]
    assert_same_bits(caches, expected, "caches")
    assert_same_bits(watch.read(), watch.start, "inputs")


CLONES = {
    "layer": (5, 3, 3, 4, 5),
    "block": (2, 3, 3, 4, 5),
    "head": (2, 3, 5, 4, 5),
    "token": (2, 3, 3, 5, 5),
    "dim": (2, 3, 3, 4, 5),
}


@pytest.mark.parametrize("name", CLONES)
@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 0)], ids=["away", "back"])
def test_clone_across_large_offsets(
    device: str, arena: torch.Tensor, name: str, source: int, target: int
) -> None:
    views = wide_caches(arena, CLONES[name], AXES[name])
    watch = Watch(arena, *views)
    keys, values = (cache.view for cache in views)
    where = {"source": index((source,), device), "target": index((target,), device)}
    kv_clone_triton(k_cache=keys, v_cache=values, **where)
    actual = watch.read()
    watch.reset()
    for cache in (keys, values):
        cache[:, target] = cache[:, source]
    assert_same_bits(actual, watch.read(), "reachable elements")


@pytest.mark.parametrize("name", CLONES)
def test_wrapped_offsets_differ_from_correct_ones(arena: torch.Tensor, name: str) -> None:
    """Wrapped and correct offsets differ, without which the tests above could not fail."""
    (keys, values) = wide_caches(arena, CLONES[name], AXES[name])
    correct = torch.cat([keys.offsets_in_arena(), values.offsets_in_arena()])
    assert len(distinct(correct)) == len(correct)
    wrapped = torch.cat([keys.wrapped_offsets(), values.wrapped_offsets()])
    assert (wrapped != correct).any()
    assert int(wrapped.min()) >= 0
    assert int(correct.max()) < ARENA
