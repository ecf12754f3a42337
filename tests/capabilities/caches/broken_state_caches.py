"""Caches that store wrong states and right keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.capabilities.caches.state_cache import EVERY, StateCache, Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class GivesAllRowsTheFirstState(StateCache):
    """T1: indexes states by request in a grid without requests: all rows get the first one's."""

    def update_state(self, seq: int, first: int, token: int, count: int) -> None:
        super().update_state(seq, 0 if count == 1 else first, token, count)


class SkipsTheCheckpointOfALongRow(StateCache):
    """T2: keeps a checkpoint within a row of several tokens, with the state from before the row."""

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.before = {seq: self.stored[seq].state for seq in seqs if seq in self.stored}
        super().append_many(seqs, counts, key, value)

    def keep(self, seq: int) -> None:
        super().keep(seq)
        kept = self.kept[tuple(self.stored[seq].ids)]
        if (state := self.before.get(seq)) is not None and len(self.new_ids) > 1:
            kept.state = state.clone()


class KeepsTheStateAheadOfItsNode(StateCache):
    """T3: keeps a checkpoint of the tokens so far with the state after the whole row."""

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        super().append_many(seqs, counts, key, value)
        for seq, count in zip(seqs, counts, strict=True):
            ids = self.stored[seq].ids
            for end in range(len(ids) - count + 1, len(ids)):
                if (kept := self.kept.get(tuple(ids[:end]))) is not None:
                    kept.state = self.peek_state(seq).clone()


class ReadsTheCountOfAnotherRow(StateCache):
    """T4: reads the numbers of accepted tokens after the rows were permuted."""

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.reversed_counts = dict(zip(seqs, reversed(counts), strict=True))
        super().append_many(seqs, counts, key, value)

    def update_state(self, seq: int, first: int, token: int, count: int) -> None:
        if token < self.reversed_counts[seq] or token == 0:
            super().update_state(seq, first, token, count)


class SharesTheStateOfAFork(StateCache):
    """Gives a fork the state of its parent, which the parent's next token overwrites."""

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.stored[child].state = self.stored[parent].state

    def update_state(self, seq: int, first: int, token: int, count: int) -> None:  # noqa: ARG002
        state = self.new_states[:, first + token]
        if self.stored[seq].state is None:
            self.stored[seq].state = state.clone()
        self.peek_state(seq).copy_(state)


class UpdatesACheckpointInPlace(StateCache):
    """Begins with a checkpoint's state itself, which the sequence's next token overwrites."""

    update_state = SharesTheStateOfAFork.update_state

    def begin_with(self, prefix: tuple[int, ...], seq: int) -> int:
        found = super().begin_with(prefix, seq)
        if found:
            self.stored[seq].state = self.kept[prefix].state
        return found


class KeepsTheStateOnResume(StateCache):
    """Writes the keys of a preempted sequence again, and its state up to a checkpoint only."""

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.resuming = True
        super().resume(seq, key, value)
        self.resuming = False

    def update_state(self, seq: int, first: int, token: int, count: int) -> None:
        at = len(self.stored[seq].ids)
        if getattr(self, "resuming", False) and at > EVERY and at % EVERY:
            return
        super().update_state(seq, first, token, count)


class MixesLayersOfACheckpoint(StateCache):
    """Keeps the state of the first layer for all layers of a checkpoint."""

    def keep(self, seq: int) -> None:
        super().keep(seq)
        kept = self.kept[tuple(self.stored[seq].ids)].state
        assert kept is not None
        kept[:] = kept[:1].clone()


class KeepsOldStatesOfANewText(StateCache):
    """Identifies a checkpoint by its length and its first token alone."""

    def keep(self, seq: int) -> None:
        super().keep(seq)
        ids, kept = self.kept.popitem()
        for other, old in self.kept.items():
            if len(other) == len(ids) and other[0] == ids[0]:
                kept.state = old.state
        self.kept[ids] = kept


class ForgetsTheStateOnACut(StateCache):
    """S12: cuts a sequence to no tokens by its length alone, so that its state goes on."""

    def truncate(self, seq: int, length: int) -> None:
        stored = self.stored[seq]
        super().truncate(seq, length)
        if length == 0:
            self.stored[seq] = Stored(state=stored.state)

    def update_state(self, seq: int, first: int, token: int, count: int) -> None:
        stored = self.stored[seq]
        if stored.state is None or len(stored.ids) > 1:
            super().update_state(seq, first, token, count)


BROKEN = (
    GivesAllRowsTheFirstState,
    SkipsTheCheckpointOfALongRow,
    KeepsTheStateAheadOfItsNode,
    ReadsTheCountOfAnotherRow,
    SharesTheStateOfAFork,
    UpdatesACheckpointInPlace,
    KeepsTheStateOnResume,
    MixesLayersOfACheckpoint,
    KeepsOldStatesOfANewText,
    ForgetsTheStateOnACut,
)
