"""Whose memory a step moves: weights, keys and values, or neither; and the least it must move."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.moved.operation_bytes import address, spanned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    Weights = torch.nn.Module | Tensor | Iterable["torch.nn.Module | Tensor"]

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
