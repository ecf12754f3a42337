"""Drives a cache whose own part is the books, as schedulers do: a block manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.targets.block_store import BlockStore
from pytest_roseinfer.targets.coming_texts import ComingTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.adapters.cache import CacheSpec
    from pytest_roseinfer.targets.block_store import KeysAndValues


class BlockManagerAdapter(ComingTexts):
    """Override ``manage``, ``begin``, ``extend``, ``release`` and ``table``.

    ``ledger``, ``matched`` and ``namespaces`` are worth adding; keys and values are kept here, by
    the tables. ``namespaces`` is ``hear_namespaces`` where the manager knows any.
    """

    sharing: ClassVar[str] = "equal prefixes"
    match_leaves: ClassVar[int] = 1
    atomic_batches: ClassVar[bool] = False
    spare_blocks: ClassVar[int] = 0
    """Blocks that the manager has beside those for sequences."""

    def manage(self, spec: CacheSpec) -> None:
        """Build the manager."""
        raise NotImplementedError(f"{type(self).__name__} must define manage(spec)")

    def begin(self, seq: int, said: Sequence[int], namespace: int) -> int:
        """Give a sequence blocks for all that it says; return how many tokens were found.

        One of ``preempted`` begins again. Raise ``CacheFull`` where there is no room, with nothing
        changed; and so does ``extend``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define begin(seq, said, namespace)")

    def extend(self, seq: int, token: int) -> None:
        """Give a sequence room for one more token."""
        raise NotImplementedError(f"{type(self).__name__} must define extend(seq, token)")

    def release(self, seq: int) -> None:
        """Give up the blocks of a sequence."""
        raise NotImplementedError(f"{type(self).__name__} must define release(seq)")

    def stored(self, seq: int, tokens: int) -> None:
        """Hear that so many more tokens of a sequence are stored now."""

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.store = BlockStore(spec, spec.num_blocks + self.spare_blocks)
        self.windows = list(spec.windows) or [None] * spec.num_layers
        self.said: dict[int, tuple[list[int], int]] = {}
        """What each sequence says, and in which namespace."""
        self.preempted: set[int] = set()
        """Sequences that gave up their blocks and are to begin again."""
        self.manage(spec)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for row, seq in enumerate(seqs):
            keys, values = key[:, row : row + 1], value[:, row : row + 1]
            if seq in self.said:
                self.extend(seq, *self.coming[row])
                said, _ = self.said[seq]
                said += self.coming[row]
                self._store(seq, len(said) - 1, keys, values)
            else:
                self._begin(seq, list(self.coming[row]), self.namespace(row), keys, values)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, list(self.coming[0]), self.namespace(0), key, value)

    def _begin(
        self, seq: int, said: list[int], namespace: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        found: Any = self.begin(seq, said, namespace)
        if not isinstance(found, int):
            own = f"{type(self).__name__}.begin()"
            raise TypeError(f"{own} must return how many tokens were found, and returned {found!r}")
        self.said[seq] = said, namespace
        self._store(seq, found, key[:, found:], value[:, found:])

    def _store(self, seq: int, begin: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for window in dict.fromkeys(self.windows):
            layers = [layer for layer, own in enumerate(self.windows) if own == window]
            self.store.write(self.table(seq, layers[0]), begin, key, value, layers)
        self.stored(seq, key.shape[1])

    def free(self, seq: int) -> None:
        del self.said[seq]
        if seq not in self.preempted:
            self.release(seq)
        self.preempted.discard(seq)

    def preempt(self, seq: int) -> None:
        self.release(seq)
        self.preempted.add(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, *self.said[seq], key, value)
        self.preempted.remove(seq)

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        (said, _), window = self.said[seq], self.windows[layer]
        live = max(0, len(said) - window + 1) if window else 0
        return self.store.read(self.table(seq, layer), layer, len(said), live)

    def arena(self) -> KeysAndValues:
        return self.store.arena
