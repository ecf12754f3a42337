"""Nothing that is stored may change but the slots written and the blocks copied to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.cases.payload import as_bits
from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.findings.location import location_of_change
from pytest_roseinfer.invariants.invariant import invariant

if TYPE_CHECKING:
    from pytest_roseinfer.running.observation import Observation


@invariant(rank=4, needs=("arena", "table"))
def arena(seen: Observation) -> Finding | None:
    """All that is stored is what it was, but for the tokens written and the blocks copied to."""
    for layer in range(seen.spec.num_layers):
        found = [cache[layer] for cache in seen.after.arena or ()]
        expected = _expected(seen, layer, found)
        for kind, image, cache in zip("KV", expected, found, strict=True):
            if not torch.equal(as_bits(image), as_bits(cache)):
                location, contents = location_of_change(seen, layer, kind, image, cache)
                return Finding(
                    f"layer {layer}, {kind}, block {location.block}, position {location.slot}, "
                    f"head {contents.head}: {contents.words()}",
                    location,
                )
    return None


def _expected(seen: Observation, layer: int, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a layer held, with what the step may have changed as it was found."""
    expected = [cache[layer].clone() for cache in seen.before.arena or ()]
    written = seen.slots(layer)
    opened = {block for block, at in written if at == 0}
    free_to_change = set(seen.after.owners(layer)) - set(seen.before.owners(layer)) - opened
    if seen.operation and seen.operation.padding():
        free_to_change |= seen.declared.scratch_blocks
    for block in free_to_change:
        for image, cache in zip(expected, found, strict=True):
            image[block] = cache[block]  # a copy: read-back has checked it
    if written and seen.outcome.written:
        blocks, positions = zip(*written, strict=True)
        new = seen.payload.layer(seen.outcome.written.tokens, layer)
        for image, tokens in zip(expected, new, strict=True):
            image[list(blocks), :, list(positions)] = tokens
    return expected
