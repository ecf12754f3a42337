"""Judging every access of interpreted kernels by the tensor whose pointer it was made from.

The pointers that a kernel is handed carry, in bits that addresses leave free, the number of the
parameter that they came from. Offsets do not change it. So an access is out of bounds when it is
not of an element of that very parameter: whether it lies in another tensor of the launch, in the
storage of which the parameter is a view, or between the elements of a view. Lanes that are masked
off touch nothing. What is out of bounds is not carried out, and the launch raises when it ends.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

import pytest_roseinfer.run.interpreter
from pytest_roseinfer.gates.step_work import interpreted_launches

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from numpy.typing import NDArray

    from pytest_roseinfer.gates.step_work import Launch

_FREE_FROM = 48
"""Addresses of processes have fewer bits."""
ADDRESS = np.uint64((1 << _FREE_FROM) - 1)
"""Takes a parameter's number off a pointer."""


class OutOfBounds(AssertionError):
    """A kernel reads or writes what its parameter does not hold."""


class Access(NamedTuple):
    """Loads or stores of one line of a kernel, in one of its programs."""

    kernel: str
    verb: str
    parameter: str
    where: str
    """File and line."""

    def __str__(self) -> str:
        return f"{self.kernel} {self.verb} outside of {self.parameter} ({self.where})"


class Judged:
    """What was launched, and what was out of bounds."""

    def __init__(self) -> None:
        self.launches: dict[str, int] = {}
        """By kernel."""
        self.findings: dict[Access, str] = {}
        """With how it was when it was first seen. Who launched may have caught what was raised."""


class _Memory:
    """Stands for the interpreter's memory; its pointers carry numbers of parameters."""

    def __init__(self, real: Any, judged: Judged) -> None:
        self._real = real
        self._judged = judged
        self._kernel = ""
        self._found: dict[Access, str] = {}
        """In this launch."""
        self._names: list[str] = []
        """Of the parameters that are tensors, in order."""
        self._tensors: list[torch.Tensor] = []
        """Those of them that were turned into pointers already."""

    def begin(self, launch: Launch) -> None:
        assert launch.function is not None
        self._kernel = launch.kernel
        self._tensors, self._found = [], {}
        parameters = inspect.signature(launch.function).parameters
        self._names = [
            name for name in parameters if hasattr(launch.arguments.get(name), "data_ptr")
        ]

    def end(self) -> None:
        """Raise if something was found in this launch."""
        self._judged.findings = self._found | self._judged.findings
        if self._found:
            raise OutOfBounds("\n".join(f"{each}: {first}" for each, first in self._found.items()))

    def number(self, tensor: torch.Tensor, pointer: Any) -> Any:
        """Have the pointer to a parameter carry its number; 0 is of nothing."""
        self._tensors.append(tensor)
        pointer.handle.data |= np.uint64(len(self._tensors) << _FREE_FROM)
        return pointer

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        width = np.dtype(dtype).itemsize
        inside = self._judge("reads", pointers, mask, width)
        return self._real.load(pointers & ADDRESS, inside, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        inside = self._judge("writes", pointers, mask, values.dtype.itemsize)
        return self._real.store(pointers & ADDRESS, values, inside)

    def _judge(self, verb: str, pointers: Any, mask: Any, width: int) -> Any:
        """Return the mask without the lanes that are out of bounds, and note those."""
        mask = mask.astype(bool)  # what comes of two masks may be numbers in place of truths
        asked = pointers[mask]
        if not asked.size:
            return mask
        numbers = asked >> np.uint64(_FREE_FROM)
        wrong = np.zeros(asked.shape, dtype=bool)
        for number in np.unique(numbers).tolist():
            own = numbers == number
            wrong[own] = self._strange(verb, number, asked[own] & ADDRESS, width)
        if wrong.any():
            mask[mask] = ~wrong
        return mask

    def _strange(
        self, verb: str, number: int, addresses: NDArray[np.uint64], width: int
    ) -> NDArray[np.bool_]:
        """Tell which accesses are not of the parameter with this number, and note them."""
        if not 0 < number <= len(self._tensors):
            self._note(verb, "every parameter", f"lanes: {addresses.size}")
            return np.ones(addresses.shape, dtype=bool)
        tensor = self._tensors[number - 1]
        strange = outside(tensor, addresses, width)
        if strange.any():
            away = (addresses[strange].min() - np.uint64(tensor.data_ptr())).astype(np.int64)
            self._note(
                verb,
                self._names[number - 1],
                f"lanes: {strange.sum()}, the first {away} bytes from the beginning of "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} in {tensor.dtype}",
            )
        return strange

    def _note(self, verb: str, parameter: str, how: str) -> None:
        self._found.setdefault(Access(self._kernel, verb, parameter, _line_of_kernel()), how)


def outside(tensor: torch.Tensor, addresses: NDArray[np.uint64], width: int) -> NDArray[np.bool_]:
    """Tell of each access of so many bytes whether it leaves the elements of a tensor."""
    first = (addresses - np.uint64(tensor.data_ptr())).astype(np.int64)
    size = tensor.element_size()
    return _is_no_element(tensor, first // size) | _is_no_element(
        tensor, (first + (width - 1)) // size
    )


def _is_no_element(tensor: torch.Tensor, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell of places, counted in elements from a tensor's first one, whether it has none there."""
    dims = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if stride and size > 1
    )
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            raise ValueError(f"elements of {tensor.shape} by {tensor.stride()} overlap")
        reach += stride * (size - 1)
    if not tensor.numel():
        return np.ones(places.shape, dtype=bool)
    left = places.copy()
    for stride, size in reversed(dims):
        left -= np.clip(left // stride, 0, size - 1) * stride
    return np.not_equal(left, 0)


def _line_of_kernel() -> str:
    """Return where the innermost function stands that is neither the interpreter's nor of here."""
    import triton

    parts = triton, pytest_roseinfer.run.interpreter
    passed = __file__, *(str(Path(str(part.__file__)).parent) for part in parts)
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(passed):
        assert frame.f_back is not None
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def judging() -> Iterator[Judged]:
    """Judge every launch of an interpreted kernel; one that is out of bounds raises at its end."""
    from triton.runtime import interpreter

    if isinstance(interpreter._interpreter, _Memory):
        raise RuntimeError("launches are judged already")
    judged = Judged()
    memory = _Memory(interpreter._interpreter, judged)
    convert: Any = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        made = convert(argument)
        return memory.number(argument, made) if hasattr(argument, "data_ptr") else made

    @contextmanager
    def running() -> Iterator[None]:
        try:
            yield
        finally:  # what a launch breaks by may come of a load that was not carried out
            memory.end()

    def launched(launch: Launch) -> None:
        judged.launches[launch.kernel] = judged.launches.get(launch.kernel, 0) + 1
        memory.begin(launch)

    with (
        mock.patch.object(interpreter, "_interpreter", memory),
        mock.patch.object(interpreter, "_implicit_cvt", converted),
        interpreted_launches(launched, running),
    ):
        yield judged
