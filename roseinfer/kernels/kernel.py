"""A kernel as one object: its parameters by name, the bytes that it moves, and how it is launched.

A traffic table has, for each tensor parameter, a function that returns the elements that a launch
reads and writes, counting every address once. The function takes arguments of the launch by their
names, and the tensor itself as ``own``; it has defaults for names that not every kernel with it
has. Where elements depend on a tensor's values when the kernel runs, it returns a function without
arguments. It reads no tensor itself: a CUDA graph may be capturing the launch, and the returned
function, which lives as long as the graph, must not keep activations alive. A launch does not
evaluate its table unless a launch hook reads it.

Importing this does not import Triton, which decides at its first import whether kernels are
interpreted.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, lru_cache, partial
from inspect import signature
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from roseinfer.kernels.cuda.tensor_maps import MAP_ALIGNMENT, TensorMap, Tiles, encode_map
from roseinfer.kernels.cuda.toolchain import (
    CompilationError,
    GpuProgram,
    compile_cached,
    pdl_launch,
)
from roseinfer.kernels.runtime import is_interpreted, unusable_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from roseinfer.kernels.cuda.toolchain import LaunchAttribute, Program

    Amount = int | Callable[[], int]
    """A number, or a function that returns it when the kernel runs."""
    TrafficTable = Mapping[str, Callable[..., Amount]]
    Arguments = Mapping[str, Any]
    """Arguments of a launch by parameter name."""


class Kernel:
    """A kernel's name, parameters and traffic."""

    def __init__(self, name: str, parameters: Iterable[str], table: TrafficTable) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self._names = frozenset(self.parameters)
        self._num_parameters = len(self.parameters)
        self._values: Callable[[Arguments], tuple[Any, ...]] = itemgetter(*self.parameters)
        self._table = [
            (tensor, elements, self._named_in(elements)) for tensor, elements in table.items()
        ]
        if strange := table.keys() - self._names:
            raise TypeError(f"{name}: traffic of {sorted(strange)}, which are no parameters")

    def _named_in(self, elements: Callable[..., Amount]) -> list[str]:
        """Return the parameters that a function of a traffic table takes."""
        taken = signature(elements).parameters.values()
        names = {each.name for each in taken if each.default is each.empty}
        if strange := names - self._names - {"own"}:
            raise TypeError(f"{self.name}: traffic by {sorted(strange)}, which are no parameters")
        return [each.name for each in taken if each.name in self._names | {"own"}]

    def traffic(self, arguments: Arguments) -> dict[str, Amount]:
        """Return the bytes that a launch reads and writes of each tensor parameter."""
        traffic: dict[str, Amount] = {}
        for tensor, elements, names in self._table:
            named = {**arguments, "own": arguments[tensor]}
            count = elements(**{name: named[name] for name in names})
            if count != 0:
                traffic[tensor] = _to_bytes(count, named["own"].element_size())
        return traffic

    def in_order(self, arguments: Arguments) -> tuple[Any, ...]:
        """Return arguments in the order of the parameters; raise if any is missing or unknown."""
        try:
            if len(arguments) == self._num_parameters:
                return self._values(arguments)
        except KeyError:
            pass
        missing = sorted(self._names - arguments.keys())
        unknown = sorted(arguments.keys() - self._names)
        raise TypeError(f"{self.name}: missing arguments {missing}, unknown ones {unknown}")


def numel(own: Tensor | None) -> int:
    """Return the elements of a tensor that a kernel reads or writes as a whole, once."""
    return 0 if own is None else own.numel()


def _to_bytes(elements: Amount, size: int) -> Amount:
    return elements * size if isinstance(elements, int) else lambda: elements() * size


# Compiling the kernels of a start at the same time: each by itself takes up to a second.


class _Mode(threading.local):
    """Mode of a thread."""

    compiles_only = False

    def __init__(self) -> None:
        self.compiled: set[TritonKernel] = set()
        """Kernels in Triton whose compilation has begun in the thread's last pass."""


_MODE = _Mode()


def compiles_only() -> bool:
    """Return True inside ``compile_in_parallel``, where kernels are not launched."""
    return _MODE.compiles_only


def compile_in_parallel(work: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that ``work`` launches, those in Triton in parallel; launch none.

    ``work`` reads outputs that no kernel has written, so it must decide nothing by their values.
    It is not called where nothing is compiled: without a GPU, and under Triton's interpreter.
    """
    if device.type != "cuda" or unusable_reason(device) or is_interpreted():
        return
    _MODE.compiled.clear()
    try:
        # Triton leaves its mode on if a kernel cannot be compiled.
        copy_context().run(_compile_in_parallel, work, device)
    except BaseException:
        for each in _MODE.compiled:  # else a launch would get the same failure again
            each.jit.device_caches.clear()
        raise


class _CompilerThreads(ThreadPoolExecutor):
    """Threads that compile and load kernels; to load one, some versions of Triton compile C."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(len(os.sched_getaffinity(0)))
        self._device = device

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(self._compile_and_load, compile_one)

    def _compile_and_load(self, compile_one: Callable[[], Any]) -> Any:
        compiled = compile_one()
        with torch.cuda.device(self._device):
            getattr(compiled, "run", None)  # a property that loads it when it is read
        return compiled


def _compile_in_parallel(work: Callable[[], object], device: torch.device) -> None:
    from triton import AsyncCompileMode

    with _CompilerThreads(device) as pool, AsyncCompileMode(pool):
        _MODE.compiles_only = True
        try:
            work()
        finally:
            _MODE.compiles_only = False


# Kernels in Triton.


def kernel(
    table: TrafficTable, *, do_not_specialize: Sequence[str] = (), fp_fusion: bool = True
) -> Callable[[Callable[..., None]], TritonKernel]:
    """Make a kernel of a function in Triton's language, whose first parameter is a tensor.

    Without ``fp_fusion`` the compiler fuses no multiplication with an addition, which it might do
    in one kernel and not in another that computes the same result.
    """
    return lambda function: TritonKernel(function, table, do_not_specialize, fp_fusion=fp_fusion)


@lru_cache(1 << 14)
def strides(names: str, of: tuple[int, ...]) -> Mapping[str, Any]:
    """Return strides as arguments: ``strides("x_rk", x.stride())`` are ``x_r`` and ``x_k``.

    Strides after the last name are left out.
    """
    tensor, _, dims = names.partition("_")
    return {f"{tensor}_{dim}": stride for dim, stride in zip(dims, of, strict=False)}


@cache
def _supports_pdl(device: int) -> bool:
    """Return True for NVIDIA GPUs with programmatic dependent launch: capability 9 or more."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


_num_gpus = cache(torch.cuda.device_count)


def _is_elsewhere(device: int) -> bool:
    """Return True for a GPU that is not the current one, to which kernels go.

    With a single GPU, the current one need not be queried.
    """
    return _num_gpus() > 1 and device != torch.cuda.current_device()


class TritonKernel(Kernel):
    """A kernel in Triton.

    One with the parameter EARLY can start while the previous kernel ends. It must have waited
    before it writes anything, and before it reads what another kernel of the same step has
    written. It may launch its dependents before the wait: each kernel waits for the end of the
    previous one, which has waited itself. Only a step's first kernel must wait before that, since
    others read what the previous step wrote without waiting.
    """

    def __init__(
        self,
        function: Callable[..., None],
        table: TrafficTable,
        do_not_specialize: Sequence[str],
        *,
        fp_fusion: bool,
    ) -> None:
        import triton

        self.jit: Any = triton.jit(function, do_not_specialize=list(do_not_specialize))
        self.unspecialized = do_not_specialize
        names = list(self.jit.arg_names)
        self._has_early = names[-1] == "EARLY"
        super().__init__(function.__name__, names[:-1] if self._has_early else names, table)
        self._fp_fusion = fp_fusion
        self._options = cache(self._launch_options)
        self.jit.fn.traffic = self.traffic  # where any Triton kernel may declare it

    def launch(
        self, grid: tuple[int, ...], *, num_warps: int = 4, pdl: bool = True, **arguments: Any
    ) -> Any:
        """Launch on the device of the first tensor; return the compiled kernel.

        That is None where the kernel is interpreted, and where it is only compiled.

        With ``pdl``, a kernel that can start early does so, where GPUs support it.
        """
        return self.launch_in_order(grid, self.in_order(arguments), num_warps, pdl=pdl)

    def launch_in_order(
        self, grid: tuple[int, ...], values: Sequence[Any], num_warps: int, *, pdl: bool = True
    ) -> Any:
        """Launch with the values of all parameters, in their order."""
        device = values[0].get_device()
        options, one_of_several = self._options(num_warps, device, pdl)
        if one_of_several and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.launch_in_order(grid, values, num_warps, pdl=pdl)
        if _MODE.compiles_only:
            _MODE.compiled.add(self)
            self.jit.warmup(*values, grid=grid, **options)
            return None
        return self.jit[grid](*values, **options)

    def _launch_options(
        self, num_warps: int, device: int, pdl: bool
    ) -> tuple[dict[str, Any], bool]:
        """Return Triton's options, and True if the device is one of several GPUs."""
        options: dict[str, Any] = {"num_warps": num_warps}
        if not self._fp_fusion:
            options["enable_fp_fusion"] = False
        if self._has_early:
            options["EARLY"] = early = pdl and device >= 0 and _supports_pdl(device)
            if early:
                options["launch_pdl"] = True
        return options, device >= 0 and _num_gpus() > 1

    def with_fixed(self, num_warps: int = 4, **arguments: Any) -> FixedLaunch:
        """Return a launch with fixed arguments, the last ones, which has less host time."""
        return FixedLaunch(self, num_warps, arguments)


class FixedLaunch:
    """Launch of a kernel with fixed arguments, which caches its compiled form by dtypes and device.

    Triton's own launch inspects every argument anew to find the matching specialisation, and calls
    its hooks even without any: that is most of its host time. Here the kernel is specialised on
    fixed arguments only. Unaligned tensors, launches while hooks are set, and versions of Triton
    without the private launch use the public one.
    """

    def __init__(self, kernel: TritonKernel, num_warps: int, fixed: Arguments) -> None:
        from triton import FutureKernel, knobs
        from triton.runtime import driver

        self._future = FutureKernel
        self._kernel, self._num_warps = kernel, num_warps
        count = len(kernel.parameters) - len(fixed)
        self.names = kernel.parameters[:count]
        """Parameters that a launch takes."""
        self._num_tensors = sum(name not in kernel.unspecialized for name in self.names)
        self._last = [fixed[name] for name in kernel.parameters[count:]]
        self._driver = driver
        self._hooks = knobs.runtime
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], *values: Any) -> None:
        """Launch with the first parameters: tensors, then integers that specialise nothing.

        The dtype of the first tensor is that of all but the indices; the last tensor's is that of
        the indices.
        """
        tensors = values[: self._num_tensors]
        first = tensors[0]
        device = first.get_device()
        if device >= 0 and _is_elsewhere(device):
            with torch.cuda.device(device):
                self(grid, *values)
            return
        pointer_bits = 0
        for tensor in tensors:
            pointer_bits |= tensor.data_ptr()
        aligned = pointer_bits % 16 == 0
        key = (first.dtype, tensors[-1].dtype, device)
        compiled = self._compiled.get(key) if aligned and not _MODE.compiles_only else None
        if compiled is None:
            compiled = self._kernel.launch_in_order(grid, (*values, *self._last), self._num_warps)
            if aligned and compiled is not None:  # the interpreter compiles nothing
                if isinstance(compiled, self._future):  # another thread compiles it meanwhile
                    compiled = compiled.result()
                # Not every version of Triton has all of these.
                if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
                    self._compiled[key] = compiled
        elif self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            compiled[grid](*values, *self._last)  # for hooks, such as a profiler's
        else:
            compiled.run(
                *grid, self._driver.active.get_current_stream(device), compiled.function,
                compiled.packed_metadata, None, None, None, *values, *self._last,
            )  # fmt: skip


# Kernels in CUDA C++.


_LOG = logging.getLogger("roseinfer")
if TYPE_CHECKING:
    Traffic = Iterable[tuple[Tensor, Amount]]


class Sizes(Protocol):
    """Compile-time sizes of a kernel."""

    @property
    def threads(self) -> int:
        """Threads of a program."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, in bytes."""

    def defines(self) -> dict[str, int]:
        """Return the macros for the compiler."""

    def source(self, headers: Mapping[str, str] | None = None) -> str:
        """Return the kernel's source; ``headers`` replace its own by name."""


class CudaKernel(Kernel):
    """A kernel in CUDA C++, whose argument is the structure ``Params`` of its source."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Any],
        table: TrafficTable,
        *,
        fallback: str,
        attribute: Callable[[], LaunchAttribute] = pdl_launch,
    ) -> None:
        """``parameters`` are names and C types, and ``fallback`` says what runs in its place."""
        super().__init__(name, parameters, table)
        self.fallback, self._attribute = fallback, attribute
        self._types = list(parameters.values())
        fields = list(parameters.items())
        if TensorMap in self._types:
            size = ctypes.sizeof(_structure(fields))
            fields.append(("padding", ctypes.c_ubyte * (-size % MAP_ALIGNMENT)))
        self.params = _structure(fields)
        self._maps = [at for at, kind in enumerate(self._types) if kind is TensorMap]
        self._pointers = [at for at, kind in enumerate(self._types) if kind is ctypes.c_void_p]
        self.load = cache(self._load)

    def layout_assertions(self) -> str:
        """Return lines of source that fail to compile where ``Params`` has another layout."""
        layout = {f"sizeof({_PARAMS})": ctypes.sizeof(self.params)}
        for name in self.parameters:
            layout[f"PARAMETER_OFFSET({name})"] = getattr(self.params, name).offset
        return _PARAMETER_OFFSET + "".join(
            f'static_assert({where} == {number}, "{self.name}: Python has another layout");\n'
            for where, number in layout.items()
        )

    def compile(self, sizes: Sizes, device: torch.device) -> GpuProgram:
        """Compile and load the kernel for these sizes; raise ``CompilationError`` if that fails."""
        source = "\n".join([sizes.source(), self.layout_assertions()])
        cubin = compile_cached(source, sizes.defines(), device)
        own = self._attribute()
        return GpuProgram(cubin, self.name, sizes.threads, sizes.shared_bytes, device, own)

    def _load(self, sizes: Sizes, device: torch.device) -> GpuProgram | None:
        """Return the kernel for these sizes; warn and return None if it cannot be compiled."""
        try:
            return self.compile(sizes, device)
        except CompilationError as error:
            self.warn(error)
            return None

    def warn(self, error: CompilationError) -> None:
        """Log what runs in the kernel's place, and why."""
        _LOG.warning("%s: %s", self.fallback, str(error).partition("\n")[0])

    def launch(
        self,
        program: Program,
        programs: int,
        traffic: Callable[[], Traffic] | None = None,
        /,
        **arguments: Any,
    ) -> None:
        """Launch ``programs`` programs, and call Triton's launch hooks.

        A pointer is bound to a tensor or None, a tensor map to ``Tiles``. ``traffic`` replaces the
        table, for tensors that no parameter is bound to.
        """
        values: list[Any] = [*self.in_order(arguments)]
        for at in self._pointers:
            tensor = values[at]
            values[at] = None if tensor is None else tensor.data_ptr()
        for at in self._maps:
            values[at] = encode_map(program.encode, values[at].matrix)
        params = self.params(*values)
        if _MODE.compiles_only:
            return
        if _launch_hooks_are_set():
            with _notify_launch_hooks(self.name, traffic or partial(self._pairs, arguments)):
                program.launch(params, programs)
        else:
            program.launch(params, programs)

    def _pairs(self, arguments: Arguments) -> Traffic:
        """Return the bytes read and written of each tensor."""
        tensors = {
            name: value.tensor if isinstance(value, Tiles) else value
            for name, value in arguments.items()
        }
        return [(tensors[name], amount) for name, amount in self.traffic(tensors).items()]


_PARAMS = "Params"
_PARAMETER_OFFSET = f"""
#ifdef __CUDACC_RTC__  // which has no offsetof
#define PARAMETER_OFFSET(name) (unsigned long long)__INTADDR__(&(({_PARAMS}*)0)->name)
#else
#define PARAMETER_OFFSET(name) __builtin_offsetof({_PARAMS}, name)
#endif
"""


def _structure(fields: Sequence[tuple[str, Any]]) -> type[ctypes.Structure]:
    return type(_PARAMS, (ctypes.Structure,), {"_fields_": fields})


def _launch_hooks_are_set() -> bool:
    return bool(_hooks().launch_enter_hook.calls or _hooks().launch_exit_hook.calls)


@cache
def _hooks() -> Any:
    from triton import knobs

    return knobs.runtime


@contextmanager
def _notify_launch_hooks(kernel: str, traffic: Callable[[], Traffic]) -> Iterator[None]:
    """Call Triton's launch hooks for a kernel that is launched inside the context.

    ``traffic`` is called when a hook reads ``traffic``.
    """
    from triton.compiler.compiler import LazyDict

    launch_event: Any = LazyDict({"name": kernel, "traffic": traffic})
    _hooks().launch_enter_hook(launch_event)
    yield
    _hooks().launch_exit_hook(launch_event)
