"""Quantised caches: positions that no step writes keep their bits, and so do their scales."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.beams import Reorder
from pytest_roseinfer.capabilities.cache_data import (
    MAX_RELATIVE_ERROR,
    SCALE_SCOPES,
    Tolerance,
    is_dtype,
)
from pytest_roseinfer.capabilities.capability import Capability, RankPolicy, optional
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
from pytest_roseinfer.capabilities.storage import newly_allocated_blocks, swapping_in_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class QuantisationMethods:
    """Adapter method and attribute for quantised caches."""

    tolerance: ClassVar[Mapping[str, Tolerance]] = {}
    """A ``Tolerance`` for each quantised one of ``dtypes``, by any name, such as ``"int8"``. Caches
    of other dtypes must read back bit for bit."""

    @optional
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return live views of the scales of keys and of values.

        Their shape is ``[layers, blocks, heads, block_size]``, or ``[layers, blocks, heads]`` if
        all tokens of a block share a scale; ``heads`` is 1 if all heads share one. The harness sets
        the scales of free blocks to NaN: do not define this if the cache resets scales when it
        frees a block.
        """


@invariant(rank=41, needs=("tolerance",), after=(AFTER_STEP, AFTER_ATTENTION, AFTER_BAD_CALL))
def unwritten_positions(observation: Observation) -> Finding | None:
    """A quantised cache must read back the same bits as before where a step did not write."""
    return _changed_reads(observation) or _changed_scales(observation)


def _changed_reads(observation: Observation) -> Finding | None:
    for (route, seq, layer), after in observation.after.reads.items():
        before = observation.before.reads.get((route, seq, layer))
        if isinstance(before, Exception) or isinstance(after, Exception) or before is None:
            continue
        num_old = min(_num_old_tokens(observation, seq), len(before[0]))
        for kind, was, now in zip("KV", before, after, strict=True):
            wrong = (as_bits(was[:num_old]) != as_bits(now[:num_old])).any(-1)
            if wrong.any():
                at, head = wrong.nonzero()[0].tolist()
                page, slot = divmod(at, observation.spec.block_size)
                return Finding(
                    f"{route}: sequence {seq}, layer {layer}, {kind}: position {at}, head {head} "
                    f"reads back {now[at, head].tolist()[:4]}, and before the step, which did "
                    f"not write there, {was[at, head].tolist()[:4]}",
                    Location(layer, {seq: page}, slot=slot),
                )
    return None


def _num_old_tokens(observation: Observation, seq: int) -> int:
    """Count the first tokens of a sequence that the step must not change."""
    written, step = observation.outcome.written, observation.operation
    if isinstance(step, Reorder) and seq in step.seqs:
        return 0
    new = sum(count for name, count in written.rows if name == seq) if written else 0
    num_old = observation.oracle.length(seq) - observation.oracle.unwritten(seq) - new
    changed = step.changed_seqs() if step else []
    if observation.payload.rounds_blocks and (new or seq in changed):
        num_old -= num_old % observation.spec.block_size
    return num_old


def _changed_scales(observation: Observation) -> Finding | None:
    if (
        observation.before.scales is None
        or observation.after.scales is None
        or observation.after.tables is None
    ):
        return None
    for kind, was, now in zip(
        "KV", observation.before.scales, observation.after.scales, strict=True
    ):
        wrong = as_bits(was) != as_bits(now)
        for layer in range(observation.spec.num_layers):
            _allow(observation, layer, wrong[layer])
        if wrong.any():
            layer, block, head, *slot = wrong.nonzero()[0].tolist()
            location = (layer, block, head, *slot)
            return Finding(
                f"layer {layer}, {kind}, block {block}, head {head}: the scale is "
                f"{now[location].item():.6g}, and was {was[location].item():.6g} before the step, "
                "which did not write there",
                location_of_block(observation, layer, block, *slot),
            )
    return None


def _allow(observation: Observation, layer: int, wrong: torch.Tensor) -> None:
    """Clear ``wrong`` for the scales of one layer that the step may have changed."""
    if observation.declared.prefixes.shares == "equal prefixes":
        # As in the arena, only blocks that stay cached must keep their contents.
        was, is_now = (
            each.ledger(layer).cached for each in (observation.before, observation.after)
        )
        wrong[[block for block in range(len(wrong)) if block not in {*was} & {*is_now}]] = False
        return
    free_to_change = newly_allocated_blocks(observation, layer)
    free_to_change |= swapping_in_blocks(observation, layer)
    if observation.operation and observation.operation.padding():
        free_to_change |= observation.scratch_blocks
    wrong[list(free_to_change)] = False
    for block, position in observation.slots(layer):
        # In a block with reserved room, the first token may reset all scales.
        if position == 0 or wrong.ndim == 2 or observation.payload.rounds_blocks:
            wrong[block] = False
        else:
            wrong[block, :, position] = False


def refuse_tolerance(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a tolerance with invalid values."""
    for name, tolerance in adapter.tolerance.items():
        if not isinstance(tolerance, Tolerance):
            raise TypeError(
                f"{adapter.__name__}.tolerance[{name!r}] is {tolerance!r}: write Tolerance(1 / 250)"
            )
        if not (
            0 < tolerance.of_greatest < MAX_RELATIVE_ERROR
            and tolerance.over in SCALE_SCOPES
            and is_dtype(tolerance.tensors)
        ):
            raise TypeError(
                f"{adapter.__name__}.tolerance[{name!r}] is {tolerance}: of_greatest lies between "
                f"0 and {MAX_RELATIVE_ERROR}, over is {' or '.join(map(repr, SCALE_SCOPES))}, and "
                "tensors is the name of a torch dtype"
            )


QUANTISATION = Capability(
    methods=QuantisationMethods,
    sharded={"scales": RankPolicy.STORED},
    invariants=(unwritten_positions,),
    refuse=(refuse_tolerance,),
)
