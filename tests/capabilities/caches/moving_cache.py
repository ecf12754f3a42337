"""Caches that move blocks: at a fork, or to close gaps. They are right."""

from __future__ import annotations

from tests.capabilities.caches.truncating_caches import CutCache


class ForkingCache(CutCache):
    """Copies a partial block at the fork, so that no two sequences ever write to one block."""

    fork_shares = "full blocks"

    def fork(self, parent: int, child: int) -> None:
        partial = self.lengths[parent] % self.spec.block_size
        own = self.take() if partial else None
        super().fork(parent, child)
        if own is not None:
            last = self.tables[child][-1]
            self.copy(last, own)
            self.drop([last])
            self.tables[child][-1] = own


class CompactingCache(CutCache):
    """Moves the last blocks to the first unused ones when a sequence is freed."""

    def free(self, seq: int) -> None:
        super().free(seq)
        while self.unused and self.unused_before_last():
            source, target = max(+self.holders), min(self.unused)
            self.copy(source, target)
            self.unused.remove(target)
            self.unused.append(source)
            self.holders[target] = self.holders.pop(source)
            for table in self.tables.values():
                table[:] = [target if block == source else block for block in table]

    def unused_before_last(self) -> bool:
        """Return True if an unused block comes before the last block with a holder."""
        return min(self.unused) < max(+self.holders, default=-1)
