"""A block manager is driven as a scheduler would, by the example of docs/how-to.md."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import Divergence, KVCacheAdapter, conformance, run_history, settings
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from tests.capabilities.test_truncation import short_run as short_run
from tests.histories.drawn import drawn

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).parents[2] / "docs" / "how-to.md"


class Manager:
    """Keeps full blocks by what is said up to their end. It is right."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.holders: Counter[int] = Counter()
        self.unused = list(range(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.said: dict[int, list[int]] = {}
        self.kept: dict[int, tuple[int, ...]] = {}
        """What is said up to the end of each full block."""

    def found(self, said: Sequence[int]) -> list[int]:
        block_of = {text: block for block, text in self.kept.items()}
        blocks: list[int] = []
        for end in range(self.size, len(said), self.size):
            if (block := block_of.get(tuple(said[:end]))) is None:
                break
            blocks.append(block)
        return blocks

    def count_found(self, said: Sequence[int]) -> int:
        return len(self.found(said)) * self.size

    def can_allocate(self, said: Sequence[int]) -> bool:
        found = self.found(said)
        taken = sum(not self.holders[block] for block in found)
        return -(-len(said) // self.size) - len(found) + taken <= len(self.unused)

    def allocate(self, seq: int, said: Sequence[int]) -> int:
        found = self.found(said)
        for block in found:
            self.hold(block)
        self.tables[seq], self.said[seq] = found, list(said[: len(found) * self.size])
        begin = len(self.said[seq])
        for token in said[begin:]:
            self.append(seq, token)
        return begin

    def hold(self, block: int) -> None:
        if not self.holders[block]:
            self.unused.remove(block)
        self.holders[block] += 1

    def can_append(self, seq: int) -> bool:
        return bool(self.unused or len(self.said[seq]) % self.size)

    def append(self, seq: int, token: int) -> None:
        table, said = self.tables[seq], self.said[seq]
        if len(said) % self.size == 0:
            self.forget(self.unused[0])
            table.append(self.unused[0])
            self.hold(table[-1])
        said.append(token)
        if len(said) % self.size == 0:
            self.kept[table[-1]] = tuple(said)

    def forget(self, block: int) -> None:
        self.kept.pop(block, None)

    def free(self, seq: int) -> None:
        for block in reversed(self.tables.pop(seq)):
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                self.unused.append(block)


class KeepsWhatItHandsOut(Manager):
    """A block is found for what it held before it was taken for something else."""

    def forget(self, block: int) -> None:
        pass


class CountsNoFoundBlocks(Manager):
    """What is found is taken from the free blocks too, and they are not counted."""

    def can_allocate(self, said: Sequence[int]) -> bool:
        return -(-len(said) // self.size) - len(self.found(said)) <= len(self.unused)


def adapter(manager: type[Manager]) -> type[KVCacheAdapter]:
    """Return the adapter that the page writes."""
    page = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from pytest_roseinfer import BlockM.*?)```", page, re.S)
    names: dict[str, Any] = {"Manager": manager, "__name__": __name__}
    exec(example, names)
    written: type[KVCacheAdapter] = names["MyBlocks"]
    return written


@pytest.mark.usefixtures("short_run")
def test_a_manager_that_is_right_passes() -> None:
    settings.set_current(settings.Settings(examples=40, steps=12, seed=1))
    tests = conformance(adapter(Manager))()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


class FindsNothing(Manager):
    """Every prompt is stored anew."""

    def found(self, said: Sequence[int]) -> list[int]:  # noqa: ARG002
        return []


@pytest.mark.usefixtures("short_run")
def test_one_that_never_finds_a_prefix_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 100)

    class FindsSome(adapter(FindsNothing)):  # type: ignore[misc]
        prefixes = adapter(FindsNothing).prefixes.but(finds="some")

    conformance(FindsSome)().test_histories()
    (row,) = TargetVerdict(coverage.current().of(FindsSome)).rows()
    assert (row.name, row.verdict) == ("prefix_hit", "NOT REACHED")


def test_a_begin_that_counts_nothing_is_told() -> None:
    class ReturnsNone(adapter(Manager)):  # type: ignore[misc]
        def begin(self, *prompt: Any) -> Any:
            super().begin(*prompt)

    with pytest.raises(Divergence, match=r"begin\(\) must return how many tokens were found"):
        drawn(ReturnsNone, 20, 1, partial(run_history, ReturnsNone))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("manager", [KeepsWhatItHandsOut, CountsNoFoundBlocks])
def test_a_manager_that_is_wrong_is_found(manager: type[Manager], number: int) -> None:
    broken = adapter(manager)
    with pytest.raises(Divergence):
        drawn(broken, 200, number, partial(run_history, broken))
