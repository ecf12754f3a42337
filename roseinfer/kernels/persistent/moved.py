"""What a launch of the kernel of a whole step moves, for those who count bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.kernels.context_parts import num_parts
from roseinfer.kernels.moves import taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from roseinfer.kernels.persistent.sizes import StepSizes
    from roseinfer.kernels.persistent.step_weights import StepWeights

    Moved = list[tuple[Tensor, int | Callable[[], int]]]


@dataclass(frozen=True, slots=True)
class Launched:
    """A row's tokens, length and blocks, and the logits that the launch makes."""

    tokens: Tensor
    length: Tensor
    table: Tensor
    logits: Tensor

    def stored(self) -> int:
        return int(self.length[0])


def moved(
    sizes: StepSizes,
    weights: StepWeights,
    caches: Sequence[tuple[Tensor, Tensor]],
    handed: Sequence[Tensor],
    seen_of_parts: Sequence[Tensor],
    launched: Launched,
) -> Moved:
    """List tensors with the bytes that are read and written of each, every place once.

    Programs hand over all of ``handed``; of ``seen_of_parts`` they hand over some rows for each
    head, one for the new token and one for each part of the context.
    """
    turns = _different(each for one in weights.rotations() for each in (one.cosines, one.sines))
    in_rows = {id(each) for each in turns} | {id(weights.words)} - {id(weights.head)}
    whole = [each for each in _different(weights.tensors()) if id(each) not in in_rows]
    found: Moved = [(each, each.nbytes) for each in (*whole, launched.tokens, launched.length)]
    if weights.words is not weights.head:
        found.append((weights.words, taken(weights.words, sizes.width)))
    found += [(each, taken(each, sizes.turn)) for each in turns]
    token = sizes.kv_heads * sizes.dim
    for cache in (each for pair in caches for each in pair):
        found.append((cache, partial(_context, launched, cache, token)))
    found.append((launched.table, partial(_listed, launched, sizes.block_size)))
    found += [(each, 2 * each.nbytes) for each in handed]
    for each in seen_of_parts:
        found.append((each, partial(_of_parts, launched, each, sizes.heads)))
    return [*found, (launched.logits, launched.logits.nbytes)]


def _different(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(each): each for each in tensors}.values())


def _context(launched: Launched, cache: Tensor, token: int) -> int:
    """Return the bytes of what is stored, and of the new token."""
    return taken(cache, (launched.stored() + 1) * token)


def _listed(launched: Launched, block_size: int) -> int:
    return taken(launched.table, launched.stored() // block_size + 1)


def _of_parts(launched: Launched, seen: Tensor, heads: int) -> int:
    """Return what is written and read of ``[heads, parts, numbers]``."""
    stored = launched.stored()
    parts = 1 + (num_parts(stored) if stored else 0)
    return 2 * taken(seen, heads * parts * seen.shape[2])
