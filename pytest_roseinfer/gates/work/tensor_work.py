"""Counting what torch is made to do: operations, copies between devices, waits, allocations.

On a GPU, copies are those between host and device. On a CPU the host's memory stands for the
device's: a tensor made of Python's or NumPy's data counts as a copy to the device, and reading
a tensor's values as a copy back, because that is what they would be on a GPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_roseinfer.gates.work.listening import Listening
from pytest_roseinfer.gates.work.triton_launches import compiled_launches, interpreted_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.gates.work.triton_launches import Launch

_READS = {"tolist", "numpy", "item", "__array__"} | {
    f"__{kind}__" for kind in ("bool", "int", "float", "complex", "index")
}
"""Methods of a tensor that hand its values to Python."""
_NUMBERS = {"_local_scalar_dense", "item", "is_nonzero"}
"""Operations that read too: torch calls them itself where a tensor is used as a number."""
_WAITS = {"nonzero", "nonzero_numpy", "argwhere", "masked_select", "equal"} | {
    f"{kind}unique{which}" for kind in ("", "_") for which in ("2", "_dim", "_consecutive")
}
"""Operations whose result has a shape, or is a truth, that only the device knows."""
_COPIES = {"copy_", "_to_copy", "to", "cpu", "cuda"}
_MASKED = {"index", "index_put_", "index_put"}
_FROM_HOST = "lift_fresh"
"""Torch dispatches this for every tensor that is made of the host's data."""


class TensorWork(Listening):  # type: ignore[no-untyped-call]
    """Counts by group what torch does while ``count`` runs a step."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._kind = device.partition(":")[0]
        self._reading = False
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, step: Callable[[], object]) -> None:
        with (
            interpreted_launches(self._note_launch, self.deaf),
            compiled_launches(self._note_launch),
            self,
            _Reads(self),
        ):
            step()

    def _note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        self._note("operations", name)
        self._note_new_memory(name, args, kwargs, result)
        if name == _FROM_HOST:
            for tensor in filter(self._on_device, _tensors(result)):
                self._note_copy("host_to_device", tensor)
        elif self._reading:
            return
        elif name in _NUMBERS:
            self._note_read("a tensor used as a number", args[0])
        elif name in _WAITS or (name in _MASKED and _has_mask(args[1])):
            self._note("synchronisations", name)
        elif name in _COPIES:
            self._note_crossing(func, args, kwargs, result)

    @contextmanager
    def reading(self, method: str, tensor: torch.Tensor) -> Iterator[None]:
        """Note one read; the operations that it consists of are not noted as more reads."""
        self._note_read(method, tensor)
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def _note(self, group: str, name: str, times: int = 1) -> None:
        if self._listening:
            self.counts[group][name] += times

    def _note_launch(self, launch: Launch) -> None:
        self._note("triton_launches", launch.kernel)

    def _note_copy(self, direction: str, tensor: torch.Tensor) -> None:
        self._note(direction, "copies")
        self._note(direction, "bytes", tensor.numel() * tensor.element_size())

    def _note_read(self, how: str, tensor: torch.Tensor) -> None:
        if self._on_device(tensor):
            self._note_copy("device_to_host", tensor)
            self._note("synchronisations", how)

    def _note_crossing(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
        if source.device.type == result.device.type:
            return
        to_device = self._on_device(result)
        self._note_copy("host_to_device" if to_device else "device_to_host", result)
        names = [each.name for each in func._schema.arguments]
        if not {**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking"):
            self._note("synchronisations", "a copy that does not say non_blocking")

    def _note_new_memory(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        known = set() if name == _FROM_HOST else {_address(each) for each in _tensors(args, kwargs)}
        for tensor in filter(self._on_device, _tensors(result)):
            if _address(tensor) not in known and tensor.untyped_storage().nbytes():
                known.add(_address(tensor))
                self._note("allocations", "tensors")

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._kind


class _Reads(TorchFunctionMode):
    """Sees reads that are no operation: a CPU's tensors hand their values over directly."""

    def __init__(self, work: TensorWork) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and isinstance(args[0], torch.Tensor):
            with self._work.reading(name, args[0]):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in masks for index in indices)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the values; sparse ones have no memory of one piece to look at."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())
