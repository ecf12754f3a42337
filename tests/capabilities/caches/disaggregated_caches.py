"""Decode caches that receive prompts from a prefill cache, in three designs. They are right.

To one, the prefill cache pushes each layer of what is written, and its writes cannot be taken back.
Another pulls whole blocks of the prefill cache once the prompt is written, and has prefix reuse.
The third does so too, and a prompt whose receive is cancelled ends in its prefill cache.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer import CacheFull, CacheSpec, KVCacheAdapter, Ledger, RemoteTraits, Transfer
from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_roseinfer import DeviceQueue, TransferResult
    from pytest_roseinfer.capabilities.disaggregation import ReceiveStatus

Pair = tuple[torch.Tensor, torch.Tensor]


class PrefillCache:
    """A prefill cache on ranks that each store an equal share of the heads."""

    def __init__(self, spec: CacheSpec, block_size: int, num_blocks: int, ranks: int) -> None:
        heads = spec.num_heads // ranks
        shape = (2, spec.num_layers, num_blocks, heads, block_size, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        self.ranks = [torch.zeros(shape, dtype=dtype, device=spec.device) for _ in range(ranks)]
        self.block_size = block_size
        self.unused = list(range(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: Counter[int] = Counter()
        self.leaving: list[int] = []
        """Blocks of aborted prompts, which transfers in flight may read."""

    def write(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.store(self.allocate(seq, key.shape[1]), key, value)

    def allocate(self, seq: int, count: int) -> list[tuple[int, int]]:
        """Return the block and position of each of the next tokens of a prompt."""
        table, places = self.tables.setdefault(seq, []), []
        for _ in range(count):
            at = self.lengths[seq] % self.block_size
            if at == 0:
                table.append(self.unused.pop(0))
            places.append((table[-1], at))
            self.lengths[seq] += 1
        return places

    def store(
        self, places: Sequence[tuple[int, int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        for token, (block, at) in enumerate(places):
            for part, new in enumerate((key, value)):
                shares = new[:, token].chunk(len(self.ranks), 1)
                for rank, share in zip(self.ranks, shares, strict=True):
                    rank[part, :, block, :, at] = share

    def read(self, table: list[int], layer: int, positions: Sequence[int]) -> Pair:
        """Return keys and values at these positions, ``[tokens, heads, head_dim]``."""
        size = self.block_size
        blocks, slots = [table[at // size] for at in positions], [at % size for at in positions]
        rows = torch.cat([rank[:, layer][:, blocks, :, slots] for rank in self.ranks], 2)
        keys, values = rows.transpose(0, 1)
        return keys, values

    def abort(self, seq: int) -> None:
        self.lengths.pop(seq)
        self.leaving += self.tables.pop(seq)

    def release(self) -> None:
        """Free the blocks of prompts that were aborted or received."""
        self.unused, self.leaving = [*self.leaving, *self.unused], []


class DecodeCache(KVCacheAdapter):
    """Base of decode caches with a prefill cache, which they show."""

    remote = RemoteTraits(block_sizes=(1, 2, 3, 4, 8), ranks=(1, 2))
    head_counts = (2, 1, 4)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)
    spec: CacheSpec

    def make_remote(self, block_size: int, num_blocks: int, ranks: int) -> None:
        self.prefill_cache = PrefillCache(self.spec, block_size, num_blocks, ranks)

    def peek_remote(self, seq: int, layer: int) -> Pair:
        cache = self.prefill_cache
        return cache.read(cache.tables[seq], layer, range(cache.lengths[seq]))

    def remote_free_blocks(self) -> int:
        return len(self.prefill_cache.unused)


# Pushed layer by layer


@dataclass(slots=True)
class PushedPrompt:
    """A receive to which the prefill cache pushes what is written."""

    seq: int
    num_tokens: int
    blocks: list[int]
    """Blocks of the decode cache."""
    sent: Counter[int] = field(default_factory=Counter)
    """Number of first tokens that were sent, by layer."""
    arrived: set[tuple[int, int]] = field(default_factory=set)
    """Layer and position of each token that has arrived."""
    failed: bool = False
    open: bool = True
    """False once it has ended or was cancelled."""


@dataclass(slots=True)
class Push:
    """Some tokens of one layer on their way to the decode cache."""

    prompt: PushedPrompt
    layer: int
    positions: range
    table: list[int]
    """Blocks of the prefill cache."""
    blocks: list[int]
    """Blocks of the decode cache that it writes."""


class PushedCache(DecodeCache):
    """Decode cache to which a prefill cache pushes each layer as soon as a block is full.

    What is in flight is written whatever happens, so blocks wait for it after a cancel.
    """

    standard_bad_calls: ClassVar[Sequence[str]] = (
        "gather_being_received",
        "append_to_being_received",
    )
    bad_call_errors = (KeyError,)

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        shape = (2, spec.num_layers, spec.num_blocks, spec.num_heads, spec.block_size)
        dtype = getattr(torch, spec.dtype)
        self.storage = torch.zeros((*shape, spec.head_dim), dtype=dtype, device=spec.device)
        self.unused = list(range(spec.num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: Counter[int] = Counter()
        self.prompts: dict[int, PushedPrompt] = {}
        self.pushes: dict[int, Push] = {}
        self.num_pushes = 0
        self.leaving: list[int] = []
        """Blocks of cancelled receives to which pushes in flight will write."""

    # The decode side

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.refuse_received(seqs)
        size = self.spec.block_size
        opening = [seq for seq in seqs if self.lengths[seq] % size == 0]
        if len(opening) > len(self.unused):
            raise CacheFull(f"{len(opening)} blocks needed, {len(self.unused)} free")
        for seq in opening:
            self.tables.setdefault(seq, []).append(self.unused.pop(0))
        for row, seq in enumerate(seqs):
            block, at = self.tables[seq][-1], self.lengths[seq] % size
            self.storage[0, :, block, :, at] = key[:, row]
            self.storage[1, :, block, :, at] = value[:, row]
            self.lengths[seq] += 1

    def refuse_received(self, seqs: Sequence[int]) -> None:
        """Raise an error for a sequence that is being received."""
        if not self.prompts.keys().isdisjoint(seqs):
            raise KeyError(*seqs)

    def free(self, seq: int) -> None:
        self.unused += self.tables.pop(seq)
        del self.lengths[seq]

    def peek(self, seq: int, layer: int) -> Pair:
        blocks = self.storage[:, layer, self.tables[seq]].transpose(2, 3).flatten(1, 2)
        keys, values = blocks[:, : self.lengths[seq]]
        return keys, values

    def gather(self, seq: int, layer: int) -> Pair:
        self.refuse_received([seq])
        return self.peek(seq, layer)

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  (one for all layers)
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        held = [*self.leaving, *(block for table in self.tables.values() for block in table)]
        return Ledger(Counter(held), self.unused, self.spec.num_blocks)

    def arena(self) -> Pair:
        return self.storage[0], self.storage[1]

    # Receives

    def begin_receive(self, seq: int, num_tokens: int) -> None:
        needed = -(-num_tokens // self.spec.block_size)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        blocks, self.unused = self.unused[:needed], self.unused[needed:]
        self.tables[seq] = blocks
        self.prompts[seq] = PushedPrompt(seq, num_tokens, blocks)
        self.push(self.prompts[seq])

    def poll_receive(self, seq: int) -> ReceiveStatus:
        prompt = self.prompts[seq]
        if self.has_arrived(prompt):
            return "done"
        return "failed" if prompt.failed else "in flight"

    def has_arrived(self, prompt: PushedPrompt) -> bool:
        return len(prompt.arrived) == prompt.num_tokens * self.spec.num_layers

    def finish_receive(self, seq: int) -> None:
        prompt = self.prompts.pop(seq)
        prompt.open = False
        self.lengths[seq] = prompt.num_tokens
        self.prefill_cache.abort(seq)
        self.release()

    def cancel_receive(self, seq: int) -> None:
        prompt = self.prompts.pop(seq)
        prompt.open = False
        self.leaving += self.tables.pop(seq)
        self.release()

    def release(self) -> None:
        """Free the blocks that no push in flight writes or reads any more."""
        written = {block for push in self.pushes.values() for block in push.blocks}
        self.unused += [block for block in self.leaving if block not in written]
        self.leaving = [block for block in self.leaving if block in written]
        if all(push.prompt.open for push in self.pushes.values()):
            self.prefill_cache.release()

    # The prefill side

    def remote_prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill_cache.write(seq, key, value)
        if seq in self.prompts:
            self.push(self.prompts[seq])

    def push(self, prompt: PushedPrompt) -> None:
        """Push what is written since the last push; a partial block waits for the end."""
        end = self.written(prompt)
        if end < prompt.num_tokens:
            end -= end % self.prefill_cache.block_size
        for layer in self.layers(prompt):
            positions = range(prompt.sent[layer], end)
            if positions:
                prompt.sent[layer] = end
                self.begin(prompt, layer, positions)

    def written(self, prompt: PushedPrompt) -> int:
        return self.prefill_cache.lengths[prompt.seq]

    def layers(self, prompt: PushedPrompt) -> Iterable[int]:  # noqa: ARG002
        return range(self.spec.num_layers)

    def begin(self, prompt: PushedPrompt, layer: int, positions: range) -> None:
        size = self.spec.block_size
        blocks = prompt.blocks[positions[0] // size : positions[-1] // size + 1]
        table = self.prefill_cache.tables[prompt.seq]
        self.pushes[self.num_pushes] = Push(prompt, layer, positions, table, blocks)
        self.num_pushes += 1

    def abort_remote(self, seq: int) -> None:
        self.prefill_cache.abort(seq)
        if seq in self.prompts:
            self.cancel_receive(seq)
        self.release()

    # The network

    def transfers_in_flight(self) -> list[Transfer]:
        return [
            Transfer(name, "receive", push.blocks, push.prompt.seq if push.prompt.open else None)
            for name, push in self.pushes.items()
        ]

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
        assert isinstance(transfer.id, int)
        push = self.pushes.pop(transfer.id)
        self.copy(push, push.blocks[: result.arrived])
        for _ in range(result.reports):
            self.report(push, whole=result.reported == len(push.blocks))
        self.release()

    def copy(self, push: Push, blocks: Sequence[int]) -> None:
        """Write the tokens of a push that belong to these blocks."""
        size = self.spec.block_size
        first = push.positions[0] // size
        positions = [at for at in push.positions if at // size - first < len(blocks)]
        places = [push.blocks[at // size - first] for at in positions]
        self.storage[:, push.layer, places, :, [at % size for at in positions]] = torch.stack(
            self.prefill_cache.read(push.table, push.layer, positions)
        ).transpose(0, 1)

    def report(self, push: Push, *, whole: bool) -> None:
        if whole:
            push.prompt.arrived |= {(push.layer, at) for at in push.positions}
        else:
            push.prompt.failed = True


class QueuedCache(PushedCache):
    """Writes prompts on a device that works asynchronously, and waits for it before a push."""

    def use_queue(self, queue: DeviceQueue) -> None:
        self.queue = queue

    def remote_prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache = self.prefill_cache
        places = cache.allocate(seq, key.shape[1])
        self.queue.submit(lambda: cache.store(places, key, value))
        if seq in self.prompts:
            self.push(self.prompts[seq])

    def copy(self, push: Push, blocks: Sequence[int]) -> None:
        self.wait()
        super().copy(push, blocks)

    def wait(self) -> None:
        self.queue.record_event().synchronize()


# Pulled block by block


@dataclass(slots=True)
class PulledPrompt:
    """A receive that reads whole blocks of the prefill cache."""

    seq: int
    ids: list[int]
    """Token ids."""
    found: int
    """Number of first tokens that the decode cache had itself."""
    missing: set[int] | None = None
    """Indices of the blocks of the prefill cache to read; None before the prompt is written."""


@dataclass(slots=True)
class Pull:
    """A block of the prefill cache on its way to the decode cache, in all layers."""

    prompt: PulledPrompt
    index: int
    blocks: list[int]
    """Blocks of the decode cache that it writes."""


class PullingCache(DecodeCache, TextCache):
    """Prefix cache that reads whole blocks of a prefill cache, and splits or joins them.

    It reads again what failed, and drops what is in flight when a receive is cancelled.
    """

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.prompts: dict[int, PulledPrompt] = {}
        self.pulls: dict[int, Pull] = {}
        self.num_pulls = 0

    def remote_prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill_cache.write(seq, key, value)
        if seq in self.prompts:
            self.pull(self.prompts[seq])

    def begin_receive(self, seq: int, num_tokens: int) -> None:
        (ids,) = self.row_tokens
        table = self.hold_found(ids)
        found = len(table) * self.spec.block_size
        table += [self.open() for _ in range(-(-num_tokens // self.spec.block_size) - len(table))]
        self.tables[seq] = table
        self.prompts[seq] = PulledPrompt(seq, list(ids), found)
        self.pull(self.prompts[seq])

    def pull(self, prompt: PulledPrompt) -> None:
        """Begin to read the blocks with tokens that were not found, once all are written."""
        length, size = len(prompt.ids), self.ratio_size()
        if self.written(prompt) == length and prompt.missing is None:
            begin = prompt.found // size if prompt.found < length else -(-length // size)
            prompt.missing = set(range(begin, -(-length // size)))
            for index in sorted(prompt.missing):
                self.begin(prompt, index)

    def written(self, prompt: PulledPrompt) -> int:
        return self.prefill_cache.lengths[prompt.seq]

    def ratio_size(self) -> int:
        """Return the block size by which the blocks of the prefill cache are counted."""
        return self.prefill_cache.block_size

    def begin(self, prompt: PulledPrompt, index: int) -> None:
        size, table = self.spec.block_size, self.tables[prompt.seq]
        positions = self.positions(prompt, index)
        blocks = table[positions[0] // size : positions[-1] // size + 1]
        self.pulls[self.num_pulls] = Pull(prompt, index, blocks)
        self.num_pulls += 1

    def positions(self, prompt: PulledPrompt, index: int) -> range:
        """Return the positions of the tokens in a block of the prefill cache that are needed."""
        size = self.ratio_size()
        begin, end = index * size, min((index + 1) * size, len(prompt.ids))
        return range(max(begin, prompt.found), end)

    def poll_receive(self, seq: int) -> ReceiveStatus:
        return "done" if self.prompts[seq].missing == set() else "in flight"

    def finish_receive(self, seq: int) -> None:
        prompt = self.prompts.pop(seq)
        table, size = self.tables[seq], self.spec.block_size
        self.token_ids[seq] = prompt.ids
        for at in range(prompt.found // size, len(prompt.ids) // size):
            up_to = table[: at + 1]
            self.register(up_to, prompt.ids[: (at + 1) * size])
            table[at] = up_to[-1]
        self.free_remote(seq)

    def free_remote(self, seq: int) -> None:
        self.prefill_cache.abort(seq)
        self.prefill_cache.release()

    def cancel_receive(self, seq: int) -> None:
        prompt = self.prompts.pop(seq)
        self.pulls = {name: pull for name, pull in self.pulls.items() if pull.prompt != prompt}
        for block in reversed(self.tables.pop(seq)):
            self.drop(block)

    def abort_remote(self, seq: int) -> None:
        if seq in self.prompts:
            self.cancel_receive(seq)
        self.free_remote(seq)

    def transfers_in_flight(self) -> list[Transfer]:
        return [
            Transfer(name, "receive", pull.blocks, pull.prompt.seq)
            for name, pull in self.pulls.items()
        ]

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
        assert isinstance(transfer.id, int)
        pull = self.pulls.pop(transfer.id)
        self.copy(pull, result.arrived)
        for _ in range(result.reports):
            self.report(pull, whole=result.reported == len(pull.blocks))

    def copy(self, pull: Pull, arrived: int) -> None:
        """Write the tokens of a block of the prefill cache to the first blocks that arrive."""
        size, prompt, cache = self.spec.block_size, pull.prompt, self.prefill_cache
        positions = self.positions(prompt, pull.index)
        first = positions[0] // size
        positions_written = [at for at in positions if at // size - first < arrived]
        blocks = [pull.blocks[at // size - first] for at in positions_written]
        slots = [at % size for at in positions_written]
        for layer in range(self.spec.num_layers):
            rows = cache.read(cache.tables[prompt.seq], layer, positions_written)
            for mine, new in zip((self.keys, self.values), rows, strict=True):
                mine[layer][blocks, :, slots] = new

    def report(self, pull: Pull, *, whole: bool) -> None:
        assert pull.prompt.missing is not None
        if whole:
            pull.prompt.missing.discard(pull.index)
        else:
            self.begin(pull.prompt, pull.index)


class EndingCache(PullingCache):
    """Prefix cache that ends a prompt with its receive, and ends what is in flight late.

    All blocks of a cancelled receive are held until then, those of a found prefix too.
    """

    remote = RemoteTraits(ranks=(1, 2), while_prefilling=False, keeps_cancelled=False)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.leaving: list[tuple[PulledPrompt, list[int]]] = []
        """Cancelled receives that reads in flight write to, with their blocks."""

    def cancel_receive(self, seq: int) -> None:
        prompt = self.prompts.pop(seq)
        self.leaving.append((prompt, self.tables.pop(seq)))
        self.free_remote(seq)
        self.release()

    def release(self) -> None:
        """Free the blocks of cancelled receives that no read in flight writes to any more."""
        coming = [id(pull.prompt) for pull in self.pulls.values()]
        ended = [each for each in self.leaving if id(each[0]) not in coming]
        self.leaving = [each for each in self.leaving if id(each[0]) in coming]
        for _, table in ended:
            for block in reversed(table):
                self.drop(block)

    def is_cancelled(self, prompt: PulledPrompt) -> bool:
        return self.prompts.get(prompt.seq) is not prompt

    def free_remote(self, seq: int) -> None:
        if seq in self.prefill_cache.tables:  # else the cancel of its receive freed it
            super().free_remote(seq)

    def transfers_in_flight(self) -> list[Transfer]:
        return [self.transfer(name, pull) for name, pull in self.pulls.items()]

    def transfer(self, name: int, pull: Pull) -> Transfer:
        if not self.is_cancelled(pull.prompt):
            return Transfer(name, "receive", pull.blocks, pull.prompt.seq)
        table = next(blocks for prompt, blocks in self.leaving if prompt is pull.prompt)
        held = [block for block in table if block not in pull.blocks]
        return Transfer(name, "receive", pull.blocks, held_blocks=held)

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
        super().end_transfer(transfer, result)
        self.release()

    def copy(self, pull: Pull, arrived: int) -> None:
        if not self.is_cancelled(pull.prompt):
            super().copy(pull, arrived)

    def report(self, pull: Pull, *, whole: bool) -> None:
        if not self.is_cancelled(pull.prompt):
            super().report(pull, whole=whole)


RIGHT: tuple[type[Any], ...] = (PushedCache, QueuedCache, PullingCache, EndingCache)
