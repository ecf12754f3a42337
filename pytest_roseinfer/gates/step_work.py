"""The work of one step, counted: Python calls, torch operations, copies, waits, launches."""

from __future__ import annotations

import gc
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

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import CodeType, FrameType

PYTHON = "python"
TORCH = "torch"
NOTHING = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Counts of one kind."""

    title: str
    depends_on: str
    """A baseline holds for one version of this, since another counts differently. ``TORCH``
    includes everything that a test names in ``keyed_by``."""
    summed: bool = False
    """Only the sum of the counts is compared, and those that rose explain it."""


GROUPS: Mapping[str, Group] = {
    # Python versions differ in what they call: since 3.12 a comprehension is no call.
    "python_calls": Group("Python calls", PYTHON, summed=True),
    # Releases of torch and of libraries differ in the operations that they use.
    "operations": Group("torch operations", TORCH),
    "allocations": Group("device allocations", TORCH),
    "host_to_device": Group("copies to the device", TORCH),
    "device_to_host": Group("copies to the host", TORCH),
    "synchronisations": Group("waits for the device", TORCH),
    # The code under test does these itself.
    "triton_launches": Group("Triton launches", NOTHING),
    "graph_replays": Group("CUDA graph replays", NOTHING),
    "counters": Group("counters of its own", NOTHING),
    # A step whose bytes are counted has these groups alone.
    "weights": Group("bytes of weights", TORCH, summed=True),
    "keys_and_values": Group("bytes of keys and values", TORCH, summed=True),
    "activations": Group("bytes of all else", TORCH, summed=True),
    "not_counted": Group("what moves bytes that are not counted", TORCH),
}


@dataclass(frozen=True, slots=True)
class StepWork:
    tokens: int
    """The step brings so many."""
    groups: Mapping[str, Mapping[str, int]]
    """For each group, how often each thing in it happened."""


def changed_counts(
    new: Mapping[str, int], old: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield the name of every count that differs, and the count in both."""
    for name in sorted({*new, *old}):
        if new.get(name, 0) != old.get(name, 0):
            yield name, new.get(name, 0), old.get(name, 0)


class CostVerdict(NamedTuple):
    """What a step does more of than its baseline, and what less, in lines of words."""

    worse: list[str]
    """Counts that rose, or must not drop and did: these fail the step."""
    less: list[str]


def judge(now: StepWork, was: StepWork, must_not_drop: Collection[str]) -> CostVerdict:
    """Compare a step with its baseline; the counters named in ``must_not_drop`` must not fall."""
    if now.tokens != was.tokens:
        raise CannotCompare(
            f"the step brings {now.tokens} tokens, and its baseline is of {was.tokens}: their "
            "work says nothing about each other"
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
            # With fewer graph replays, something else does their work.
            must_stay = name == "graph_replays" or (name == "counters" and each in must_not_drop)
            if count > baseline or must_stay:
                verdict.worse.append(line)
            else:
                verdict.less.append(f"less: {line}")
    return verdict


def require_counters(must_not_drop: Collection[str], known: Collection[str]) -> None:
    """Raise where ``must_not_drop`` names a counter that there is not."""
    if unknown := sorted({*must_not_drop} - {*known}):
        raise CannotCompare(
            f"must_not_drop names no counter of the step: {', '.join(unknown)}. "
            f"counters= returned {', '.join(sorted(known)) or 'none'}"
        )


def _judge_sum(
    verdict: CostVerdict, title: str, new: Mapping[str, int], old: Mapping[str, int], tokens: int
) -> None:
    """Judge only the sum of the counts; those that rose explain it."""
    now, was = sum(new.values()), sum(old.values())
    line = f"{title}: " + ", baseline ".join(
        f"{count} a step, {count / tokens:g} a token" for count in (now, was)
    )
    if now < was:
        verdict.less.append(f"less: {line}")
    elif now > was:
        grew = [each for each in changed_counts(new, old) if each[1] > each[2]]
        grew.sort(key=lambda each: each[2] - each[1])
        verdict.worse.append(line)
        verdict.worse.extend(f"    {name}: {rose}, baseline {base}" for name, rose, base in grew)


def versions_here(keyed_by: Sequence[str]) -> Mapping[str, str]:
    """Return this run's version of each thing that counts can depend on.

    Only major and minor versions matter: a patch release that changes a count has a regression.
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
        raise CannotCompare(f"keyed_by names {distribution}, which is not installed") from None


# Watching every launch of a Triton kernel, interpreted or compiled.
#
# Every interpreted launch passes one method. Compiled kernels call Triton's launch hooks;
# launchers that bypass Triton's own path to be faster, as ``roseinfer``'s do, must take that path
# while hooks are set, or profilers would miss them too.


DECLARATION = "moves"
"""Where a launch says what it moves: an attribute of a Triton kernel's Python function, or an entry
of what a launcher of other kernels tells Triton's hooks."""


class Launch(NamedTuple):
    """A kernel that is about to run."""

    kernel: str
    function: Callable[..., object] | None
    """The kernel's Python function; None where only a compiled kernel is known."""
    arguments: Mapping[str, Any]
    """By parameter; nothing without a function."""
    moves: Callable[[], Iterable[tuple[Any, int | Callable[[], int]]]] | None = None
    """What a kernel that is not Triton's tells Triton's hooks that it moves, by tensor."""


@contextmanager
def interpreted_launches(
    launched: Callable[[Launch], None], uncounted: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Call ``launched`` with each launch, and run the interpreter inside ``uncounted``."""
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
    """Call ``launched`` with each launch."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        yield
        return
    kernels: Any = sys.modules["triton.compiler.compiler"].CompiledKernel
    describe = kernels.launch_metadata
    described: list[tuple[Any, tuple[Any, ...]]] = []
    """The launch that the hook is about to hear of, where it is one by Triton's own path."""

    def remember(kernel: Any, grid: Any, stream: Any, *args: Any) -> Any:
        described[:] = [(getattr(kernel.src, "fn", None), args)]
        return describe(kernel, grid, stream, *args)

    hooks: Any = knobs.runtime.launch_enter_hook

    def hook(metadata: Any) -> None:
        told = metadata.get()
        name = told["name"]
        kernel, args = described.pop() if described else (None, ())
        if kernel is None:
            launched(Launch(name, None, {}, told.get(DECLARATION)))
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


# Counting the calls that the code under test makes, by function.
#
# A call counts if the caller or the called function is under test. Calls between libraries are
# left out, since they change with every release; what libraries make the device do is counted as
# torch operations.


_TOOLS = frozenset({"pytest_roseinfer", "triton"})
"""These are no code under test: we count, and calls into Triton are counted as launches."""


class OwnCode:
    """The code under test: ``packages`` if any are named, else whatever is not installed."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        self.packages = frozenset(packages)

    def is_own(self, module: str) -> bool:
        root = module.partition(".")[0]
        return root in self.packages if self.packages else not _is_library(root)

    def concerns(self, frame: FrameType) -> bool:
        """Return True if a frame is one of this code, or was called by it."""
        module, caller = _module(frame), frame.f_back
        if self.is_own(module):
            return True
        called_by_own = caller is not None and self.is_own(_module(caller))
        return called_by_own and module.partition(".")[0] not in _TOOLS


@cache
def _is_library(root: str) -> bool:
    """Return True for a top-level module that is installed, built in, or none at all."""
    if root in _TOOLS or root in sys.builtin_module_names:
        return True
    module = sys.modules.get(root)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    paths = sysconfig.get_paths()
    installed = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = [Path(place) for place in places if place]
    return not found or any(place.is_relative_to(each) for place in found for each in installed)


def count_python_calls(step: Callable[[], object], own: OwnCode) -> defaultdict[str, Counter[str]]:
    """Run ``step`` and count, by group and name, how often each function was entered.

    Functions written in C count too. Calls that wait for the device or replay a graph come in
    groups of their own, whoever makes them. The tracers of other tools, such as coverage's, are
    not counted, because Python calls them with profiling off.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    calls = counts["python_calls"]
    by_code = _torch_functions()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if own.concerns(frame):
                calls[_python_name(frame)] += 1
            if known := by_code.get(frame.f_code):
                group, name = known
                counts[group][name] += 1
        elif event == "c_call" and own.is_own(_module(frame)):
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
            _profile_again(before)
    return counts


def _profile_again(before: Any) -> None:
    """Let in what profiled before; Python takes no cProfile back by itself."""
    if callable(before) or before is None:
        sys.setprofile(before)
    else:
        sys.setprofile(None)
        before.enable()


def _torch_functions() -> dict[CodeType, tuple[str, str]]:
    """Return the functions that wait for a device or replay a graph, with the group of each.

    No torch operation shows these calls. The functions are known by their code, since callers
    may have imported them under any name.
    """
    waiting = (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.cpu)
    found = {
        owner.synchronize.__code__: ("synchronisations", f"{owner.__name__}.synchronize")
        for owner in waiting
    }
    return found | {torch.cuda.CUDAGraph.replay.__code__: ("graph_replays", "replays")}


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _python_name(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_qualname
    if code.co_filename == "<string>" and code.co_argcount:
        # A method that was generated as text, as dataclasses do, has no class in its name.
        owner = type(frame.f_locals[code.co_varnames[0]])
        name = f"{owner.__qualname__}.{code.co_name}"
    return f"{_module(frame)}.{name}"


def _c_name(function: Any) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "?")
    return name if module in (None, "builtins") else f"{module}.{name}"


# What hears of every torch operation, and can be deaf for a while.


class Listening(TorchDispatchMode):
    """Hands every operation to ``_note_operation`` once it is done."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listening = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What is compiled runs by operations here, and torch would import its compiler."""
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
    def deaf(self) -> Iterator[None]:
        """Note nothing: what runs now is no work of the step."""
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before


# Counting what torch is made to do: operations, copies between devices, waits, allocations.
#
# On a GPU, copies are those between host and device. On a CPU the host's memory stands for the
# device's: a tensor made of Python's or NumPy's data counts as a copy to the device, and reading
# a tensor's values as a copy back, because that is what they would be on a GPU.


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


# Running a step as often as it takes to count everything it does.


_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A step that can be repeated."""

    run: Callable[[], object]
    tokens: int
    before: Callable[[], object] | None = None
    """This runs ahead of every step and sets up what the step is about."""
    counters: Callable[[], Mapping[str, int]] | None = None
    """This returns what the code counts itself: numbers that only ever rise."""

    def prepare(self) -> None:
        if self.before:
            self.before()

    def own_counts(self) -> Counter[str]:
        counts = self.counters() if self.counters else {}
        return Counter({str(name): times for name, times in counts.items()})


def measure_work(step: Step, own: OwnCode, device: str) -> StepWork:
    """Return the work of one step, which must be the same in the next."""
    warm_up(step, _WARM_UP)
    first, second = (_count(step, own, device) for _ in range(2))
    refuse_differences(first, second)
    if not first.groups["python_calls"]:
        raise CannotCompare(
            f"the step made no call of {', '.join(sorted(own.packages)) or 'code of your own'}: "
            "packages=[...] of the marker roseinfer_costs says whose calls count"
        )
    if sum(sum(counts.values()) for counts in first.groups.values()) == 1:
        raise CannotCompare(
            "the step was called, and did nothing else that is counted: is it the right function? "
            "What it does in plain Python, roseinfer_tpot times"
        )
    return first


def warm_up(step: Step, times: int) -> None:
    """Run the first steps, which may still build what later ones use."""
    for _ in range(times):
        step.prepare()
        step.run()


def refuse_differences(first: StepWork, second: StepWork) -> None:
    """Raise if two steps in a row did not do the same work."""
    if differing := [
        f"{group.title}, {what}: {one} and {other}"
        for name, group in GROUPS.items()
        for what, one, other in changed_counts(first.groups[name], second.groups[name])
    ]:
        lines = [*differing, "before= has to bring each step to the same contexts"]
        raise CannotCompare(
            "two steps did not do the same, so no baseline says how much a step does:\n  "
            + "\n  ".join(lines)
        )


def _count(step: Step, own: OwnCode, device: str) -> StepWork:
    """Count calls in one step and tensors in another, so that neither counts the other's work."""
    with _no_garbage_collected():
        step.prepare()
        found = count_python_calls(step.run, own)
        step.prepare()
        tensors = TensorWork(device)
        before = step.own_counts()
        tensors.count(step.run)
        after = step.own_counts()
    for group, counts in tensors.counts.items():
        found[group].update(counts)
    found["counters"] = Counter({name: times - before[name] for name, times in after.items()})
    return StepWork(step.tokens, {group: dict(found[group]) for group in GROUPS})


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Keep garbage collection out of the counts: its time is random, and finalisers are calls."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
