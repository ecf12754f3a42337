"""Adapter of kernels that write and read pages; the harness keeps the books."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import CacheFull, CacheSpec, Ledger
from pytest_roseinfer.targets.block_manager import read_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class PagedKernelsAdapter(KVCacheAdapter):
    """Base class for paged kernels: override ``allocate``, ``write`` and ``arena``.

    Also add ``attend`` if possible. ``tables`` and ``lengths`` have the pages and the number of
    tokens of each sequence.
    """

    fork_shares: ClassVar[str] = "full blocks"

    def allocate(self, spec: CacheSpec) -> None:
        """Allocate the storage."""
        raise NotImplementedError(f"{type(self).__name__} must define allocate(spec)")

    def write(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write the last ``counts[i]`` tokens of ``seqs[i]``, whose pages are already in tables."""
        raise NotImplementedError(
            f"{type(self).__name__} must define write(seqs, counts, key, value)"
        )

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.tables: dict[int, list[int]] = {}
        self.lengths: Counter[int] = Counter()
        self.holders: Counter[int] = Counter()
        self.unused = list(range(spec.num_blocks))
        self.allocate(spec)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        lengths = [self.lengths[seq] + count for seq, count in zip(seqs, counts, strict=True)]
        needed = [-(-length // self.spec.block_size) for length in lengths]
        more = [n - len(self.tables.get(seq, ())) for seq, n in zip(seqs, needed, strict=True)]
        if sum(more) > len(self.unused):
            raise CacheFull
        for seq, length, pages in zip(seqs, lengths, more, strict=True):
            self.tables.setdefault(seq, []).extend(self._take() for _ in range(pages))
            self.lengths[seq] = length
        self.write(seqs, counts, key, value)

    def _take(self) -> int:
        page = self.unused.pop()
        self.holders[page] = 1
        return page

    def fork(self, parent: int, child: int) -> None:
        full, rest = divmod(self.lengths[parent], self.spec.block_size)
        if rest and not self.unused:
            raise CacheFull
        table = self.tables[parent][:full]
        self.holders.update(table)
        if rest:
            table.append(self._take())
            for stored in self.arena():
                stored[:, table[-1]] = stored[:, self.tables[parent][-1]]
        self.tables[child], self.lengths[child] = table, self.lengths[parent]

    def free(self, seq: int) -> None:
        del self.lengths[seq]
        for page in self.tables.pop(seq):
            self.holders[page] -= 1
            if not self.holders[page]:
                self.unused.append(page)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return read_blocks(self.arena(), layer, self.tables[seq], self.lengths[seq])

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  one for all
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        return Ledger(self.holders, self.unused, self.spec.num_blocks)
