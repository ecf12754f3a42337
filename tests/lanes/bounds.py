"""Bounds checks of every access of interpreted kernels, by the parameter that its pointer is from.

Pointers that a kernel gets carry the number of their parameter in unused address bits. Adding
offsets does not change it. An access is out of bounds if it is not of an element of that parameter:
also if it is in another tensor of the launch, in the storage of which the parameter is a view, or
between the elements of a view. Masked lanes access nothing. Accesses out of bounds are not carried
out, and the launch raises when it ends.
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
"""Mask that removes a parameter's number from a pointer."""


class OutOfBounds(AssertionError):
    """A kernel accesses memory outside of its parameters."""


class Access(NamedTuple):
    """Loads or stores of one line of a kernel, in one of its programs."""

    kernel: str
    verb: str
    parameter: str
    where: str
    """File and line."""

    def __str__(self) -> str:
        return f"{self.kernel} {self.verb} outside of {self.parameter} ({self.where})"


class BoundsReport:
    """Launches of kernels, and their accesses out of bounds."""

    def __init__(self) -> None:
        self.launches: dict[str, int] = {}
        """Number of launches, by kernel."""
        self.findings: dict[Access, str] = {}
        """Details of the first occurrence of an access; a test may have caught the error."""


class _Memory:
    """Replacement of the interpreter's memory, with numbers of parameters in its pointers."""

    def __init__(self, real: Any, report: BoundsReport) -> None:
        self._real = real
        self._report = report
        self._kernel = ""
        self._findings: dict[Access, str] = {}
        """Accesses of this launch out of bounds."""
        self._names: list[str] = []
        """Names of the parameters that are tensors, in order."""
        self._tensors: list[torch.Tensor] = []
        """Tensors turned into pointers so far."""

    def begin(self, launch: Launch) -> None:
        assert launch.function is not None
        self._kernel = launch.kernel
        self._tensors, self._findings = [], {}
        parameters = inspect.signature(launch.function).parameters
        self._names = [
            name for name in parameters if hasattr(launch.arguments.get(name), "data_ptr")
        ]

    def end(self) -> None:
        """Raise if this launch had accesses out of bounds."""
        self._report.findings = self._findings | self._report.findings
        if self._findings:
            raise OutOfBounds(
                "\n".join(f"{each}: {first}" for each, first in self._findings.items())
            )

    def number(self, tensor: torch.Tensor, pointer: Any) -> Any:
        """Put a parameter's number into its pointer; 0 means no parameter."""
        self._tensors.append(tensor)
        pointer.handle.data |= np.uint64(len(self._tensors) << _FREE_FROM)
        return pointer

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        width = np.dtype(dtype).itemsize
        inside = self._check("reads", pointers, mask, width)
        return self._real.load(pointers & ADDRESS, inside, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        inside = self._check("writes", pointers, mask, values.dtype.itemsize)
        return self._real.store(pointers & ADDRESS, values, inside)

    def _check(self, verb: str, pointers: Any, mask: Any, width: int) -> Any:
        """Return the mask without lanes that are out of bounds, and record those."""
        mask = mask.astype(bool)  # combined masks may be integers
        active = pointers[mask]
        if not active.size:
            return mask
        numbers = active >> np.uint64(_FREE_FROM)
        wrong = np.zeros(active.shape, dtype=bool)
        for number in np.unique(numbers).tolist():
            own = numbers == number
            wrong[own] = self._out_of_bounds(verb, number, active[own] & ADDRESS, width)
        if wrong.any():
            mask[mask] = ~wrong
        return mask

    def _out_of_bounds(
        self, verb: str, number: int, addresses: NDArray[np.uint64], width: int
    ) -> NDArray[np.bool_]:
        """Return which accesses are not of the parameter with this number, and record them."""
        if not 0 < number <= len(self._tensors):
            self._record(verb, "every parameter", f"lanes: {addresses.size}")
            return np.ones(addresses.shape, dtype=bool)
        tensor = self._tensors[number - 1]
        invalid = outside(tensor, addresses, width)
        if invalid.any():
            distance = (addresses[invalid].min() - np.uint64(tensor.data_ptr())).astype(np.int64)
            self._record(
                verb,
                self._names[number - 1],
                f"lanes: {invalid.sum()}, the first {distance} bytes from the beginning of "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} in {tensor.dtype}",
            )
        return invalid

    def _record(self, verb: str, parameter: str, details: str) -> None:
        self._findings.setdefault(Access(self._kernel, verb, parameter, _line_of_kernel()), details)


def outside(tensor: torch.Tensor, addresses: NDArray[np.uint64], width: int) -> NDArray[np.bool_]:
    """Return for each access of ``width`` bytes whether it leaves the elements of a tensor."""
    first = (addresses - np.uint64(tensor.data_ptr())).astype(np.int64)
    size = tensor.element_size()
    return _outside_elements(tensor, first // size) | _outside_elements(
        tensor, (first + (width - 1)) // size
    )


def _outside_elements(tensor: torch.Tensor, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each offset, in elements from a tensor's first, whether it has none there."""
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
        return np.ones(offsets.shape, dtype=bool)
    remainder = offsets.copy()
    for stride, size in reversed(dims):
        remainder -= np.clip(remainder // stride, 0, size - 1) * stride
    return np.not_equal(remainder, 0)


def _line_of_kernel() -> str:
    """Return the innermost source line that is neither in the interpreter nor in this module."""
    import triton

    parts = triton, pytest_roseinfer.run.interpreter
    skipped = __file__, *(str(Path(str(part.__file__)).parent) for part in parts)
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(skipped):
        assert frame.f_back is not None
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def checking_bounds() -> Iterator[BoundsReport]:
    """Check every launch of an interpreted kernel; accesses out of bounds raise at its end."""
    from triton.runtime import interpreter

    if isinstance(interpreter._interpreter, _Memory):
        raise RuntimeError("launches are checked already")
    report = BoundsReport()
    memory = _Memory(interpreter._interpreter, report)
    convert: Any = interpreter._implicit_cvt

    def convert_argument(argument: Any) -> Any:
        pointer = convert(argument)
        return memory.number(argument, pointer) if hasattr(argument, "data_ptr") else pointer

    @contextmanager
    def running() -> Iterator[None]:
        try:
            yield
        finally:  # another error may follow from a load that was not carried out
            memory.end()

    def on_launch(launch: Launch) -> None:
        report.launches[launch.kernel] = report.launches.get(launch.kernel, 0) + 1
        memory.begin(launch)

    with (
        mock.patch.object(interpreter, "_interpreter", memory),
        mock.patch.object(interpreter, "_implicit_cvt", convert_argument),
        interpreted_launches(on_launch, running),
    ):
        yield report
