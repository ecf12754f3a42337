"""Caches with trees of drafts: right ones, and broken ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.branching_text_caches import BranchingTextCache
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec

Slot = tuple[int, int]
"""A block, and a position in it."""


class TreeCache(CutCache):
    """Stores drafts one after another, and moves the accepted ones to the first of their slots.

    It is right.
    """

    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (4, 2, 3, 1, 8)
    standard_bad_calls: ClassVar[Sequence[str]] = ("accept_without_drafts",)
    bad_call_errors: ClassVar[tuple[type[BaseException], ...]] = (KeyError,)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.drafts: dict[int, list[Slot]] = {}
        """Slots of the drafts of each sequence."""

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.blocks_of(key.shape[1]) > len(self.unused):
            raise CacheFull
        for at in range(key.shape[1]):
            self.append([seq], key[:, at : at + 1], value[:, at : at + 1])

    def append_trees(
        self,
        seqs: Sequence[int],
        parents: Sequence[Sequence[int]],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        previous = list(self.unused), self.holders.copy(), dict(self.tables), self.lengths.copy()
        copies: list[Slot] = []
        slots: list[Slot] = []
        try:
            for seq, tree in zip(seqs, parents, strict=True):
                self.drafts[seq] = self.draft_slots(seq, len(tree), copies)
                slots += self.drafts[seq]
        except CacheFull:
            self.unused, self.holders, self.tables, self.lengths = previous
            for seq in seqs:
                self.drafts.pop(seq, None)
            raise
        self.lengths = previous[-1]
        for source, target in copies:
            self.copy(source, target)
        for row, (block, position) in enumerate(slots):
            self.write(block, position, key[:, row], value[:, row])

    def draft_slots(self, seq: int, count: int, copies: list[Slot]) -> list[Slot]:
        return [self.slot(seq, copies) for _ in range(count)]

    def accept_paths(self, seqs: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        if lacking := {*seqs} - self.drafts.keys():
            raise KeyError(f"sequences without drafts: {lacking}")
        for seq, path in zip(seqs, paths, strict=True):
            self.accept(seq, path, self.drafts.pop(seq))

    def accept(self, seq: int, path: Sequence[int], slots: list[Slot]) -> None:
        self.move([slots[draft] for draft in path], slots[: len(path)])
        self.lengths[seq] += len(path)
        self.drop_drafts(seq)

    def move(self, sources: list[Slot], targets: list[Slot]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.move_one(source, target)

    def move_one(self, source: Slot, target: Slot) -> None:
        for cache in (self.keys, self.values):
            cache[:, target[0], :, target[1]] = cache[:, source[0], :, source[1]]

    def drop_drafts(self, seq: int) -> None:
        """Drop the blocks after the tokens of a sequence."""
        self.keep(seq, self.blocks_of(self.lengths[seq]))

    def free(self, seq: int) -> None:
        self.drafts.pop(seq, None)
        self.drop(self.tables.pop(seq, ()))
        del self.lengths[seq]

    def preempt(self, seq: int) -> None:
        self.free(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill(seq, key, value)


class KeepsTheFirstDrafts(TreeCache):
    """T28: counts the accepted drafts, and moves none, so that the first drafts are read."""

    def move(self, sources: list[Slot], targets: list[Slot]) -> None: ...


class MovesInTheFirstLayer(TreeCache):
    """Moves accepted drafts in the first layer only, as a stage of a pipeline in SGLang 30775."""

    def move_one(self, source: Slot, target: Slot) -> None:
        for cache in (self.keys, self.values):
            cache[0, target[0], :, target[1]] = cache[0, source[0], :, source[1]]


class MovesKeysOnly(TreeCache):
    """Moves the keys of accepted drafts, and not their values."""

    def move_one(self, source: Slot, target: Slot) -> None:
        self.keys[:, target[0], :, target[1]] = self.keys[:, source[0], :, source[1]]


class MovesTheLastFirst(TreeCache):
    """10: moves the last draft of a path first, over an earlier one that has yet to move."""

    def move(self, sources: list[Slot], targets: list[Slot]) -> None:
        super().move(sources[::-1], targets[::-1])


class MovesIntoOneBlock(TreeCache):
    """Moves a path into the block where it begins, also where it goes on in the next one."""

    def move(self, sources: list[Slot], targets: list[Slot]) -> None:
        super().move(sources, [(targets[0][0], position) for _, position in targets])


class MovesThePathOfTheFirst(TreeCache):
    """T4: moves the first sequence's path in all trees of a batch, as far as they have it."""

    def accept_paths(self, seqs: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.first_path = paths[0]
        super().accept_paths(seqs, paths)

    def accept(self, seq: int, path: Sequence[int], slots: list[Slot]) -> None:
        first = [draft for draft in self.first_path[: len(path)] if draft < len(slots)]
        super().accept(seq, [*first, *path[len(first) :]], slots)


class CountsSiblings(TreeCache):
    """S11: counts the drafts before an accepted one as its positions, siblings included."""

    def accept(self, seq: int, path: Sequence[int], slots: list[Slot]) -> None:
        super().accept(seq, range(max(path) + 1) if path else path, slots)


class AcceptsOneAtLeast(TreeCache):
    """S11: keeps the first draft if none is accepted."""

    def accept(self, seq: int, path: Sequence[int], slots: list[Slot]) -> None:
        super().accept(seq, path or (0,), slots)


class LeaksBlocksOfDrafts(TreeCache):
    """S11: keeps the blocks of dropped drafts in the table."""

    def drop_drafts(self, seq: int) -> None: ...


class FreesBlocksOfTokensOnly(TreeCache):
    """S11: frees the blocks of a sequence's tokens, and not those of its drafts."""

    def free(self, seq: int) -> None:
        self.tables[seq] = self.tables.get(seq, [])[: self.blocks_of(self.lengths[seq])]
        super().free(seq)


class WritesDraftsUnderOthers(TreeCache):
    """1: writes drafts into a block that another sequence holds."""

    def draft_slots(self, seq: int, count: int, copies: list[Slot]) -> list[Slot]:
        slots = super().draft_slots(seq, 0, copies)
        while len(slots) < count and self.lengths[seq] % self.spec.block_size:
            slots.append((self.tables[seq][-1], self.lengths[seq] % self.spec.block_size))
            self.lengths[seq] += 1
        return [*slots, *super().draft_slots(seq, count - len(slots), copies)]


class TextTreeCache(BranchingTextCache):
    """Finds accepted drafts once their block is full, and no others. It is right."""

    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.drafts: dict[int, list[int]] = {}
        """Token ids of the drafts of each sequence."""

    def append_trees(
        self,
        seqs: Sequence[int],
        parents: Sequence[Sequence[int]],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        counts = [len(tree) for tree in parents]
        needed = self.blocks_for(seqs, counts)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        row = 0
        for seq, count, token_ids in zip(seqs, counts, self.row_tokens, strict=True):
            self.drafts[seq] = list(token_ids)
            length, table = len(self.token_ids[seq]), self.tables[seq]
            if length % self.spec.block_size:
                self.own_last(seq)
            while len(table) * self.spec.block_size < length + count:
                table.append(self.open())
            for at in range(length, length + count):
                block, position = self.slot(seq, at)
                self.keys[:, block, :, position] = key[:, row]
                self.values[:, block, :, position] = value[:, row]
                row += 1
            self.after_drafts(seq, parents[seqs.index(seq)])

    def blocks_for(self, seqs: Sequence[int], counts: Sequence[int]) -> int:
        needed, size, leaving = 0, self.spec.block_size, Counter[int]()
        for seq, count in zip(seqs, counts, strict=True):
            length, last = len(self.token_ids[seq]), self.tables[seq][-1]
            if length % size and self.others(seq, len(self.tables[seq]) - 1) > leaving[last]:
                leaving[last] += 1
                needed += 1
            needed += -(-(length + count) // size) - len(self.tables[seq])
        return needed

    def slot(self, seq: int, at: int) -> Slot:
        return self.tables[seq][at // self.spec.block_size], at % self.spec.block_size

    def after_drafts(self, seq: int, parents: Sequence[int]) -> None:
        """Do nothing: drafts are not found."""

    def accept_paths(self, seqs: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for seq, path in zip(seqs, paths, strict=True):
            length, token_ids = len(self.token_ids[seq]), self.drafts.pop(seq)
            for at, draft in enumerate(path):
                source, target = (self.slot(seq, length + each) for each in (draft, at))
                for cache in (self.keys, self.values):
                    cache[:, target[0], :, target[1]] = cache[:, source[0], :, source[1]]
            self.drop_drafts(seq, length + len(path))
            self.token_ids[seq] += self.accepted(token_ids, path)
            self.register_from(seq, length)

    def accepted(self, token_ids: list[int], path: Sequence[int]) -> list[int]:
        return [token_ids[draft] for draft in path]

    def drop_drafts(self, seq: int, length: int) -> None:
        table = self.tables[seq]
        while len(table) * self.spec.block_size >= length + self.spec.block_size:
            self.drop(table.pop())

    def register_from(self, seq: int, length: int) -> None:
        """Register the blocks that became full after this length."""
        size, table, token_ids = self.spec.block_size, self.tables[seq], self.token_ids[seq]
        for at in range(length // size, len(token_ids) // size):
            up_to = table[: at + 1]
            self.register(up_to, token_ids[: (at + 1) * size])
            table[at] = up_to[-1]

    def free(self, seq: int) -> None:
        self.drafts.pop(seq, None)
        if seq in self.tables:  # it is not preempted
            super().free(seq)

    def preempt(self, seq: int) -> None:
        self.free(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill(seq, key, value)


class FindsDrafts(TextTreeCache):
    """S2: finds a block as soon as drafts fill it, as if all of them were accepted."""

    def after_drafts(self, seq: int, parents: Sequence[int]) -> None:
        if list(parents) == list(range(-1, len(parents) - 1)):
            length = len(self.token_ids[seq])
            self.token_ids[seq] += self.drafts[seq]
            self.register_from(seq, length)
            del self.token_ids[seq][length:]


class FindsThePathOfAChain(TextTreeCache):
    """S3: finds accepted drafts by the token ids of the first drafts."""

    def accepted(self, token_ids: list[int], path: Sequence[int]) -> list[int]:
        return token_ids[: len(path)]


class NeverFindsAcceptedDrafts(TextTreeCache):
    """Never finds the blocks that accepted drafts fill."""

    def register_from(self, seq: int, length: int) -> None: ...


class KeepsTheDuplicate(TextTreeCache):
    """T32: frees a block of accepted drafts that another one equals, and leaves it in the table."""

    def register_from(self, seq: int, length: int) -> None:
        table = list(self.tables[seq])
        super().register_from(seq, length)
        self.tables[seq] = table


RIGHT = (TreeCache, TextTreeCache)
BROKEN = (
    KeepsTheFirstDrafts,
    MovesInTheFirstLayer,
    MovesKeysOnly,
    MovesTheLastFirst,
    MovesIntoOneBlock,
    MovesThePathOfTheFirst,
    CountsSiblings,
    AcceptsOneAtLeast,
    LeaksBlocksOfDrafts,
    FreesBlocksOfTokensOnly,
    WritesDraftsUnderOthers,
    FindsDrafts,
    FindsThePathOfAChain,
    NeverFindsAcceptedDrafts,
    KeepsTheDuplicate,
)
