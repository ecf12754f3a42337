"""Block managers: the adapter of docs/how-to/block-managers.md drives one as a scheduler would."""

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
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "block-managers.md"


class Manager:
    """Stores full blocks by the tokens up to their end. It is right."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.holders: Counter[int] = Counter()
        self.unused = list(range(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.kept: dict[int, tuple[int, ...]] = {}
        """The tokens up to the end of each full block."""

    def find_blocks(self, token_ids: Sequence[int]) -> list[int]:
        block_of = {tokens: block for block, tokens in self.kept.items()}
        blocks: list[int] = []
        for end in range(self.size, len(token_ids), self.size):
            if (block := block_of.get(tuple(token_ids[:end]))) is None:
                break
            blocks.append(block)
        return blocks

    def count_found(self, token_ids: Sequence[int]) -> int:
        return len(self.find_blocks(token_ids)) * self.size

    def can_allocate(self, token_ids: Sequence[int]) -> bool:
        blocks_found = self.find_blocks(token_ids)
        num_unheld = sum(not self.holders[block] for block in blocks_found)
        return -(-len(token_ids) // self.size) - len(blocks_found) + num_unheld <= len(self.unused)

    def allocate(self, seq: int, token_ids: Sequence[int]) -> int:
        blocks_found = self.find_blocks(token_ids)
        for block in blocks_found:
            self.hold(block)
        self.tables[seq], self.token_ids[seq] = (
            blocks_found,
            list(token_ids[: len(blocks_found) * self.size]),
        )
        begin = len(self.token_ids[seq])
        for token in token_ids[begin:]:
            self.append(seq, token)
        return begin

    def hold(self, block: int) -> None:
        if not self.holders[block]:
            self.unused.remove(block)
        self.holders[block] += 1

    def can_append(self, seq: int) -> bool:
        return bool(self.unused or len(self.token_ids[seq]) % self.size)

    def append(self, seq: int, token: int) -> None:
        table, token_ids = self.tables[seq], self.token_ids[seq]
        if len(token_ids) % self.size == 0:
            self.forget(self.unused[0])
            table.append(self.unused[0])
            self.hold(table[-1])
        token_ids.append(token)
        if len(token_ids) % self.size == 0:
            self.kept[table[-1]] = tuple(token_ids)

    def forget(self, block: int) -> None:
        self.kept.pop(block, None)

    def free(self, seq: int) -> None:
        for block in reversed(self.tables.pop(seq)):
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                self.unused.append(block)


class KeepsTheTokensOfTakenBlocks(Manager):
    """Finds a block by its old tokens after it was taken."""

    def forget(self, block: int) -> None:
        pass


class CountsNoFoundBlocks(Manager):
    """Does not count found blocks, which are taken from the free blocks too."""

    def can_allocate(self, token_ids: Sequence[int]) -> bool:
        return -(-len(token_ids) // self.size) - len(self.find_blocks(token_ids)) <= len(
            self.unused
        )


def adapter(manager: type[Manager]) -> type[KVCacheAdapter]:
    """Return the adapter of the page."""
    page = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from pytest_roseinfer import BlockM.*?)```", page, re.S)
    names: dict[str, Any] = {"Manager": manager, "__name__": __name__}
    exec(example, names)
    page_adapter: type[KVCacheAdapter] = names["MyBlocks"]
    return page_adapter


@pytest.mark.usefixtures("short_run")
def test_right_block_manager_passes() -> None:
    settings.set_current(settings.Settings(examples=40, steps=12, seed=1))
    tests = conformance(adapter(Manager))()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


class FindsNothing(Manager):
    """Stores every prompt again."""

    def find_blocks(self, token_ids: Sequence[int]) -> list[int]:  # noqa: ARG002
        return []


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
def test_block_manager_that_never_finds_a_prefix_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 100)

    class FindsSome(adapter(FindsNothing)):  # type: ignore[misc]
        prefixes = adapter(FindsNothing).prefixes.but(finds="some")

    conformance(FindsSome)().test_histories()
    (row,) = TargetVerdict(coverage.current().of(FindsSome)).rows()
    assert (row.name, row.verdict) == ("prefix_hit", "NOT REACHED")


def test_begin_that_returns_none_fails() -> None:
    class ReturnsNone(adapter(Manager)):  # type: ignore[misc]
        def begin(self, *prompt: Any) -> Any:
            super().begin(*prompt)

    with pytest.raises(Divergence, match=r"begin\(\) must return how many tokens were found"):
        check_drawn_histories(ReturnsNone, 20, 1, partial(run_history, ReturnsNone))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", [1, 2])
@pytest.mark.parametrize("manager", [KeepsTheTokensOfTakenBlocks, CountsNoFoundBlocks])
def test_broken_block_manager_fails(manager: type[Manager], seed_number: int) -> None:
    broken = adapter(manager)
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 200, seed_number, partial(run_history, broken))
