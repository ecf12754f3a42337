"""Epochs: after a reset of the cache or a change of weights, nothing that was stored is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    RankPolicy,
    Run,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.observation import Finding, Observation, invariant
from pytest_roseinfer.capabilities.preemption import Preempt, Preempted
from pytest_roseinfer.capabilities.prefixes import LookUp, pending_prefixes
from pytest_roseinfer.capabilities.swapping import FinishSwapOut, SwapOut
from pytest_roseinfer.capabilities.writes import Append, Fill, Prefill, Reserve, begin_sequence
from pytest_roseinfer.oracle.pages import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from pytest_roseinfer.capabilities.observation import Snapshot


class EpochMethods:
    """Adapter method that begins an epoch."""

    reset_errors: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors of ``reset``: it raises one of them, and changes nothing, while a sequence holds a
    block; empty if sequences go on."""

    @optional
    def reset(self) -> None:
        """Forget all that was stored, as after new weights were loaded; an epoch begins.

        From now on, equal token ids have other keys and values, and no lookup finds older ones: not
        with the result of an earlier ``look_up``, nor after a ``fill``, ``finish_swap_out`` or
        ``finish_swap_in`` whose first part came before. A sequence that goes on, or is swapped out,
        keeps what it has; neither that nor its later tokens, which depend on it, are found by
        others. Tokens that were reserved count as older ones. A sequence without tokens, and one
        that is preempted, whose tokens are all written again, have no older tokens.
        """


@dataclass(slots=True)
class ResetPolicy(State):
    """Rule by which a cache refuses a reset."""

    any_of: ClassVar = ("reset",)
    refused_while_held: bool = False
    """True if a reset is refused while a sequence holds a block."""

    @classmethod
    def of(cls, adapter: Any, spec: Any) -> ResetPolicy:  # noqa: ARG003
        return cls(bool(adapter.reset_errors))


@operation.register("Reset")
class Reset(operation.Operation):
    """Reset the cache, which begins an epoch."""

    needs = frozenset({"reset", "use_tokens"})

    def describe(self) -> str:
        return "reset the cache"

    def allowed(self, oracle: operation.Oracle) -> bool:
        policy = oracle.state(ResetPolicy)
        return not (policy and policy.refused_while_held and any(oracle.sequences.values()))

    def refusal(self, oracle: operation.Oracle) -> operation.Refusal:
        if self.allowed(oracle):
            return operation.Operation.refusal(self, oracle)
        return operation.Refusal("reset_errors", "it must refuse", "sequences hold blocks")

    def change(self, oracle: operation.Oracle) -> None:
        preempted = oracle.state(Preempted)
        to_write_again = preempted.tokens if preempted else {}
        lengths = {seq: oracle.length(seq) for seq in oracle.sequences}
        lengths |= {seq: len(absence.tokens) for seq, absence in oracle.absent.items()}
        kept = {seq: length for seq, length in lengths.items() if seq not in to_write_again}
        oracle.begin_epoch({seq: length for seq, length in kept.items() if length})
        for seq, tokens in to_write_again.items():
            to_write_again[seq] = oracle.tokens_written_again(seq, tokens)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.reset()

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if writer.oracle.named or writer.oracle.lives:
            yield operation.DrawOption(95, 2, cls)


@invariant(rank=29, needs=("reset", "match_prefix"))
def refused_resets(observation: Observation) -> Finding | None:
    """A refused reset must leave stored texts as they were."""
    if observation.outcome.fits or not isinstance(observation.operation, Reset):
        return None
    before, after = observation.before.matches, observation.after.matches
    for text, count in before.keys() & after.keys():
        was, now = before[text, count], after[text, count]
        if was != now:
            return Finding(
                f"a refused reset changed the result of match_prefix() for text {text}, {count} "
                f"tokens long, from {was} to {now}"
            )
    return None


class Resets(Observer):
    """Counter of resets in the states that a cache may handle wrongly."""

    any_of = ("reset",)
    conditions: ClassVar = {
        "reset_of_stored_text": "A reset comes while a lookup finds tokens. Required of a cache "
        "that defines ``reset``, ``match_prefix`` and ``prefill``.",
        "text_after_reset": "A sequence begins with the first block of a text that was found right "
        "before the latest reset, and is not found now. Required of the same caches.",
        "reset_after_look_up": "A reset comes between ``look_up`` and ``begin_with`` of a text of "
        "which tokens are found. Required of a cache that also defines these two.",
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._forgotten: set[int] = set()
        """Texts that were found right before the latest reset, and did not begin a sequence yet."""

    def before(self, step: operation.Operation) -> Mapping[str, int]:
        oracle = self.run.oracle
        begun = {
            oracle.text_of(seq)
            for seq, count in step.rows()
            if count >= oracle.block_size and seq not in oracle.named and step.fits(oracle)
        }
        again = begun & self._forgotten
        self._forgotten -= again
        return {"text_after_reset": len(again - _found_texts(self.run.snapshot))}

    def after(self, observation: Observation) -> Mapping[str, int]:
        if not (isinstance(observation.operation, Reset) and observation.outcome.fits):
            return {}
        self._forgotten = _found_texts(observation.before)
        pending = map(self.run.oracle.text_of, pending_prefixes(self.run.oracle))
        return {
            "reset_of_stored_text": int(bool(self._forgotten)),
            "reset_after_look_up": len(self._forgotten.intersection(pending)),
        }


def _found_texts(snapshot: Snapshot) -> set[int]:
    """Return the texts that lookups find, at least in part."""
    return {text for (text, _), hit in snapshot.matches.items() if isinstance(hit, int) and hit > 0}


# Prelude


def reset_between(writer: operation.Writer) -> None:
    """Open with a text that is stored, a reset, and the same text again; or add no steps.

    At the reset, its sequence was freed, goes on with a block that is not full, or is on its way
    out of the cache; or the text was looked up, or is reserved and not written.
    """
    if writer.oracle.texts and writer.pick((True, True, False)):
        operation.add_while_fitting(writer, _reset_between(writer))


def _reset_between(writer: operation.Writer) -> Iterator[operation.Operation]:
    size, can, adapter = writer.oracle.block_size, writer.adapter.abilities, writer.adapter
    recomputed = adapter.prefixes.recomputed_tokens
    whole, more = size + recomputed, 2 * size - 1 + recomputed
    length = writer.pick((whole, whole, more, max(1, size - 1)))
    if Reserve.needs <= can and not adapter.reset_errors and not writer.between(0, 3):
        yield Reserve(writer.fresh(1), (length,), writer.layout())
        yield Reset()
        yield Fill()
        return
    if not writer.live:
        begin_sequence(writer, length)
    if leaving := _ways_to_leave(writer):
        yield from writer.pick(leaving)
    if LookUp.needs <= can and writer.between(0, 1):
        yield LookUp(writer.name_reusing_prefix(), length)
    yield Reset()
    if writer.filled:
        yield Append((writer.filled[0],), writer.layout())
    if writer.reuses_prefixes:
        yield Prefill(writer.name_reusing_prefix(), length, writer.layout())


def _ways_to_leave(writer: operation.Writer) -> list[list[operation.Operation]]:
    """List ways for the first sequence to give its blocks back; without steps, it goes on."""
    seq = next(iter(writer.live), None)
    if seq is None:
        return []
    ways: list[list[operation.Operation]] = [[Free(seq)], [Preempt(seq)]]
    if SwapOut(seq).possible(writer.oracle) and SwapOut(seq).allowed(writer.oracle):
        ways.append([SwapOut(seq), FinishSwapOut(seq)])
    can = writer.adapter.abilities
    offered = [way for way in ways if all(step.needs <= can for step in way)]
    return offered if writer.adapter.reset_errors else [*offered, []]


EPOCHS = Capability(
    methods=EpochMethods,
    states=(ResetPolicy,),
    preludes=(Prelude(("reset",), 12, reset_between),),
    walk=lambda at: [Reset()] if at.oracle.named or at.oracle.lives else [],
    sharded={"reset": RankPolicy.SAME},
    needs={"reset": ("use_tokens",)},
    operations=(Reset,),
    invariants=(refused_resets,),
    observers=(Resets,),
)
