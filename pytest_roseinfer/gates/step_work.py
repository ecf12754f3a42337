"""Work of one step in counts: Python calls, torch operations, copies, waits, launches."""

from __future__ import annotations

import sys
import sysconfig
from abc import abstractmethod
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_roseinfer.gates.gate import CannotCompare
from roseinfer._plugin import gc_disabled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import CodeType, FrameType

PYTHON = "python"
TORCH = "torch"
NOTHING = ""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of counts."""

    title: str
    depends_on: str
    """Dependency whose version a baseline is valid for, since counts differ between versions.
    ``TORCH`` includes all distributions that a test names in ``keyed_by``."""
    summed: bool = False
    """True to compare only the sum of the counts; increased ones are listed as its explanation."""


GROUPS: Mapping[str, Group] = {
    # Calls differ between Python versions: since 3.12 a comprehension is not a call.
    "python_calls": Group("Python calls", PYTHON, summed=True),
    # Operations differ between releases of torch and other libraries.
    "operations": Group("torch operations", TORCH),
    "allocations": Group("device allocations", TORCH),
    "host_to_device": Group("copies to the device", TORCH),
    "device_to_host": Group("copies to the host", TORCH),
    "synchronisations": Group("waits for the device", TORCH),
    # These depend on the code under test alone.
    "triton_launches": Group("Triton launches", NOTHING),
    "graph_replays": Group("CUDA graph replays", NOTHING),
    "counters": Group("counters of its own", NOTHING),
    # Traffic checks count only these groups.
    "weights": Group("bytes of weights", TORCH, summed=True),
    "keys_and_values": Group("bytes of keys and values", TORCH, summed=True),
    "activations": Group("bytes of all else", TORCH, summed=True),
    "not_counted": Group("what moves bytes that are not counted", TORCH),
}


@dataclass(frozen=True, slots=True)
class StepWork:
    """The counted work of one step."""

    tokens: int
    """Number of tokens that the step generates."""
    groups: Mapping[str, Mapping[str, int]]
    """Counts by group and name."""


def changed_counts(
    new: Mapping[str, int], old: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield each count that differs: its name, the new value and the old value."""
    for name in sorted({*new, *old}):
        if new.get(name, 0) != old.get(name, 0):
            yield name, new.get(name, 0), old.get(name, 0)


class CostVerdict(NamedTuple):
    """Differences between a step and its baseline, in lines of words."""

    increases: list[str]
    """Counts that rose, or fell although they must not drop; these fail the step."""
    decreases: list[str]
    """Counts that fell."""


def judge(now: StepWork, was: StepWork, must_not_drop: Collection[str]) -> CostVerdict:
    """Compare a step with its baseline; the counters named in ``must_not_drop`` must not fall."""
    if now.tokens != was.tokens:
        raise CannotCompare(
            f"the step generates {now.tokens} tokens, and its baseline {was.tokens}: their work "
            "cannot be compared"
        )
    require_counters(must_not_drop, {*now.groups["counters"], *was.groups["counters"]})
    verdict = CostVerdict([], [])
    for name, group in GROUPS.items():
        new, old = now.groups[name], was.groups[name]
        if group.summed:
            _judge_sum(verdict, group.title, new, old, now.tokens)
            continue
        for each, count, baseline in changed_counts(new, old):
            line = f"{group.title}, {each}: {count}, baseline {baseline}"
            # Fewer graph replays mean that their work is done in another way.
            must_stay = name == "graph_replays" or (name == "counters" and each in must_not_drop)
            if count > baseline or must_stay:
                verdict.increases.append(line)
            else:
                verdict.decreases.append(f"less: {line}")
    return verdict


def require_counters(must_not_drop: Collection[str], counters: Collection[str]) -> None:
    """Raise if ``must_not_drop`` names an unknown counter."""
    if unknown := sorted({*must_not_drop} - {*counters}):
        raise CannotCompare(
            f"must_not_drop: not counters of the step: {', '.join(unknown)}; "
            f"counters= returned {', '.join(sorted(counters)) or 'none'}"
        )


def _judge_sum(
    verdict: CostVerdict, title: str, new: Mapping[str, int], old: Mapping[str, int], tokens: int
) -> None:
    """Judge the sum of the counts, and list increased counts as its explanation."""
    now, was = sum(new.values()), sum(old.values())
    line = f"{title}: " + ", baseline ".join(
        f"{count} a step, {count / tokens:g} a token" for count in (now, was)
    )
    if now < was:
        verdict.decreases.append(f"less: {line}")
    elif now > was:
        grew = [each for each in changed_counts(new, old) if each[1] > each[2]]
        grew.sort(key=lambda each: each[2] - each[1])
        verdict.increases.append(line)
        verdict.increases.extend(
            f"    {name}: {rose}, baseline {base}" for name, rose, base in grew
        )


def versions_here(keyed_by: Sequence[str]) -> Mapping[str, str]:
    """Return this run's versions of the dependencies of counts.

    Only major and minor versions matter: a changed count in a patch release is a regression.
    """
    libraries = [f"{name} {_minor(name)}" for name in ("torch", *keyed_by)]
    return {
        PYTHON: f"python {sys.version_info.major}.{sys.version_info.minor}",
        TORCH: ", ".join(libraries),
        NOTHING: "any version",
    }


def _minor(distribution: str) -> str:
    try:
        return ".".join(metadata.version(distribution).split(".")[:2])
    except metadata.PackageNotFoundError:
        raise CannotCompare(f"keyed_by: {distribution} is not installed") from None


# Observing launches of Triton kernels, interpreted or compiled.
#
# All interpreted launches go through one method. Compiled kernels call Triton's launch hooks;
# launchers that bypass Triton's own path to be faster, as ``roseinfer``'s do, must use that path
# while hooks are set, or profilers would miss them too.


DECLARATION = "traffic"
"""Name of a launch in its declaration of traffic: an attribute of a Triton kernel's Python
function, or an entry of the metadata that a launcher of other kernels passes to Triton's hooks."""


class Launch(NamedTuple):
    """A kernel that is about to run."""

    kernel: str
    function: Callable[..., object] | None
    """Python function of the kernel; None if only a compiled kernel is known."""
    arguments: Mapping[str, Any]
    """Arguments by parameter; empty without a function."""
    traffic: Callable[[], Iterable[tuple[Any, int | Callable[[], int]]]] | None = None
    """Declared traffic by tensor, of a kernel that is not Triton's; None without a declaration."""


@contextmanager
def interpreted_launches(
    launched: Callable[[Launch], None], uncounted: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Call ``launched`` with each interpreted launch, and interpret it inside ``uncounted``."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # then nothing has launched a kernel
        yield
        return
    kernels: Any = interpreter.InterpretedFunction
    run = kernels.run

    def watched(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not warmup:
            by_name = dict(zip(kernel.arg_names, args, strict=False))
            launched(Launch(kernel.__name__, kernel.fn, {**by_name, **kwargs}))
        with uncounted():
            run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    kernels.run = watched
    try:
        yield
    finally:
        kernels.run = run


@contextmanager
def compiled_launches(launched: Callable[[Launch], None]) -> Iterator[None]:
    """Call ``launched`` with each compiled launch."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        yield
        return
    kernels: Any = sys.modules["triton.compiler.compiler"].CompiledKernel
    describe = kernels.launch_metadata
    described: list[tuple[Any, tuple[Any, ...]]] = []
    """Launch whose hook call comes next; empty for a launch outside of Triton's own path."""

    def remember(kernel: Any, grid: Any, stream: Any, *args: Any) -> Any:
        described[:] = [(getattr(kernel.src, "fn", None), args)]
        return describe(kernel, grid, stream, *args)

    hooks: Any = knobs.runtime.launch_enter_hook

    def hook(metadata: Any) -> None:
        attributes = metadata.get()
        name = attributes["name"]
        kernel, args = described.pop() if described else (None, ())
        if kernel is None:
            launched(Launch(name, None, {}, attributes.get(DECLARATION)))
        else:
            by_name = dict(zip(kernel.arg_names, args, strict=False))
            launched(Launch(name, kernel.fn, by_name))

    kernels.launch_metadata = remember
    hooks.add(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
        kernels.launch_metadata = describe


# Counting calls of the code under test, by function.
#
# A call counts if the caller or the called function is under test. Calls between libraries are
# left out, since they change with every release; the device work of libraries is counted as torch
# operations.


_TOOLS = frozenset({"pytest_roseinfer", "triton"})
"""Packages that are never under test: the counter itself, and Triton, counted by launches."""


class OwnCode:
    """The code under test: the named ``packages``, else all modules that are not installed."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        self.packages = frozenset(packages)

    def is_own(self, module: str) -> bool:
        root = module.partition(".")[0]
        return root in self.packages if self.packages else not _is_library(root)

    def concerns(self, frame: FrameType) -> bool:
        """Return True if a frame belongs to this code or was called by it."""
        module, caller = _module(frame), frame.f_back
        if self.is_own(module):
            return True
        called_by_own = caller is not None and self.is_own(_module(caller))
        return called_by_own and module.partition(".")[0] not in _TOOLS


@cache
def _is_library(root: str) -> bool:
    """Return True for a top-level module that is installed, built in, or has no file."""
    if root in _TOOLS or root in sys.builtin_module_names:
        return True
    module = sys.modules.get(root)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    paths = sysconfig.get_paths()
    installed = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    files = [Path(place) for place in places if place]
    return not files or any(place.is_relative_to(each) for place in files for each in installed)


def count_python_calls(
    step: Callable[[], object], own_code: OwnCode
) -> defaultdict[str, Counter[str]]:
    """Run ``step`` and count function calls by group and name.

    Functions written in C count too. Calls that wait for the device or replay a graph have their
    own groups and count for any caller. Tracers of other tools, such as coverage's, are not
    counted, because Python calls them with profiling off.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    calls = counts["python_calls"]
    by_code = _torch_functions()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if own_code.concerns(frame):
                calls[_python_name(frame)] += 1
            if counter := by_code.get(frame.f_code):
                group, name = counter
                counts[group][name] += 1
        elif event == "c_call" and own_code.is_own(_module(frame)):
            calls[_c_name(arg)] += 1

    @contextmanager
    def uncounted() -> Iterator[None]:
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(profile)

    before = sys.getprofile()
    with interpreted_launches(lambda _kernel: None, uncounted):
        sys.setprofile(profile)
        try:
            step()
        finally:
            restore_profiler(before)
    return counts


def restore_profiler(before: Any) -> None:
    """Restore the previous profiler; a cProfile has to be enabled by its own method."""
    if callable(before) or before is None:
        sys.setprofile(before)
    else:
        sys.setprofile(None)
        before.enable()


def _torch_functions() -> dict[CodeType, tuple[str, str]]:
    """Return the functions that wait for a device or replay a graph, with the group of each.

    These calls dispatch no torch operation. The functions are identified by their code objects,
    since callers may have imported them under any name.
    """
    waiting = (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.cpu)
    waits = {
        owner.synchronize.__code__: ("synchronisations", f"{owner.__name__}.synchronize")
        for owner in waiting
    }
    return waits | {torch.cuda.CUDAGraph.replay.__code__: ("graph_replays", "replays")}


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _python_name(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_qualname
    if code.co_filename == "<string>" and code.co_argcount:
        # A method generated from text, as by dataclasses, lacks the class in its name.
        owner = type(frame.f_locals[code.co_varnames[0]])
        name = f"{owner.__qualname__}.{code.co_name}"
    return f"{_module(frame)}.{name}"


def _c_name(function: Any) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "?")
    return name if module in (None, "builtins") else f"{module}.{name}"


# Recording torch operations.


class OperationMode(TorchDispatchMode):
    """Dispatch mode that passes each finished operation to ``_note_operation``; can be paused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listening = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Run compiled functions operation by operation, without importing torch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._listening:
            self._note_operation(func, args, kwargs, result)
        return result

    @abstractmethod
    def _note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None: ...

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Record nothing inside the context, whose operations are not work of the step."""
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before


# Counting torch's work: operations, copies between devices, waits, allocations.
#
# On a GPU, copies are those between host and device. On a CPU the host's memory stands for the
# device's: a tensor made of Python's or NumPy's data counts as a copy to the device, and reading
# a tensor's values as a copy back, because that is what they would be on a GPU.


_READS = {"tolist", "numpy", "item", "__array__"} | {
    f"__{kind}__" for kind in ("bool", "int", "float", "complex", "index")
}
"""Methods of a tensor that return its values to Python."""
_NUMBERS = {"_local_scalar_dense", "item", "is_nonzero"}
"""Operations that read values too: torch calls them when a tensor is used as a number."""
_WAITS = {"nonzero", "nonzero_numpy", "argwhere", "masked_select", "equal"} | {
    f"{kind}unique{which}" for kind in ("", "_") for which in ("2", "_dim", "_consecutive")
}
"""Operations that wait because the shape or truth value of their result depends on data."""
_COPIES = {"copy_", "_to_copy", "to", "cpu", "cuda"}
_MASKED = {"index", "index_put_", "index_put"}
_FROM_HOST = "lift_fresh"
"""Operation that torch dispatches for each tensor made from host data."""


class TensorWork(OperationMode):  # type: ignore[no-untyped-call]
    """Counts of torch's work by group, while ``count`` runs a step."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._kind = device.partition(":")[0]
        self._reading = False
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, step: Callable[[], object]) -> None:
        with (
            interpreted_launches(self._note_launch, self.pause_recording),
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
        """Count one read; the operations that it consists of are not counted as reads again."""
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
        known_addresses = (
            set() if name == _FROM_HOST else {_address(each) for each in _tensors(args, kwargs)}
        )
        for tensor in filter(self._on_device, _tensors(result)):
            if _address(tensor) not in known_addresses and tensor.untyped_storage().nbytes():
                known_addresses.add(_address(tensor))
                self._note("allocations", "tensors")

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._kind


class _Reads(TorchFunctionMode):
    """Function mode that counts reads without an operation, as on tensors of the CPU."""

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
    """Yield the tensors among the values, without sparse ones, which have no single storage."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


# Measuring the work of a step, over several runs.


_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A step that can be repeated."""

    run: Callable[[], object]
    tokens: int
    before: Callable[[], object] | None = None
    """Function that runs before each step and sets up its state; None without setup."""
    counters: Callable[[], Mapping[str, int]] | None = None
    """Function that returns the code's own counts, which only rise; None without counts."""

    def prepare(self) -> None:
        if self.before:
            self.before()

    def own_counts(self) -> Counter[str]:
        counts = self.counters() if self.counters else {}
        return Counter({str(name): times for name, times in counts.items()})


def measure_work(step: Step, own_code: OwnCode, device: str) -> StepWork:
    """Return the work of one step; raise if the next step's differs."""
    warm_up(step, _WARM_UP)
    first, second = (_count(step, own_code, device) for _ in range(2))
    refuse_differences(first, second)
    if not first.groups["python_calls"]:
        raise CannotCompare(
            "the step made no call of "
            f"{', '.join(sorted(own_code.packages)) or 'code of your own'}; set "
            "packages=[...] of the marker roseinfer_costs to the packages whose calls count"
        )
    if sum(sum(counts.values()) for counts in first.groups.values()) == 1:
        raise CannotCompare(
            "the step did nothing that is counted besides its own call: is it the right function? "
            "To measure plain Python code, use roseinfer_tpot"
        )
    return first


def warm_up(step: Step, times: int) -> None:
    """Run the first steps, which may compile kernels or allocate buffers for later ones."""
    for _ in range(times):
        step.prepare()
        step.run()


def refuse_differences(first: StepWork, second: StepWork) -> None:
    """Raise if two consecutive steps did different work."""
    if differing := [
        f"{group.title}, {quantity}: {one} and {other}"
        for name, group in GROUPS.items()
        for quantity, one, other in changed_counts(first.groups[name], second.groups[name])
    ]:
        lines = [*differing, "before= must restore the same contexts for each step"]
        raise CannotCompare(
            "two steps did not do the same work, so a baseline would be meaningless:\n  "
            + "\n  ".join(lines)
        )


def _count(step: Step, own_code: OwnCode, device: str) -> StepWork:
    """Count calls in one step and tensors in another, so that neither counts the other's work."""
    with gc_disabled():  # collections come at random times, and finalisers count as calls
        step.prepare()
        totals = count_python_calls(step.run, own_code)
        step.prepare()
        tensors = TensorWork(device)
        before = step.own_counts()
        tensors.count(step.run)
        after = step.own_counts()
    for group, counts in tensors.counts.items():
        totals[group].update(counts)
    totals["counters"] = Counter({name: times - before[name] for name, times in after.items()})
    return StepWork(step.tokens, {group: dict(totals[group]) for group in GROUPS})
