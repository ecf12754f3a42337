"""Noting what torch operations and Triton kernels move, in a step or in the capture of a graph."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.listening import Listening
from pytest_roseinfer.gates.work.moved.operation_bytes import address, operation_moves, tensors_in
from pytest_roseinfer.gates.work.triton_launches import (
    DECLARATION,
    compiled_launches,
    interpreted_launches,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from torch import Tensor

    from pytest_roseinfer.gates.work.triton_launches import Launch

    Amount = int | Callable[[], int]


class Move(NamedTuple):
    """Bytes that one operation or kernel moves of one tensor's memory."""

    by: str
    address: int
    amount: Amount
    """A function of nothing where it depends on what tensors hold when the kernel runs."""

    def settled(self) -> Move:
        amount = self.amount
        return self if isinstance(amount, int) else self._replace(amount=int(amount()))


class ByteRecorder(Listening):
    """Notes what is moved on a kind of device while it is entered."""

    def __init__(self, device_type: str, *, captures: bool = False) -> None:
        """In a capture nothing runs yet, so that amounts stay open which depend on values."""
        super().__init__()
        self.moves: list[Move] = []
        self.not_counted: Counter[str] = Counter()
        self._device_type = device_type
        self._captures = captures
        self._watch = ExitStack()

    def __enter__(self) -> Self:
        self._watch.enter_context(interpreted_launches(self._note_launch, self.deaf))
        self._watch.enter_context(compiled_launches(self._note_launch))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watch.close()

    def note(self, move: Move) -> None:
        """Note a move that happens now."""
        with self.deaf():
            self.moves.append(move if self._captures else move.settled())

    def _note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        found = operation_moves(func, args, kwargs, result)
        if found is not None:
            for tensor, amount in found:
                self._note_tensor(name, tensor, amount)
        elif any(map(self._on_device, tensors_in((args, kwargs, result)))):
            self.not_counted[f"{func.namespace}::{name}"] += 1

    def _note_launch(self, launch: Launch) -> None:
        if launch.moves is not None:
            for tensor, amount in launch.moves():
                self._note_tensor(launch.kernel, tensor, amount)
            return
        declaration = getattr(launch.function, DECLARATION, None)
        if declaration is None:
            self.not_counted[launch.kernel] += 1
            return
        for parameter, amount in declaration(launch.arguments).items():
            tensor = launch.arguments.get(parameter)
            if not isinstance(tensor, torch.Tensor):
                raise CannotCompare(
                    f"{launch.kernel} declares what it moves of {parameter!r}, which is no tensor "
                    "among its arguments"
                )
            self._note_tensor(launch.kernel, tensor, amount)

    def _note_tensor(self, by: str, tensor: Tensor, amount: Amount) -> None:
        if self._on_device(tensor):
            self.note(Move(by, address(tensor), amount))

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type
