"""Quantised caches: what nobody wrote stays the same to the bit, and so do its scales."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.cache_data import MOST, OVER, Tolerance, is_dtype
from pytest_roseinfer.capabilities.capability import Across, Capability, optional
from pytest_roseinfer.capabilities.observation import (
    AFTER_ATTENTION,
    AFTER_BAD_CALL,
    AFTER_STEP,
    Finding,
    Location,
    Observation,
    invariant,
    location_of_block,
)
from pytest_roseinfer.capabilities.payload import as_bits
from pytest_roseinfer.capabilities.storage import handed_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class QuantisationMethods:
    """The method that shows scales."""

    tolerance: ClassVar[Mapping[str, Tolerance]] = {}
    """A ``Tolerance`` for each of ``dtypes`` that is quantised, under any name, such as
    ``"int8"``. Those of other dtypes must read back bit for bit."""

    @optional
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return live views of a quantised cache's scales, those of keys and those of values.

        They are ``[layers, blocks, heads, block_size]``, or ``[layers, blocks, heads]`` where all
        tokens of a block have one scale; where all heads have one, ``heads`` is 1. Those of a block
        that nobody holds become NaN: leave this out if they are reset when a block is freed.
        """


@invariant(rank=41, needs=("tolerance",), after=(AFTER_STEP, AFTER_ATTENTION, AFTER_BAD_CALL))
def unwritten_positions(seen: Observation) -> Finding | None:
    """Where a step did not write, a quantised cache must read back the same bits as before."""
    return _changed_reads(seen) or _changed_scales(seen)


def _changed_reads(seen: Observation) -> Finding | None:
    for (route, seq, layer), found in seen.after.reads.items():
        before = seen.before.reads.get((route, seq, layer))
        if isinstance(before, Exception) or isinstance(found, Exception) or before is None:
            continue
        kept = min(_kept(seen, seq), len(before[0]))
        for kind, was, now in zip("KV", before, found, strict=True):
            wrong = (as_bits(was[:kept]) != as_bits(now[:kept])).any(-1)
            if wrong.any():
                at, head = wrong.nonzero()[0].tolist()
                page, slot = divmod(at, seen.spec.block_size)
                return Finding(
                    f"{route}: sequence {seq}, layer {layer}, {kind}: position {at}, head {head} "
                    f"reads back {now[at, head].tolist()[:4]}, and before the step, which did "
                    f"not write there, {was[at, head].tolist()[:4]}",
                    Location(layer, {seq: page}, slot=slot),
                )
    return None


def _kept(seen: Observation, seq: int) -> int:
    """Count the first tokens of a sequence that the step had no reason to change."""
    written = seen.outcome.written
    new = sum(count for name, count in written.rows if name == seq) if written else 0
    kept = seen.oracle.length(seq) - seen.oracle.unwritten(seq) - new
    changed = seen.operation.changed() if seen.operation else []
    if seen.payload.rounds_blocks and (new or seq in changed):
        kept -= kept % seen.spec.block_size
    return kept


def _changed_scales(seen: Observation) -> Finding | None:
    if seen.before.scales is None or seen.after.scales is None or seen.after.tables is None:
        return None
    for kind, was, now in zip("KV", seen.before.scales, seen.after.scales, strict=True):
        wrong = as_bits(was) != as_bits(now)
        for layer in range(seen.spec.num_layers):
            _allow(seen, layer, wrong[layer])
        if wrong.any():
            layer, block, head, *slot = wrong.nonzero()[0].tolist()
            where = (layer, block, head, *slot)
            return Finding(
                f"layer {layer}, {kind}, block {block}, head {head}: the scale is "
                f"{now[where].item():.6g}, and was {was[where].item():.6g} before the step, which "
                "did not write there",
                location_of_block(seen, layer, block, *slot),
            )
    return None


def _allow(seen: Observation, layer: int, wrong: torch.Tensor) -> None:
    """Leave out the scales of one layer that the step may have changed."""
    if (
        seen.declared.prefixes.shares == "equal prefixes"
    ):  # as in the arena, only what is kept is known
        was, is_now = (each.ledger(layer).cached for each in (seen.before, seen.after))
        wrong[[block for block in range(len(wrong)) if block not in {*was} & {*is_now}]] = False
        return
    free_to_change = handed_out(seen, layer)
    if seen.operation and seen.operation.padding():
        free_to_change |= seen.scratch_blocks
    wrong[list(free_to_change)] = False
    for block, position in seen.slots(layer):
        # Of a block that room was reserved in, all scales may be reset with the first token.
        if position == 0 or wrong.ndim == 2 or seen.payload.rounds_blocks:
            wrong[block] = False
        else:
            wrong[block, :, position] = False


def refuse_tolerance(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a tolerance that makes no sense."""
    for name, said in adapter.tolerance.items():
        if not isinstance(said, Tolerance):
            raise TypeError(
                f"{adapter.__name__}.tolerance[{name!r}] is {said!r}: write Tolerance(1 / 250)"
            )
        if not (0 < said.of_greatest < MOST and said.over in OVER and is_dtype(said.tensors)):
            raise TypeError(
                f"{adapter.__name__}.tolerance[{name!r}] is {said}: of_greatest lies between 0 and "
                f"{MOST}, over is {' or '.join(map(repr, OVER))}, and tensors is the name of a "
                "torch dtype"
            )


QUANTISATION = Capability(
    methods=QuantisationMethods,
    sharded={"scales": Across.STORED},
    invariants=(unwritten_positions,),
    refuse=(refuse_tolerance,),
)
