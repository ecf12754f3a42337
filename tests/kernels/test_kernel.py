"""Launching kernels: arguments by name, and Triton's private way and its public one end alike."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import threading
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton.language as tl
from triton import FutureKernel
from triton.runtime._async_compile import active_mode

from roseinfer.kernels.kernel import (
    CudaKernel,
    FixedLaunch,
    TritonKernel,
    compile_in_parallel,
    compiles_only,
    kernel,
    numel,
    strides,
)
from roseinfer.kernels.runtime import is_interpreted, unusable_reason
from tests.interpreted import interpreted
from tests.kernels.calls import all_kernels
from tests.kernels.cuda.whole_step.emulated import COMPILER

if TYPE_CHECKING:
    from collections.abc import Callable

GRID = (2, 1, 1)


def _copied(n: int) -> int:
    return n


def _indices_read(index: torch.Tensor) -> Callable[[], int]:
    return lambda: int(index[0])


@kernel(
    {"source": _copied, "target": _copied, "index": _indices_read},
    do_not_specialize=["begin", "n"],
)
def _copy_kernel(source, target, index, begin, n, s_r, t_r, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ARG001, N803
    at = tl.arange(0, TILE)
    inside = at < n
    tl.store(target + at * t_r, tl.load(source + (begin + at) * s_r, inside), inside)


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


class Jit:
    """A kernel as Triton's decorator makes it, noting what it is launched with."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.launches: list[tuple[Any, ...]] = []
        self.compilations: list[tuple[Any, ...]] = []
        self.device_caches: dict[int, str] = {}

    def warmup(self, *args: Any, grid: tuple[int, ...], num_warps: int) -> None:
        assert (grid, num_warps) == (GRID, 4)
        self.compilations.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, num_warps: int) -> Any:
            assert (grid, num_warps) == (GRID, 4)
            self.launches.append(args)
            return self.compiled

        return launch


def fixed_launch(
    monkeypatch: pytest.MonkeyPatch, compiled: Any, hooks: list[Any]
) -> tuple[FixedLaunch, Jit]:
    jit = Jit(compiled)
    monkeypatch.setattr(_copy_kernel, "jit", jit)
    fixed: Any = _copy_kernel.with_fixed(TILE=11, t_r=7, s_r=5)
    fixed._hooks = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=hooks),
        launch_exit_hook=SimpleNamespace(calls=[]),
    )
    active = SimpleNamespace(get_current_stream=lambda _: 0)
    fixed._driver = SimpleNamespace(active=active)
    return fixed, jit


@pytest.fixture
def values() -> list[Any]:
    return [torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int64), 3, 2]


def test_both_ways_are_handed_the_same(monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> None:
    launches: list[tuple[Any, ...]] = []
    hooks: list[Any] = []
    fixed, jit = fixed_launch(monkeypatch, Compiled(launches), hooks)
    fixed(GRID, *values)
    assert launches == []
    fixed(GRID, *values)
    hooks.append(print)
    fixed(GRID, *values)
    (private, *by_private), (public, *by_public) = launches
    assert (private, public) == ("private", "public")
    assert str(by_private) == str(by_public) == str([GRID, (*values, 5, 7, 11)])
    (first,) = jit.launches
    assert str(first) == str((*values, 5, 7, 11))


GPU = torch.device("cuda")


def test_compile_in_parallel_launches_nothing_in_its_thread(
    monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    monkeypatch.setattr("roseinfer.kernels.kernel.is_interpreted", lambda: False)
    launches: list[tuple[Any, ...]] = []
    fixed, jit = fixed_launch(monkeypatch, Compiled(launches), [])
    fixed(GRID, *values)  # from here on it launches by itself what Triton has compiled
    program = Copies()
    arguments = {"scale": 0.5, "pitch": 7, "source": values[0], "target": None, "n": 3}

    def work() -> None:
        fixed(GRID, *values)
        _COPY.launch(program, 4, **arguments)
        assert (launches, program.launches) == ([], [])
        other = threading.Thread(target=fixed, args=(GRID, *values))
        other.start()
        other.join()
        assert len(launches) == 1

    compile_in_parallel(work, GPU)
    assert str(jit.compilations) == str(jit.launches)
    fixed(GRID, *values)
    _COPY.launch(program, 4, **arguments)
    assert (len(launches), len(program.launches)) == (2, 1)


def test_compiled_kernels_are_loaded_by_the_thread_that_compiles_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roseinfer.kernels.kernel.is_interpreted", lambda: False)
    loaded: list[tuple[torch.device, threading.Thread]] = []

    class Device(nullcontext[None]):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            loaded.append((device, threading.current_thread()))

    class Lazy:
        loaded = False

        @property
        def run(self) -> None:
            self.loaded = True

    monkeypatch.setattr(torch.cuda, "device", Device)
    ready: list[Lazy] = []

    def work() -> None:
        mode = active_mode.get()
        assert mode is not None
        for name in ("first", "second"):
            mode.submit(name, Lazy, ready.append)

    compile_in_parallel(work, GPU)
    assert [one.loaded for one in ready] == [True] * 2
    assert [device for device, _ in loaded] == [GPU] * 2
    assert threading.current_thread() not in [thread for _, thread in loaded]


def test_kernel_that_cannot_be_compiled_leaves_launches_as_they_were(
    monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    """Triton 3.7 caches the failure with the kernel's variants, and raises it at each launch."""
    monkeypatch.setattr("roseinfer.kernels.kernel.is_interpreted", lambda: False)
    fixed, jit = fixed_launch(monkeypatch, Compiled([]), [])

    def work() -> None:
        fixed(GRID, *values)
        jit.device_caches[0] = "a failure"
        mode = active_mode.get()
        assert mode is not None
        mode.submit("a kernel", lambda: 1 // 0, print)

    with pytest.raises(ZeroDivisionError):
        compile_in_parallel(work, GPU)
    assert not jit.device_caches
    assert active_mode.get() is None
    assert not compiles_only()


def test_a_kernel_that_another_thread_compiles_is_awaited(
    monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    launches: list[tuple[Any, ...]] = []
    compiled: Future[Any] = Future()
    compiled.set_result(Compiled(launches))
    fixed, _ = fixed_launch(monkeypatch, FutureKernel(print, compiled), [print])
    for _ in range(2):
        fixed(GRID, *values)
    assert [way for way, _, _ in launches] == ["public"]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "reason", "interprets", "works"),
    [
        (GPU, "", False, True),
        (CPU, "", False, False),
        (GPU, "no Triton", False, False),
        (GPU, "", True, False),
    ],
    ids=str,
)
def test_work_is_left_out_where_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    reason: str,
    interprets: bool,
    works: bool,
) -> None:
    monkeypatch.setattr("roseinfer.kernels.kernel.unusable_reason", lambda _: reason)
    monkeypatch.setattr("roseinfer.kernels.kernel.is_interpreted", lambda: interprets)
    calls: list[bool] = []
    compile_in_parallel(lambda: calls.append(True), device)
    assert calls == [True] * works


def test_another_dtype_is_another_compiled_kernel(
    monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    fixed, jit = fixed_launch(monkeypatch, Compiled([]), [])
    for _ in range(2):
        fixed(GRID, *values)
        fixed(GRID, values[0].half(), values[1].half(), *values[2:])
        fixed(GRID, *values[:2], values[2].int(), *values[3:])
    assert len(jit.launches) == 3


def test_a_triton_without_the_private_way_is_launched_by_the_public_one(
    monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    fixed, jit = fixed_launch(monkeypatch, SimpleNamespace(run=print), [])
    for _ in range(3):
        fixed(GRID, *values)
    assert len(jit.launches) == 3


def test_unaligned_tensors_take_the_public_way(
    monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    launches: list[tuple[Any, ...]] = []
    fixed, jit = fixed_launch(monkeypatch, Compiled(launches), [])
    for _ in range(2):
        fixed(GRID, torch.zeros(5)[1:], *values[1:])
    assert (len(jit.launches), launches) == (2, [])


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
        strides_of = (each.stride() for each in (cache[0], cache[1], keys, keys))
        fixed: Any
        fixed, _ = append._fixed_launch(append._full_batch_kernel, *strides_of, 2, 8, 1)
        assert fixed._compiled
        listening = SimpleNamespace(
            launch_enter_hook=SimpleNamespace(calls=hooks),
            launch_exit_hook=SimpleNamespace(calls=[]),
        )
        real, fixed._hooks = fixed._hooks, listening
        try:
            append.launch_full_batch(cache[0], cache[1], keys, keys, blocks, 2)
        finally:
            fixed._hooks = real
        written.append(cache)
    assert written[0].any()
    assert torch.equal(*written)


_PARAMS = "struct Params { void* source; int n; void* target; long long pitch; float scale; };"
_COPY = CudaKernel(
    "copy",
    {
        "source": ctypes.c_void_p,
        "n": ctypes.c_int,
        "target": ctypes.c_void_p,
        "pitch": ctypes.c_longlong,
        "scale": ctypes.c_float,
    },
    {"source": numel, "target": lambda own: 2 * own.numel()},
    fallback="copies run in torch",
)


class Copies:
    """A program that notes the parameters of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, int]] = []

    def encode(self, *arguments: object) -> None:
        raise AssertionError(arguments)

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        self.launches.append((params, programs))


def test_a_kernel_in_cuda_binds_by_name_too() -> None:
    source, program = torch.zeros(3), Copies()
    arguments = {"scale": 0.5, "pitch": 7, "source": source, "target": None, "n": 3}
    _COPY.launch(program, 4, **arguments)
    ((params, programs),) = program.launches
    assert programs == 4
    names = "source", "n", "target", "pitch", "scale"
    assert [getattr(params, name) for name in names] == [source.data_ptr(), 3, None, 7, 0.5]
    with pytest.raises(TypeError, match=r"copy: missing arguments \['n'\], unknown ones \['m'\]"):
        _COPY.launch(program, 4, m=2, **{name: arguments[name] for name in names if name != "n"})


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("int n", "long long m; int n"),
        ("float scale", "double scale, more"),
        ("target; long long pitch", "pitch, *target"),
        ("scale;", "scale; int more[2];"),
    ],
)
def test_another_layout_does_not_compile(old: str, new: str) -> None:
    code = _PARAMS.replace(old, new) + _COPY.layout_assertions()
    command = [str(COMPILER), "-fsyntax-only", "-std=c++17", "-x", "c++", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(old)
    assert ("copy: Python has another layout" in done.stderr) == bool(old)


@interpreted
def test_arguments_are_bound_by_name() -> None:
    source, target = torch.arange(6.0), torch.zeros(6)
    rest = {"TILE": 4, "t_r": 1, **strides("s_r", source[:, None].stride())}
    _copy_kernel.launch((1,), n=3, begin=2, target=target, index=target, source=source, **rest)
    assert target.tolist() == [2, 3, 4, 0, 0, 0]


def test_a_missing_or_unknown_argument_is_named() -> None:
    said = r"_copy_kernel: missing arguments \['TILE', 'source'\], unknown ones \['sauce'\]"
    arguments: dict[str, Any] = dict.fromkeys(_copy_kernel.parameters, 1) | {"sauce": 2}
    del arguments["source"], arguments["TILE"]
    with pytest.raises(TypeError, match=said):
        _copy_kernel.launch((1,), **arguments)


def test_traffic_of_what_is_no_parameter_is_refused() -> None:
    function = _copy_kernel.jit.fn
    with pytest.raises(TypeError, match=r"_copy_kernel: traffic of \['sauce'\]"):
        kernel({"sauce": numel})(function)
    with pytest.raises(TypeError, match=r"_copy_kernel: traffic by \['rows'\]"):
        kernel({"source": lambda rows: rows})(function)
    kernel({"source": lambda n, rows=1: n * rows})(function)


def test_traffic_is_in_bytes_and_keeps_no_activation() -> None:
    source, target = torch.zeros(6, dtype=torch.float16), torch.zeros(6)
    index = torch.tensor([5, 0])
    traffic = _copy_kernel.traffic({"source": source, "target": target, "index": index, "n": 3})
    kept = weakref.ref(source), weakref.ref(target)
    del source, target
    gc.collect()
    assert [each() for each in kept] == [None, None]
    later = traffic.pop("index")
    assert traffic == {"source": 6, "target": 12}
    index[0] = 2
    assert callable(later)
    assert later() == 16


def test_no_kernel_is_compiled_for_a_number_of_rows() -> None:
    """Else a first start would compile a GEMM for 1 row, for multiples of 16, and for others."""
    compiled = [kernel for kernel in all_kernels() if "rows" not in kernel.unspecialized]
    by_number = {kernel.name for kernel in compiled if "rows" in kernel.parameters}
    assert by_number == {"_chunk_kernel", "_gather_kernel"}  # whose rows are tensors


def test_where_kernels_can_run() -> None:
    assert isinstance(_copy_kernel, TritonKernel)
    assert (unusable_reason(torch.device("cpu")) == "") == is_interpreted()
    assert unusable_reason(torch.device("cuda")) == ""
    assert "Triton compiles nothing for meta" in unusable_reason(torch.device("meta"))
