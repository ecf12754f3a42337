"""The bytes that a step moves, by owner, and the least that it must move."""

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
    Listening,
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

    Given = Mapping[str, Any]
    """The arguments of an operation by name."""
    Amount = int | Callable[[], int]
    Weights = torch.nn.Module | Tensor | Iterable["torch.nn.Module | Tensor"]


# How many bytes a torch operation must move, by its arguments.
#
# An operation reads what its tensors span and writes its results, each region once. One that picks
# rows reads those rows and not the whole table. Views and tensors without values move nothing.


_NO_VALUES = {
    *("empty", "new_empty", "resize_", "set_", "as_strided_", "squeeze_", "unsqueeze_"),
    *("t_", "transpose_", "swapaxes_", "detach_", "rename_", "record_stream", "requires_grad_"),
}
"""Operations that make a tensor without values, or change only how memory is looked at."""
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
"""Operations that read as much of this argument as their result holds."""
_ADDS = {"index_add_", "scatter_add_", "scatter_reduce_"}
"""Operations that read the places they write."""


def operation_moves(
    func: Any, args: Any, kwargs: Any, result: Any
) -> Iterator[tuple[Tensor, int]] | None:
    """Yield every tensor that is read or written, with the bytes; None if nothing says how many.

    Nothing is known of operations that are not torch's own, nor of sparse tensors.
    """
    tensors = tensors_in((args, kwargs, result))
    if func.namespace not in ("aten", "prims") or any(
        tensor.layout is not torch.strided for tensor in tensors
    ):
        return None
    return _moves(func, _by_name(func, args, kwargs), result)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def spanned(tensor: Tensor) -> int:
    """Return the bytes that a tensor touches: a dimension that was expanded has one place."""
    if not tensor.numel():
        return 0
    dims = [*zip(tensor.shape, tensor.stride(), strict=True)]
    different = prod(size for size, stride in dims if stride)
    span = 1 + sum((size - 1) * stride for size, stride in dims)
    return min(different, span) * tensor.element_size()


def _by_name(func: Any, args: Any, kwargs: Any) -> Given:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _moves(func: Any, given: Given, result: Any) -> Iterator[tuple[Tensor, int]]:
    name = func.overloadpacket.__name__
    inputs = {address(tensor) for tensor in tensors_in(given)}
    fresh = [tensor for tensor in tensors_in(result) if address(tensor) not in inputs]
    if name in _NO_VALUES or name.startswith(("empty_", "new_empty_")):
        return
    if not fresh and not func._schema.is_mutable:  # a view
        return
    seen = set()
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(given.get(argument.name)):
            region = (address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
            if not written and region in seen:
                continue
            seen.add(region)
            if written:
                yield tensor, _written(name, argument, given, tensor)
            else:
                picked = _PICKS.get(name) == argument.name
                yield tensor, _at_most(tensor, tensors_in(result)[0].numel() if picked else None)
    for tensor in fresh:
        yield tensor, spanned(tensor)


def _written(name: str, argument: Any, given: Given, tensor: Tensor) -> int:
    """Return the bytes that are moved of an argument that is written, and mostly read too."""
    if places := _PLACES.get(name):
        reads = name in _ADDS or given.get("accumulate") or given.get("reduce")
        return _at_most(tensor, places(given)) * (2 if reads else 1)
    return spanned(tensor) * (1 if argument.is_out or name in _OVERWRITES else 2)


def _at_most(tensor: Tensor, elements: int | None) -> int:
    """Return the bytes of so many elements of a tensor, or of all."""
    whole = spanned(tensor)
    return whole if elements is None else min(whole, elements * tensor.element_size())


def _assigned(given: Given) -> int:
    """Return how many places an assignment to indices writes; to a mask, all it may."""
    tensor, indices = given["self"], given["indices"]
    used = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in used):
        return int(tensor.numel())
    places: int = torch.broadcast_tensors(*used)[0].numel()  # type: ignore[no-untyped-call]
    kept = [
        size for at, size in enumerate(tensor.shape) if at >= len(indices) or indices[at] is None
    ]
    return places * int(prod(kept))


def _rows(given: Given) -> int:
    tensor, index = given["self"], given["index"]
    return int(index.numel()) * int(tensor.numel()) // max(1, int(tensor.shape[given["dim"]]))


def _indexed(given: Given) -> int:
    return int(given["index"].numel())


_PLACES: Mapping[str, Callable[[Given], int]] = {
    "_index_put_impl_": _assigned,
    "index_add_": _rows,
    "index_copy_": _rows,
    "index_fill_": _rows,
    "index_put_": _assigned,
    "put_": _indexed,
    "scatter_": _indexed,
    "scatter_add_": _indexed,
    "scatter_reduce_": _indexed,
}
"""For operations that write some places of ``self``, how many these are."""


# Noting what torch operations and Triton kernels move, in a step or in the capture of a graph.


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


# What CUDA graphs move: their launches are noted when they are captured, and count in replays.
#
# The host does nothing in a replay but start it. Amounts that depend on what tensors hold, such as
# the lengths of sequences, are worked out anew when a replay begins.


DEVICE_TYPE = "cuda"
UNKNOWN = "a CUDA graph captured before the test had roseinfer_costs"
_captured: WeakKeyDictionary[torch.cuda.CUDAGraph, ByteRecorder] = WeakKeyDictionary()


@contextmanager
def noting_captures() -> Iterator[None]:
    """Note what is captured meanwhile, whoever captures it."""
    kind = torch.cuda.CUDAGraph
    begin, end = kind.capture_begin, kind.capture_end
    under_way: dict[Any, ByteRecorder] = {}

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        under_way[graph] = ByteRecorder(DEVICE_TYPE, captures=True).__enter__()

    def capture_end(graph: Any) -> None:
        if graph in under_way:  # it began meanwhile too
            _captured[graph] = under_way.pop(graph)
            _captured[graph].__exit__(None, None, None)
        end(graph)

    with (
        mock.patch.object(kind, "capture_begin", capture_begin),
        mock.patch.object(kind, "capture_end", capture_end),
    ):
        yield


@contextmanager
def counting_replays(recorder: ByteRecorder) -> Iterator[None]:
    """Have ``recorder`` note what every replay moves."""
    kind = torch.cuda.CUDAGraph
    run = kind.replay

    def replay(graph: Any) -> None:
        if graph in _captured:
            for move in _captured[graph].moves:
                recorder.note(move)
            recorder.not_counted.update(_captured[graph].not_counted)
        else:
            recorder.not_counted[UNKNOWN] += 1
        run(graph)

    with mock.patch.object(kind, "replay", replay):
        yield


# Whose memory a step moves: weights, keys and values, or neither; and the least it must move.


WEIGHTS = "weights"
KEYS_AND_VALUES = "keys_and_values"
ACTIVATIONS = "activations"
"""All that is neither: also indices, block tables and logits."""

_NAMES = {torch.nn.Module: "torch.nn.Module", torch.Tensor: "torch.Tensor"}
_TOKEN_BYTES = 8
"""A token is a 64-bit number where it comes in, and where the next one goes out."""


class StepMemory:
    """Tells the memory of a step's weights and of its keys and values from all other."""

    def __init__(
        self, weights: Weights, cache: Iterable[Tensor], context_bytes: Callable[[], int]
    ) -> None:
        """``context_bytes`` says what the keys and values of the step's sequences take."""
        if isinstance(weights, (torch.nn.Module, torch.Tensor)):
            weights = [weights]
        self._weights = _all_of("weights", weights, (torch.nn.Module, torch.Tensor))
        self._groups = {address(tensor): WEIGHTS for tensor in self._tensors()}
        # Kept, so that no other tensor gets an address of theirs.
        self._cache = _all_of("cache", cache, (torch.Tensor,))
        self._groups |= {address(tensor): KEYS_AND_VALUES for tensor in self._cache}
        self._context_bytes = context_bytes

    @property
    def has_weights(self) -> bool:
        return bool(self._weights)

    def group_of(self, of: int) -> str:
        """Return whose memory lies at an address, that of a tensor's storage."""
        return self._groups.get(of, ACTIVATIONS)

    def least(self, tokens: int) -> Mapping[str, int]:
        """Return the least that a step of so many tokens must move, when it has just ended.

        That is every weight once, of tables the rows of the tokens; the keys and values of the
        contexts once, the new ones included; and a token in and one out for each.
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
        for given in self._weights:
            if isinstance(given, torch.nn.Module):
                yield from given.parameters()
                yield from given.buffers()
            else:
                yield given

    def _least_weights(self, tokens: int) -> Iterator[int]:
        """Yield the least to be read of each weight."""
        whole: dict[tuple[int, int], int] = {}
        rows: dict[tuple[int, int], int] = {}
        for tensor, is_table in self._parameters():
            place = address(tensor), int(tensor.storage_offset())
            if is_table:
                width = tensor[0].numel() * tensor.element_size()
                rows[place] = min(tokens * width, spanned(tensor))
            else:
                whole[place] = max(spanned(tensor), whole.get(place, 0))
        # A table that is a language-model head too is read whole.
        yield from whole.values()
        yield from (size for place, size in rows.items() if place not in whole)

    def _parameters(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield every weight, and whether only the rows of tokens need be read of it."""
        for given in self._weights:
            if isinstance(given, torch.nn.Module):
                for module in given.modules():
                    is_table = isinstance(module, torch.nn.Embedding)
                    for tensor in module.parameters(recurse=False):
                        yield tensor, is_table
            else:
                yield given, False


def _all_of(name: str, given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return what was given one by one, and raise for anything of another kind."""
    try:
        found = tree_leaves([*given])
    except TypeError:
        found = [given]
    if wrong := [each for each in found if not isinstance(each, kinds)]:
        wanted = " or ".join(_NAMES[kind] for kind in kinds)
        raise CannotCompare(f"{name}= must hold {wanted}, and not {type(wrong[0]).__name__}")
    return found


NOT_COUNTED = "not_counted"
_SHARES = {WEIGHTS: "weights", KEYS_AND_VALUES: "keys and values", ACTIVATIONS: "all else"}


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes that a step moved."""

    work: StepWork
    least: Mapping[str, int]
    """For each group, the least that any such step must move."""

    def moved(self, group: str) -> int:
        return sum(self.work.groups[group].values())

    def in_words(self) -> Iterator[str]:
        """Say how much was moved, beside the least, and what was not looked at."""
        moved = {group: self.moved(group) for group in _SHARES}
        skipped = self.work.groups[NOT_COUNTED]
        at_least = "at least " if skipped else ""
        yield f"{at_least}{_beside(sum(moved.values()), sum(self.least.values()))}"
        for group, title in _SHARES.items():
            yield f"  {title}: {_beside(moved[group], self.least[group])}"
        if skipped:
            yield f"  not counted: {', '.join(f'{name} ({n})' for name, n in skipped.items())}"


def _beside(moved: int, least: int) -> str:
    ratio = f"{moved / least:,.{0 if moved >= 100 * least else 2}f} times " if least else "beside "
    return f"{moved:,} bytes, {ratio}the least of {least:,}"


def measure_bytes(step: Step, memory: StepMemory, device: str) -> StepBytes:
    """Return the bytes that one step moves, which must be the same in the next."""
    warm_up(step, 1)
    first, second = (_moved(step, memory, device) for _ in range(2))
    refuse_differences(first.work, second.work)
    if memory.has_weights and not first.work.groups[WEIGHTS]:
        skipped = ", ".join(first.work.groups[NOT_COUNTED]) or "nothing"
        raise CannotCompare(
            f"nothing that was counted reads any of weights=; what was not counted: {skipped}"
        )
    _refuse_less_than_the_least(first)
    return first


def _refuse_less_than_the_least(found: StepBytes) -> None:
    """Raise if fewer keys and values were moved than any such step must move.

    Weights may be fewer: a step of a model with experts does not read them all.
    """
    moved, least = found.moved(KEYS_AND_VALUES), found.least[KEYS_AND_VALUES]
    if moved < least and not found.work.groups[NOT_COUNTED]:
        raise CannotCompare(
            f"keys and values: {_beside(moved, least)}, and no step can move less. Probably it "
            "replaces tensors that cache= names, as torch.cat does: they must stay the same "
            "tensors, which are written in place. Else context_bytes= returns more than it reads"
        )


def _moved(step: Step, memory: StepMemory, device: str) -> StepBytes:
    step.prepare()
    recorder = ByteRecorder(device)
    with recorder, counting_replays(recorder):
        step.run()
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for by, place, amount in recorder.moves:
        assert isinstance(amount, int), "a step runs, so that no amount is open"
        if amount:
            counts[memory.group_of(place)][by] += amount
    counts[NOT_COUNTED] = recorder.not_counted
    work = StepWork(step.tokens, {group: dict(counts[group]) for group in GROUPS})
    return StepBytes(work, memory.least(step.tokens))
