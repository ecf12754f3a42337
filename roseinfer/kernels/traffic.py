"""How a kernel says what it moves, for those who count bytes.

A declaration takes a launch's arguments by name. It returns the bytes that are read and written
of each tensor among them, every place once, as a number; or as a function of nothing, where they
depend on what a tensor holds when the kernel runs. It reads no tensor itself: a launch may be one
that a CUDA graph captures, and such a function, kept as long as the graph, holds no activations.
Nothing asks when a kernel of Triton is launched; one of another kind says so itself.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

if TYPE_CHECKING:
    Given = Mapping[str, Any]


if TYPE_CHECKING:
    "The arguments of a launch by parameter."


if TYPE_CHECKING:
    Declaration = Callable[[Given], Mapping[str, int | Callable[[], int]]]


_Kernel = TypeVar("_Kernel")


def moves(declaration: Declaration) -> Callable[[_Kernel], _Kernel]:
    """Declare what a ``triton.jit`` kernel moves, as attribute ``moves`` of its Python function."""

    def declare(kernel: Any) -> Any:
        kernel.fn.moves = declaration
        return kernel

    return declare


@contextmanager
def announced(
    kernel: str, moved: Callable[[], Sequence[tuple[Tensor, int | Callable[[], int]]]]
) -> Iterator[None]:
    """Tell Triton's launch hooks of a kernel that is not Triton's and is launched meanwhile.

    ``moved`` lists the tensors that it reads or writes, with the bytes; it is called if somebody
    asks for ``moves``.
    """
    from triton import knobs
    from triton.compiler.compiler import LazyDict

    enters, leaves = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    told: Any = None
    if enters.calls or leaves.calls:
        told = LazyDict({"name": kernel, "moves": moved})
        enters(told)
    yield
    if told is not None:
        leaves(told)


def taken(tensor: Tensor, elements: int) -> int:
    """Return the bytes of so many elements of a tensor."""
    return elements * tensor.element_size()
