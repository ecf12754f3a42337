"""What a cache is told of texts, what it keeps for those that come, and what it finds of each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.answers import checked
from pytest_roseinfer.cases.operations.operation import asked
from pytest_roseinfer.findings.contents import contents_of
from pytest_roseinfer.findings.released import released_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.cases.weak_hash import Collisions
    from pytest_roseinfer.findings.contents import Contents
    from pytest_roseinfer.findings.observation import Snapshot
    from pytest_roseinfer.findings.released import Released
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Table
    from pytest_roseinfer.oracle.texts import Said


@dataclass(slots=True)
class KeptTexts:
    oracle: Oracle
    in_order: bool
    """The cache declares in which order it gives up what it keeps."""
    contents: dict[int, Contents] = field(default_factory=dict)
    """What blocks held after the latest step, by a layer of each group."""
    shown: dict[int, Mapping[int, Table]] = field(default_factory=dict)
    """The tables then, alike."""
    finds: bool = False
    """A lookup has found something."""
    released: Mapping[int, Released] = field(default_factory=dict)
    """What was kept for later texts then."""

    def note(self, before: Snapshot, after: Snapshot, step: int) -> None:
        """Take what the cache showed before and after a step of this number."""
        self.finds |= any(isinstance(found, int) and found > 0 for found in after.matched.values())
        if self.in_order:
            kept = before.tables_of(0), after.ledger(0).cached
            self.released = released_of(self.released, *kept, self.contents.get(0, {}), step)
        self.contents = self.contents_after(after)
        for layer in self.oracle.groups:
            self.shown[layer] = after.tables_of(layer)

    def begun_with_found(self, after: Snapshot, rows: Sequence[tuple[int, int]]) -> int:
        """Count the sequences that began in this step with what a full block held before.

        A block may have been written anew with the same, so a lookup must have found something.
        """
        begun = [seq for seq, count in rows if count == self.oracle.length(seq)]
        return sum(self.finds and self._had(after, seq) for seq in begun)

    def _had(self, after: Snapshot, seq: int) -> bool:
        """Return True if a full block held before what the sequence has there now."""
        pages = [tuple(page.tokens) for page in self.oracle.sequences[seq]]
        return any(
            len(page) == self.oracle.block_size
            and block is not None
            and self.contents.get(layer, {}).get(block) == page
            for layer in self.oracle.groups
            for page, block in zip(pages, after.tables_of(layer)[seq], strict=False)
        )

    def contents_after(self, after: Snapshot) -> dict[int, Contents]:
        found: dict[int, Contents] = {}
        for layer in self.oracle.groups:
            tables, before = after.tables_of(layer), self.contents.get(layer, {})
            # A block that another group has got by now is no longer kept for this one.
            others = after.owners(*self.oracle.pool_of(layer)[1:]) if before else {}
            cached = {*after.ledger(layer).cached} - {*others}
            found[layer] = contents_of(
                self.oracle, tables, cached, before, self.shown.get(layer, {})
            )
        return found


def tell(adapter: KVCacheAdapter, said: Sequence[Said], *, written: bool) -> None:
    """Tell a cache what comes next: rows of a write, or a text that is looked up."""
    if "namespaces" in adapter.abilities:
        adapter.namespaces([each.namespace for each in said])
    if written and "texts" in adapter.abilities:
        adapter.texts([each.tokens for each in said])


@dataclass(frozen=True, slots=True)
class Lookups:
    """Lookups after one step, as a snapshot shows them."""

    matched: Mapping[tuple[int, int], int | Exception] = field(default_factory=dict)
    collided: frozenset[tuple[int, int]] = frozenset()


NO_LOOKUPS = Lookups()


def look_up_all(adapter: KVCacheAdapter, oracle: Oracle, collisions: Collisions | None) -> Lookups:
    """Look up every text, a little longer than any sequence and up to a block's edge."""
    size, texts = oracle.block_size, oracle.texts
    if not texts:
        return NO_LOOKUPS
    longest = max(map(oracle.length, oracle.sequences), default=0)
    counts = {longest + 1, -(-longest // size) * size or size}

    def find(text: Said) -> int:
        tell(adapter, [text], written=False)
        return checked.count(f"matched({list(text.tokens)})", adapter.matched(text.tokens))

    matched: dict[tuple[int, int], int | Exception] = {}
    collided = set()
    for key in product(range(len(texts.drawn)), counts):
        text, count = key
        with collisions.lookup() if collisions else nullcontext() as hashes:
            found = matched[key] = asked(find, texts.said(text, 0, count))
        if hashes and isinstance(found, int) and hashes.may_miss(found // size):
            collided.add(key)
    return Lookups(matched, frozenset(collided))
