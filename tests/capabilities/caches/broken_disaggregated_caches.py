"""Decode caches that receive prompts wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer import Transfer
from tests.capabilities.caches.disaggregated_caches import (
    EndingCache,
    Pair,
    Pull,
    PulledPrompt,
    PullingCache,
    Push,
    PushedCache,
    PushedPrompt,
    QueuedCache,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    from pytest_roseinfer import CacheSpec, KVCacheAdapter, TransferResult


class PushesBeforeTheWrite(PushedCache):
    """T20: pushes all blocks of a prompt when its receive begins, written or not."""

    def written(self, prompt: PushedPrompt) -> int:
        return prompt.num_tokens

    def copy(self, push: Push, blocks: Sequence[int]) -> None:
        size = self.prefill_cache.block_size
        missing = push.positions[-1] // size + 1 - len(push.table)
        super().copy(replace(push, table=[*push.table, *push.table[-1:] * missing]), blocks)


class PullsBeforeTheWrite(PullingCache):
    """T20: reads a block of a prompt when its first token is written."""

    def written(self, prompt: PulledPrompt) -> int:
        blocks = len(self.prefill_cache.tables[prompt.seq])
        return min(len(prompt.ids), blocks * self.prefill_cache.block_size)


class PushesBeforeTheDevice(QueuedCache):
    """T20: pushes what is written on a device, without waiting for it."""

    def wait(self) -> None:
        pass


class LosesTheSuffix(PushedCache):
    """T20: takes an early prefix for the whole prompt, whose later chunks are not pushed."""

    def begin_receive(self, seq: int, num_tokens: int) -> None:
        super().begin_receive(seq, num_tokens)
        prompt = self.prompts[seq]
        prompt.num_tokens = prompt.sent[0] or num_tokens

    def written(self, prompt: PushedPrompt) -> int:
        return min(super().written(prompt), prompt.num_tokens)


class CountsByItsOwnBlockSize(PullingCache):
    """T7: counts the blocks of the prefill cache by its own block size."""

    def ratio_size(self) -> int:
        return self.spec.block_size

    def copy(self, pull: Pull, arrived: int) -> None:
        if self.spec.block_size <= self.prefill_cache.block_size:
            super().copy(pull, arrived)


class SplitsByTheInverseRatio(PullingCache):
    """T7: takes the first tokens of each block of the prefill cache for all of it."""

    def positions(self, prompt: PulledPrompt, index: int) -> range:
        positions = super().positions(prompt, index)
        return positions[: self.spec.block_size]


class TakesRemoteBlockNumbers(PushedCache):
    """T7: writes to the blocks that have the numbers of the prefill cache's."""

    def copy(self, push: Push, blocks: Sequence[int]) -> None:
        own = [push.table[at % len(push.table)] % self.spec.num_blocks for at in range(len(blocks))]
        super().copy(replace(push, blocks=own), own)


class LeavesOutThePartialBlock(PushedCache):
    """T20: pushes whole blocks only, and takes a prompt for received without the last part."""

    def whole(self, prompt: PushedPrompt) -> int:
        """Return the number of tokens in whole blocks, or of all if there are none."""
        size, length = self.prefill_cache.block_size, prompt.num_tokens
        return length - length % size or length

    def written(self, prompt: PushedPrompt) -> int:
        return min(super().written(prompt), self.whole(prompt))

    def has_arrived(self, prompt: PushedPrompt) -> bool:
        return len(prompt.arrived) == self.whole(prompt) * self.spec.num_layers


class ReversesTheRanks(PushedCache):
    """T7: joins the heads of the ranks in the reverse order."""

    def copy(self, push: Push, blocks: Sequence[int]) -> None:
        self.prefill_cache.ranks.reverse()
        super().copy(push, blocks)
        self.prefill_cache.ranks.reverse()


class LeavesOutTheLastLayer(PushedCache):
    """S8: pushes all layers but the last one."""

    def layers(self, prompt: PushedPrompt) -> Iterable[int]:
        return list(super().layers(prompt))[:-1] or [0]

    def has_arrived(self, prompt: PushedPrompt) -> bool:
        return len(prompt.arrived) == prompt.num_tokens * len(list(self.layers(prompt)))


class FreesThePromptAtTheBegin(PullingCache):
    """20: frees the blocks of a prompt in the prefill cache when its receive begins."""

    def pull(self, prompt: PulledPrompt) -> None:
        super().pull(prompt)
        if prompt.missing:
            cache = self.prefill_cache
            cache.unused = [*cache.tables[prompt.seq], *cache.unused]

    def free_remote(self, seq: int) -> None:
        cache = self.prefill_cache
        if not set(cache.tables[seq]) & set(cache.unused):
            super().free_remote(seq)
        else:
            del cache.tables[seq], cache.lengths[seq]


class FreesThePromptAfterALayer(PushedCache):
    """20: frees the blocks of a prompt in the prefill cache once a layer of it has arrived."""

    def report(self, push: Push, *, whole: bool) -> None:
        super().report(push, whole=whole)
        prompt, cache = push.prompt, self.prefill_cache
        layer = {at for layer, at in prompt.arrived if layer == push.layer}
        if prompt.open and len(layer) == prompt.num_tokens:
            cache.unused += [each for each in cache.tables[prompt.seq] if each not in cache.unused]

    def finish_receive(self, seq: int) -> None:
        cache = self.prefill_cache
        blocks = cache.tables[seq]
        cache.unused = [each for each in cache.unused if each not in blocks]
        super().finish_receive(seq)


class KeepsThePrompt(PushedCache):
    """S9: never frees the blocks of a prompt that was received."""

    def finish_receive(self, seq: int) -> None:
        kept = self.prefill_cache.tables[seq]
        self.prefill_cache.tables[seq] = []
        super().finish_receive(seq)
        self.prefill_cache.tables[-1 - seq] = kept


class KeepsAnAbortedPrompt(PullingCache):
    """S9: keeps the blocks of a prompt that is aborted while it is received."""

    def abort_remote(self, seq: int) -> None:
        received = seq in self.prompts
        kept = list(self.prefill_cache.tables[seq])
        super().abort_remote(seq)
        if received:
            self.prefill_cache.unused = [b for b in self.prefill_cache.unused if b not in kept]


class LeaksTheBlocksOfACancel(PullingCache):
    """S9: keeps the blocks of a cancelled receive of which a part has arrived."""

    def cancel_receive(self, seq: int) -> None:
        prompt, table = self.prompts[seq], list(self.tables[seq])
        size = self.prefill_cache.block_size
        begun = range(prompt.found // size, -(-len(prompt.ids) // size))
        super().cancel_receive(seq)
        if prompt.missing is not None and len(prompt.missing) < len(begun):
            self.hold(table[-1])


class WritesAfterACancel(PullingCache):
    """S6: writes what was in flight to blocks of a cancelled receive, which others have."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.late: dict[str, tuple[list[int], Pair]] = {}
        """Blocks and data of reads that a cancel has not stopped."""

    def cancel_receive(self, seq: int) -> None:
        for name, pull in self.pulls.items():
            if pull.prompt.seq == seq:
                rows = self.keys[:, pull.blocks].clone(), self.values[:, pull.blocks].clone()
                self.late[f"late {name}"] = pull.blocks, rows
        super().cancel_receive(seq)

    def transfers_in_flight(self) -> list[Transfer]:
        late = [Transfer(name, "receive") for name in self.late]
        return [*super().transfers_in_flight(), *late]

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
        if transfer.id not in self.late:
            super().end_transfer(transfer, result)
            return
        blocks, rows = self.late.pop(str(transfer.id))
        self.keys[:, blocks], self.values[:, blocks] = rows


class FreesUnderAPush(PushedCache):
    """S6: frees the blocks of a cancelled receive to which pushes in flight will write."""

    def release(self) -> None:
        self.unused += self.leaving
        self.leaving = []
        super().release()


class ResumesAfterTheLoss(PushedCache):
    """S9: begins a retry where the cancelled receive has ended, without what was lost."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.earlier: dict[int, Counter[int]] = {}

    def cancel_receive(self, seq: int) -> None:
        self.earlier[seq] = self.prompts[seq].sent
        super().cancel_receive(seq)

    def push(self, prompt: PushedPrompt) -> None:
        sent = self.earlier.pop(prompt.seq, None)
        if sent:
            prompt.sent.update(sent)
            prompt.arrived |= {(at, token) for at in sent for token in range(sent[at])}
        super().push(prompt)


class ShowsAReceiveAfterALayer(PushedCache):
    """S2: takes a receive for done when one layer of it has arrived."""

    def has_arrived(self, prompt: PushedPrompt) -> bool:
        return len(prompt.arrived) >= prompt.num_tokens


class FindsWhatIsBeingReceived(PullingCache):
    """S2: finds the blocks of a receive from its begin."""

    def begin_receive(self, seq: int, num_tokens: int) -> None:
        super().begin_receive(seq, num_tokens)
        prompt, size = self.prompts[seq], self.spec.block_size
        for at in range(prompt.found // size, num_tokens // size):
            key, block = self.key(prompt.ids[: (at + 1) * size]), self.tables[seq][at]
            if key not in self.block_of:
                self.block_of[key], self.key_of[block] = block, key


class ReadsWhatIsBeingReceived(PushedCache):
    """S2: reads a sequence that is being received."""

    def gather(self, seq: int, layer: int) -> Pair:
        return self.peek(seq, layer)


class CountsLayersOfOthers(PushedCache):
    """T7: counts what has arrived for any receive, and takes each for done by that."""

    def report(self, push: Push, *, whole: bool) -> None:
        super().report(push, whole=whole)
        for prompt in self.prompts.values():
            if whole and prompt is not push.prompt:
                prompt.arrived |= {(push.layer, at) for at in push.positions}


class CountsAReportTwice(PushedCache):
    """12: counts a transfer that is reported twice as two."""

    def report(self, push: Push, *, whole: bool) -> None:
        if whole and (push.layer, push.positions[0]) in push.prompt.arrived:
            layer = (push.layer + 1) % self.spec.num_layers
            push = replace(push, layer=layer)
        super().report(push, whole=whole)


class TrustsAPart(PushedCache):
    """T14: counts a transfer of which a part has arrived as the whole."""

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
        if result.arrived:
            result = replace(result, reported=transfer.num_blocks)
        super().end_transfer(transfer, result)


class ReceivesIntoTheFirstBlocks(PullingCache):
    """T15: writes what follows a prefix of its own to the first blocks of the sequence."""

    def copy(self, pull: Pull, arrived: int) -> None:
        first = self.tables[pull.prompt.seq][: len(pull.blocks)]
        shift = pull.prompt.found // self.spec.block_size
        super().copy(replace(pull, blocks=first) if shift else pull, arrived)


class KeepsACancelledPrompt(EndingCache):
    """S9: keeps the blocks of a prompt whose receive is cancelled after a part has arrived."""

    def cancel_receive(self, seq: int) -> None:
        prompt, table = self.prompts[seq], self.prefill_cache.tables[seq]
        size = self.prefill_cache.block_size
        if prompt.missing is not None and len(prompt.missing) < -(-len(prompt.ids) // size):
            self.prefill_cache.tables[seq] = []
            self.prefill_cache.tables[-1 - seq] = table
        super().cancel_receive(seq)


class LeaksAFoundPrefix(EndingCache):
    """S9: frees the blocks that a cancelled receive was to write, and not the prefix it found."""

    def cancel_receive(self, seq: int) -> None:
        found = self.prompts[seq].found // self.spec.block_size
        kept = self.tables[seq][:found]
        super().cancel_receive(seq)
        for block in kept:
            self.hold(block)


class ReadsUnderANewReceive(EndingCache):
    """S6: counts a late read of a cancelled receive for the next receive of its name."""

    def is_cancelled(self, prompt: PulledPrompt) -> bool:
        return prompt.seq not in self.prompts

    def transfer(self, name: int, pull: Pull) -> Transfer:
        seq = pull.prompt.seq if pull.prompt in self.prompts.values() else None
        return Transfer(name, "receive", pull.blocks, seq)

    def report(self, pull: Pull, *, whole: bool) -> None:
        if (prompt := self.prompts.get(pull.prompt.seq)) and whole:
            assert prompt.missing is not None
            prompt.missing.discard(pull.index)


BROKEN: tuple[type[KVCacheAdapter], ...] = (
    PushesBeforeTheWrite,
    PullsBeforeTheWrite,
    PushesBeforeTheDevice,
    LosesTheSuffix,
    CountsByItsOwnBlockSize,
    SplitsByTheInverseRatio,
    TakesRemoteBlockNumbers,
    LeavesOutThePartialBlock,
    ReversesTheRanks,
    LeavesOutTheLastLayer,
    FreesThePromptAtTheBegin,
    FreesThePromptAfterALayer,
    KeepsThePrompt,
    KeepsAnAbortedPrompt,
    LeaksTheBlocksOfACancel,
    WritesAfterACancel,
    FreesUnderAPush,
    ResumesAfterTheLoss,
    ShowsAReceiveAfterALayer,
    FindsWhatIsBeingReceived,
    ReadsWhatIsBeingReceived,
    CountsLayersOfOthers,
    CountsAReportTwice,
    TrustsAPart,
    ReceivesIntoTheFirstBlocks,
    KeepsACancelledPrompt,
    LeaksAFoundPrefix,
    ReadsUnderANewReceive,
)
