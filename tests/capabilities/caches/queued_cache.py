"""A paged cache whose device runs calls later, on two streams. It is right."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer import CacheFull, FastPath
from pytest_roseinfer.capabilities.simulated_device import Event
from tests.capabilities.caches.paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec
    from pytest_roseinfer.capabilities.simulated_device import DeviceQueue

_BUFFERS = 2
Slots = tuple[list[int], list[int]]
"""Blocks, and positions in them."""


class QueuedCache(PagedCache):
    """Writes tokens to the slots of a staging buffer, which the device copies first.

    Prompts are written on a stream of their own. Gathered tokens are copied to the host.
    """

    paths: ClassVar[dict[str, FastPath]] = {"prompt": FastPath(equals="token")}
    conditions = ("new_block", "name_used_again")
    gather_in_flight = True
    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (4, 2, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.staging: list[Slots] = [([], []) for _ in range(_BUFFERS)]
        """Buffers on the host, which are reused."""
        self.copied = [Event() for _ in range(_BUFFERS)]
        self.staged = 0
        self.slots: Slots = ([], [])
        """Slots on the device."""

    def use_queue(self, queue: DeviceQueue) -> None:
        self.queue = queue
        self.prompts = queue.new_stream()

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.counts["token"] += 1
        at = self.staged % _BUFFERS
        self.staged += 1
        self.wait_for_buffer(at)
        buffer = self.staging[at]
        buffer[0][:], buffer[1][:] = blocks, positions
        self.copy_slots(at)
        self.queue.submit(lambda: self.store(self.slots, key, value))

    def wait_for_buffer(self, at: int) -> None:
        self.copied[at].synchronize()

    def copy_slots(self, at: int) -> None:
        self.queue.submit(partial(self.take_slots, at))
        self.copied[at].record(self.queue)

    def take_slots(self, at: int) -> None:
        blocks, positions = self.staging[at]
        self.slots = list(blocks), list(positions)

    def store(self, slots: Slots, key: torch.Tensor, value: torch.Tensor) -> None:
        for row, (block, position) in enumerate(zip(*slots, strict=True)):
            self.keys[:, block, :, position] = key[:, row]
            self.values[:, block, :, position] = value[:, row]

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        size, count = self.spec.block_size, key.shape[1]
        needed = -(-count // size)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        blocks = self.tables[seq] = [self.unused.pop(0) for _ in range(needed)]
        self.lengths[seq] = count
        slots = [blocks[at // size] for at in range(count)], [at % size for at in range(count)]
        self.counts["prompt"] += 1
        self.counts["new_block"] += needed
        self.begin_prompt()
        self.prompts.submit(lambda: self.store(slots, key, value))
        self.end_prompt()

    def free(self, seq: int) -> None:
        """Free a sequence so that its blocks are taken next."""
        self.unused[:0] = self.tables.pop(seq)
        del self.lengths[seq]

    def begin_prompt(self) -> None:
        """Wait for pending writes to blocks that another sequence freed."""
        self.prompts.wait_event(self.queue.record_event())

    def end_prompt(self) -> None:
        """Keep later calls from overwriting the prompt's inputs, or reading it too early."""
        self.queue.wait_event(self.prompts.record_event())

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy stored tokens to the host, and wait for the copy."""
        shape = (2, self.lengths[seq], self.spec.num_heads, self.spec.head_dim)
        host = self.keys.new_full(shape, float("nan"))
        table = list(self.tables[seq])
        arrived = self.read_back(partial(self.copy_out, host, table, layer))
        self.wait_for(arrived)
        return host[0], host[1]

    def read_back(self, copy: partial[None]) -> Event:
        self.queue.submit(copy)
        return self.queue.record_event()

    def wait_for(self, arrived: Event) -> None:
        arrived.synchronize()

    def copy_out(self, host: torch.Tensor, table: Sequence[int], layer: int) -> None:
        for target, cache in zip(host, (self.keys, self.values), strict=True):
            target.copy_(cache[layer, table].transpose(1, 2).flatten(0, 1)[: len(target)])
