"""Traffic declarations of kernels: the bytes that they read and write.

A declaration takes a launch's arguments by name. It returns the bytes read and written of each
tensor among them, counting every address once: as a number, or as a function without arguments
where the bytes depend on a tensor's values when the kernel runs. It reads no tensor itself: a CUDA
graph may be capturing the launch, and the function, which lives as long as the graph, must not keep
activations alive. A launch of a Triton kernel does not evaluate its declaration; other kernels
report theirs to the launch hooks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    LaunchArguments = Mapping[str, Any]
    """Arguments of a launch by parameter name."""
    TrafficDeclaration = Callable[[LaunchArguments], Mapping[str, int | Callable[[], int]]]


_Kernel = TypeVar("_Kernel")


def declare_traffic(declaration: TrafficDeclaration) -> Callable[[_Kernel], _Kernel]:
    """Set a ``triton.jit`` kernel's traffic declaration, as ``traffic`` of its Python function."""

    def declare(kernel: Any) -> Any:
        kernel.fn.traffic = declaration
        return kernel

    return declare


@contextmanager
def notify_launch_hooks(
    kernel: str, traffic: Callable[[], Sequence[tuple[Tensor, int | Callable[[], int]]]]
) -> Iterator[None]:
    """Call Triton's launch hooks for a non-Triton kernel that is launched inside the context.

    ``traffic`` lists the tensors that the kernel reads or writes, with the bytes; it is called when
    a hook reads ``traffic``.
    """
    from triton import knobs
    from triton.compiler.compiler import LazyDict

    enters, leaves = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    launch_event: Any = None
    if enters.calls or leaves.calls:
        launch_event = LazyDict({"name": kernel, "traffic": traffic})
        enters(launch_event)
    yield
    if launch_event is not None:
        leaves(launch_event)


def num_bytes(tensor: Tensor, elements: int) -> int:
    """Return the bytes of ``elements`` elements of a tensor."""
    return elements * tensor.element_size()
