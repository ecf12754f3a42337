"""How many bytes a torch operation must move, by its arguments.

An operation reads what its tensors span and writes its results, each region once. One that picks
rows reads those rows and not the whole table. Views and tensors without values move nothing.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    Given = Mapping[str, Any]
    """The arguments of an operation by name."""

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
