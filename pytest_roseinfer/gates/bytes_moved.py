"""Traffic of a step: bytes moved by kind of memory, and the minimum that it must move."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.step_work import (
    DECLARATION,
    GROUPS,
    OperationMode,
    StepWork,
    compiled_launches,
    interpreted_launches,
    refuse_differences,
    warm_up,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Self

    from torch import Tensor

    from pytest_roseinfer.gates.step_work import Launch, Step

    Arguments = Mapping[str, Any]
    """Arguments of an operation by name."""
    Amount = int | Callable[[], int]
    Weights = torch.nn.Module | Tensor | Iterable["torch.nn.Module | Tensor"]


# Traffic of torch operations, by their arguments.
#
# An operation reads the memory that its tensors span and writes its results, each region once. One
# that picks rows reads only those rows. Views and tensors without values move nothing.


_NO_VALUES = {
    *("empty", "new_empty", "resize_", "set_", "as_strided_", "squeeze_", "unsqueeze_"),
    *("t_", "transpose_", "swapaxes_", "detach_", "rename_", "record_stream", "requires_grad_"),
}
"""Operations that make a tensor without values, or change only its metadata."""
_OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "exponential_"}
"""Operations that write a tensor in place without reading it."""
_PICKS = {
    "embedding": "weight",
    "gather": "self",
    "index": "self",
    "index_select": "self",
    "take": "self",
    "take_along_dim": "self",
}
"""Operations that read only as many elements of this argument as their result has."""
_ADDS = {"index_add_", "scatter_add_", "scatter_reduce_"}
"""Operations that also read the elements they write."""


def operation_accesses(
    func: Any, args: Any, kwargs: Any, result: Any
) -> Iterator[tuple[Tensor, int]] | None:
    """Yield each tensor that is read or written, with its bytes; return None if unknown.

    Traffic is unknown for operations outside of torch, and for sparse tensors.
    """
    tensors = tensors_in((args, kwargs, result))
    if func.namespace not in ("aten", "prims") or any(
        tensor.layout is not torch.strided for tensor in tensors
    ):
        return None
    return _iterate_accesses(func, _by_name(func, args, kwargs), result)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor covers; expanded dimensions count once."""
    if not tensor.numel():
        return 0
    dims = [*zip(tensor.shape, tensor.stride(), strict=True)]
    different = prod(size for size, stride in dims if stride)
    span = 1 + sum((size - 1) * stride for size, stride in dims)
    return min(different, span) * tensor.element_size()


def _by_name(func: Any, args: Any, kwargs: Any) -> Arguments:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _iterate_accesses(func: Any, arguments: Arguments, result: Any) -> Iterator[tuple[Tensor, int]]:
    name = func.overloadpacket.__name__
    inputs = {address(tensor) for tensor in tensors_in(arguments)}
    fresh = [tensor for tensor in tensors_in(result) if address(tensor) not in inputs]
    if name in _NO_VALUES or name.startswith(("empty_", "new_empty_")):
        return
    if not fresh and not func._schema.is_mutable:  # a view
        return
    regions = set()
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(arguments.get(argument.name)):
            region = (address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
            if not written and region in regions:
                continue
            regions.add(region)
            if written:
                yield tensor, _written_bytes(name, argument, arguments, tensor)
            else:
                picked = _PICKS.get(name) == argument.name
                yield tensor, _at_most(tensor, tensors_in(result)[0].numel() if picked else None)
    for tensor in fresh:
        yield tensor, span_bytes(tensor)


def _written_bytes(name: str, argument: Any, arguments: Arguments, tensor: Tensor) -> int:
    """Return the traffic of an argument that is written, including reads where it is read too."""
    if places := _PLACES.get(name):
        reads = name in _ADDS or arguments.get("accumulate") or arguments.get("reduce")
        return _at_most(tensor, places(arguments)) * (2 if reads else 1)
    return span_bytes(tensor) * (1 if argument.is_out or name in _OVERWRITES else 2)


def _at_most(tensor: Tensor, elements: int | None) -> int:
    """Return the bytes of ``elements`` elements of a tensor, at most all; None means all."""
    whole = span_bytes(tensor)
    return whole if elements is None else min(whole, elements * tensor.element_size())


def _num_assigned(arguments: Arguments) -> int:
    """Return the number of elements an indexed assignment writes; for a mask, the maximum."""
    tensor, indices = arguments["self"], arguments["indices"]
    used = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in used):
        return int(tensor.numel())
    places: int = torch.broadcast_tensors(*used)[0].numel()  # type: ignore[no-untyped-call]
    unindexed_sizes = [
        size for at, size in enumerate(tensor.shape) if at >= len(indices) or indices[at] is None
    ]
    return places * int(prod(unindexed_sizes))


def _num_row_elements(arguments: Arguments) -> int:
    tensor, index = arguments["self"], arguments["index"]
    return int(index.numel()) * int(tensor.numel()) // max(1, int(tensor.shape[arguments["dim"]]))


def _num_indexed(arguments: Arguments) -> int:
    return int(arguments["index"].numel())


_PLACES: Mapping[str, Callable[[Arguments], int]] = {
    "_index_put_impl_": _num_assigned,
    "index_add_": _num_row_elements,
    "index_copy_": _num_row_elements,
    "index_fill_": _num_row_elements,
    "index_put_": _num_assigned,
    "put_": _num_indexed,
    "scatter_": _num_indexed,
    "scatter_add_": _num_indexed,
    "scatter_reduce_": _num_indexed,
}
"""Functions that return the number of written elements, for operations that write part of
``self``."""


# Recording the traffic of torch operations and Triton kernels, in a step or a graph capture.


class MemoryAccess(NamedTuple):
    """Traffic of one operation or kernel on one tensor's memory."""

    by: str
    address: int
    amount: Amount
    """Bytes; a function if they depend on tensor values at the time the kernel runs."""

    def resolve_amount(self) -> MemoryAccess:
        amount = self.amount
        return self if isinstance(amount, int) else self._replace(amount=int(amount()))


class ByteRecorder(OperationMode):
    """Context that records traffic on one type of device."""

    def __init__(self, device_type: str, *, captures: bool = False) -> None:
        """In a capture nothing runs yet, so amounts that depend on values stay functions."""
        super().__init__()
        self.accesses: list[MemoryAccess] = []
        self.not_counted: Counter[str] = Counter()
        self._device_type = device_type
        self._captures = captures
        self._watch = ExitStack()

    def __enter__(self) -> Self:
        self._watch.enter_context(interpreted_launches(self._note_launch, self.pause_recording))
        self._watch.enter_context(compiled_launches(self._note_launch))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watch.close()

    def note(self, move: MemoryAccess) -> None:
        """Record an access that happens now."""
        with self.pause_recording():
            self.accesses.append(move if self._captures else move.resolve_amount())

    def _note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        accesses = operation_accesses(func, args, kwargs, result)
        if accesses is not None:
            for tensor, amount in accesses:
                self._note_tensor(name, tensor, amount)
        elif any(map(self._on_device, tensors_in((args, kwargs, result)))):
            self.not_counted[f"{func.namespace}::{name}"] += 1

    def _note_launch(self, launch: Launch) -> None:
        if launch.traffic is not None:
            for tensor, amount in launch.traffic():
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
                    f"{launch.kernel}: declares traffic of {parameter!r}, which is not a tensor "
                    "among its arguments"
                )
            self._note_tensor(launch.kernel, tensor, amount)

    def _note_tensor(self, by: str, tensor: Tensor, amount: Amount) -> None:
        if self._on_device(tensor):
            self.note(MemoryAccess(by, address(tensor), amount))

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type


# Traffic of CUDA graphs: launches are recorded at capture and counted at each replay.
#
# A replay runs no host code per launch. Amounts that depend on tensor values, such as sequence
# lengths, are recomputed when a replay begins.


DEVICE_TYPE = "cuda"
UNKNOWN = "a CUDA graph captured before the test had roseinfer_costs"
_captured: WeakKeyDictionary[torch.cuda.CUDAGraph, ByteRecorder] = WeakKeyDictionary()


@contextmanager
def record_captures() -> Iterator[None]:
    """Record the traffic of all CUDA graphs that are captured inside the context."""
    kind = torch.cuda.CUDAGraph
    begin, end = kind.capture_begin, kind.capture_end
    under_way: dict[Any, ByteRecorder] = {}

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        under_way[graph] = ByteRecorder(DEVICE_TYPE, captures=True).__enter__()

    def capture_end(graph: Any) -> None:
        if graph in under_way:  # a capture may have begun before the context
            _captured[graph] = under_way.pop(graph)
            _captured[graph].__exit__(None, None, None)
        end(graph)

    with (
        mock.patch.object(kind, "capture_begin", capture_begin),
        mock.patch.object(kind, "capture_end", capture_end),
    ):
        yield


@contextmanager
def record_replays(recorder: ByteRecorder) -> Iterator[None]:
    """Add the traffic of each graph replay to ``recorder``."""
    kind = torch.cuda.CUDAGraph
    run = kind.replay

    def replay(graph: Any) -> None:
        if graph in _captured:
            for move in _captured[graph].accesses:
                recorder.note(move)
            recorder.not_counted.update(_captured[graph].not_counted)
        else:
            recorder.not_counted[UNKNOWN] += 1
        run(graph)

    with mock.patch.object(kind, "replay", replay):
        yield


# Kinds of memory (weights, keys and values, all else), and the minimum traffic of a step.


WEIGHTS = "weights"
KEYS_AND_VALUES = "keys_and_values"
ACTIVATIONS = "activations"
"""All other memory, including indices, block tables and logits."""

_NAMES = {torch.nn.Module: "torch.nn.Module", torch.Tensor: "torch.Tensor"}
_TOKEN_BYTES = 8
"""Bytes of a token id, which is a 64-bit number at input and output."""


class StepMemory:
    """Classifies memory of a step as weights, keys and values, or neither."""

    def __init__(
        self, weights: Weights, cache: Iterable[Tensor], context_bytes: Callable[[], int]
    ) -> None:
        """``context_bytes`` returns the bytes of keys and values of the step's sequences."""
        if isinstance(weights, (torch.nn.Module, torch.Tensor)):
            weights = [weights]
        self._weights = _all_of("weights", weights, (torch.nn.Module, torch.Tensor))
        self._groups = {address(tensor): WEIGHTS for tensor in self._tensors()}
        # Kept alive, so that no other tensor gets one of their addresses.
        self._cache = _all_of("cache", cache, (torch.Tensor,))
        self._groups |= {address(tensor): KEYS_AND_VALUES for tensor in self._cache}
        self._context_bytes = context_bytes

    @property
    def has_weights(self) -> bool:
        return bool(self._weights)

    def group_of(self, of: int) -> str:
        """Return the kind of memory at an address, that of a tensor's storage."""
        return self._groups.get(of, ACTIVATIONS)

    def min_bytes(self, tokens: int) -> Mapping[str, int]:
        """Return the minimum traffic of a step of ``tokens`` tokens that has just ended.

        That is each weight once (of embedding tables, only the rows of the tokens), the keys and
        values of all contexts once, including the new ones, and a token id in and out per token.
        """
        return {
            WEIGHTS: sum(self._least_weights(tokens)),
            KEYS_AND_VALUES: self._context_size(),
            ACTIVATIONS: 2 * _TOKEN_BYTES * tokens,
        }

    def _context_size(self) -> int:
        size = self._context_bytes()
        try:
            return index(size)
        except TypeError:
            raise CannotCompare(
                f"context_bytes= must return a whole number, and returned a {type(size).__name__}"
            ) from None

    def _tensors(self) -> Iterator[Tensor]:
        for item in self._weights:
            if isinstance(item, torch.nn.Module):
                yield from item.parameters()
                yield from item.buffers()
            else:
                yield item

    def _least_weights(self, tokens: int) -> Iterator[int]:
        """Yield the minimum bytes to read of each weight."""
        whole: dict[tuple[int, int], int] = {}
        rows: dict[tuple[int, int], int] = {}
        for tensor, is_table in self._parameters():
            place = address(tensor), int(tensor.storage_offset())
            if is_table:
                width = tensor[0].numel() * tensor.element_size()
                rows[place] = min(tokens * width, span_bytes(tensor))
            else:
                whole[place] = max(span_bytes(tensor), whole.get(place, 0))
        # An embedding table that is tied to the language-model head is read whole.
        yield from whole.values()
        yield from (size for place, size in rows.items() if place not in whole)

    def _parameters(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield each weight, with True for an embedding table, read only in some rows."""
        for item in self._weights:
            if isinstance(item, torch.nn.Module):
                for module in item.modules():
                    is_table = isinstance(module, torch.nn.Embedding)
                    for tensor in module.parameters(recurse=False):
                        yield tensor, is_table
            else:
                yield item, False


def _all_of(name: str, argument: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Flatten an argument into a list, and raise if an item has another type."""
    try:
        items = tree_leaves([*argument])
    except TypeError:
        items = [argument]
    if wrong := [each for each in items if not isinstance(each, kinds)]:
        expected = " or ".join(_NAMES[kind] for kind in kinds)
        raise CannotCompare(f"{name}= must hold {expected}, and not {type(wrong[0]).__name__}")
    return items


NOT_COUNTED = "not_counted"
_SHARES = {WEIGHTS: "weights", KEYS_AND_VALUES: "keys and values", ACTIVATIONS: "all else"}


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Traffic of a step."""

    work: StepWork
    min_bytes: Mapping[str, int]
    """Minimum bytes that any such step must move, by group."""

    def bytes_moved(self, group: str) -> int:
        return sum(self.work.groups[group].values())

    def in_words(self) -> Iterator[str]:
        """Describe the traffic next to the minimum, and list operations that were not counted."""
        moved = {group: self.bytes_moved(group) for group in _SHARES}
        skipped = self.work.groups[NOT_COUNTED]
        at_least = "at least " if skipped else ""
        yield f"{at_least}{_format_moved(sum(moved.values()), sum(self.min_bytes.values()))}"
        for group, title in _SHARES.items():
            yield f"  {title}: {_format_moved(moved[group], self.min_bytes[group])}"
        if skipped:
            yield f"  not counted: {', '.join(f'{name} ({n})' for name, n in skipped.items())}"


def _format_moved(moved: int, minimum: int) -> str:
    ratio = (
        f"{moved / minimum:,.{0 if moved >= 100 * minimum else 2}f} times "
        if minimum
        else "against "
    )
    return f"{moved:,} bytes, {ratio}the minimum of {minimum:,}"


def measure_bytes(step: Step, memory: StepMemory, device: str) -> StepBytes:
    """Return the traffic of one step; raise if the next step's differs."""
    warm_up(step, 1)
    first, second = (_measure_once(step, memory, device) for _ in range(2))
    refuse_differences(first.work, second.work)
    if memory.has_weights and not first.work.groups[WEIGHTS]:
        skipped = ", ".join(first.work.groups[NOT_COUNTED]) or "nothing"
        raise CannotCompare(
            f"weights=: no counted operation reads any of them; not counted: {skipped}"
        )
    _refuse_below_minimum(first)
    return first


def _refuse_below_minimum(measured: StepBytes) -> None:
    """Raise if less traffic of keys and values was counted than the minimum.

    Weights may be below it: a step of a mixture-of-experts model does not read all of them.
    """
    moved, minimum = measured.bytes_moved(KEYS_AND_VALUES), measured.min_bytes[KEYS_AND_VALUES]
    if moved < minimum and not measured.work.groups[NOT_COUNTED]:
        raise CannotCompare(
            f"keys and values: {_format_moved(moved, minimum)}, and no step can move less; "
            "probably the step replaces tensors of cache=, as torch.cat does, which must be "
            "written in place; otherwise context_bytes= returns more than the step reads"
        )


def _measure_once(step: Step, memory: StepMemory, device: str) -> StepBytes:
    step.prepare()
    recorder = ByteRecorder(device)
    with recorder, record_replays(recorder):
        step.run()
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for by, place, amount in recorder.accesses:
        assert isinstance(amount, int), "amounts are resolved while a step runs"
        if amount:
            counts[memory.group_of(place)][by] += amount
    counts[NOT_COUNTED] = recorder.not_counted
    work = StepWork(step.tokens, {group: dict(counts[group]) for group in GROUPS})
    return StepBytes(work, memory.min_bytes(step.tokens))
