"""What a kernel really touches, seen by Triton's interpreter, beside what it declares."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from pytest_roseinfer.gates.step_work import DECLARATION, interpreted_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.gates.step_work import Launch


class Touched:
    """The bytes of each storage that the launches of a call declare, and those they touch."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.differing: list[str] = []
        """The parameters of which a launch touches other than it declares, in words."""
        self._reads: list[tuple[Any, int]] = []
        self._writes: list[tuple[Any, int]] = []
        self._launches: list[Launch] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        from triton.runtime import interpreter

        builder: Any = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def masked_load(built: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self._note(self._reads, ptrs, mask)
            return load(built, ptrs, mask, *rest)

        def masked_store(built: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._note(self._writes, ptrs, mask)
            return store(built, ptrs, value, mask, *rest)

        with (
            mock.patch.object(builder, "create_masked_load", masked_load),
            mock.patch.object(builder, "create_masked_store", masked_store),
            interpreted_launches(self._launched, self._running),
        ):
            yield

    def _note(self, seen: list[tuple[Any, int]], ptrs: Any, mask: Any) -> None:
        width = ptrs.get_element_ty().primitive_bitwidth // 8
        # What comes of two masks may be numbers in place of truths.
        seen.append((ptrs.data[mask.data.astype(bool)].ravel(), width))

    def _launched(self, launch: Launch) -> None:
        self.kernels.append(launch.kernel)
        self._launches.append(launch)
        self._declared = self._declarations(launch)

    def _declarations(self, launch: Launch) -> dict[int, int]:
        """Work out, before the kernel runs, what it declares of each storage."""
        declared: dict[int, int] = {}
        for name, amount in getattr(launch.function, DECLARATION)(launch.arguments).items():
            place = launch.arguments[name].untyped_storage().data_ptr()
            size = amount if isinstance(amount, int) else amount()
            declared[place] = declared.get(place, 0) + size
        return declared

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._reads.clear()
        self._writes.clear()
        yield
        launch, declared = self._launches[-1], self._declared
        storages: dict[int, tuple[int, list[str]]] = {}
        for name, tensor in launch.arguments.items():
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                storages.setdefault(storage.data_ptr(), (storage.nbytes(), []))[1].append(name)
        for place, (size, names) in storages.items():
            touched = sum(_distinct(seen, place, size) for seen in (self._reads, self._writes))
            if touched != declared.get(place, 0):
                self.differing.append(
                    f"{launch.kernel} touches {touched} bytes of {', '.join(names)}, "
                    f"and declares {declared.get(place, 0)}"
                )


def _distinct(seen: list[tuple[Any, int]], place: int, size: int) -> int:
    """Count the bytes of one storage that were touched at least once."""
    touched = np.zeros(size, dtype=bool)
    for addresses, width in seen:
        inside = addresses[(addresses >= place) & (addresses < place + size)]
        at = (inside - np.uint64(place)).astype(np.int64)
        for byte in range(width):
            touched[at + byte] = True
    return int(touched.sum())


def touched_by(call: Callable[[], object]) -> Touched:
    found = Touched()
    with found.watching():
        call()
    return found
