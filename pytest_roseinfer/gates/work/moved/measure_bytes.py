"""Running a step and adding up the bytes that it moves, by whose memory they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.measure_work import refuse_differences, warm_up
from pytest_roseinfer.gates.work.moved.byte_recorder import ByteRecorder
from pytest_roseinfer.gates.work.moved.captured_graphs import counting_replays
from pytest_roseinfer.gates.work.moved.step_memory import ACTIVATIONS, KEYS_AND_VALUES, WEIGHTS
from pytest_roseinfer.gates.work.step_work import GROUPS, StepWork

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_roseinfer.gates.work.measure_work import Step
    from pytest_roseinfer.gates.work.moved.step_memory import StepMemory

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
