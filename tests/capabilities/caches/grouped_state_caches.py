"""Caches with attention blocks and groups of state layers: a right one, and broken ones.

Each group has pages of its own size, as hybrid models do in vLLM: one for attention, up to three
for states. With drafts, a lookup drops the last block that it finds, as EAGLE needs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.capabilities.payload import same_bits
from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import CacheSpec

    Tokens = tuple[int, ...]

_SLOTS = 4
"""Stored states of a group."""


class StatePool:
    """Stored states of a group of layers, at the ends of its pages; the oldest is evicted."""

    def __init__(self, layers: range, page: int, block: int, like: torch.Tensor) -> None:
        self.layers, self.page, self.block = layers, page, block
        self.slots = like.new_zeros(_SLOTS, len(layers), *like.shape[1:])
        self.unused = list(range(_SLOTS))
        self.slot_of: OrderedDict[Tokens, int] = OrderedDict()
        """Slot of the state after these tokens, the oldest first."""

    def store(self, tokens: Tokens, state: torch.Tensor) -> None:
        if tokens not in self.slot_of:
            self.slot_of[tokens] = self.unused.pop() if self.unused else self.evict()
        self.slots[self.slot_of[tokens]] = state[self.layers]

    def evict(self) -> int:
        return self.slot_of.popitem(last=False)[1]

    def longest(self, tokens: Tokens) -> int:
        """Return the greatest length, up to that of these tokens, whose state is stored."""
        return next((end for end in range(len(tokens), 0, -1) if tokens[:end] in self.slot_of), 0)


@dataclass(frozen=True, slots=True)
class Hit:
    """Prefix that a lookup found."""

    tokens: Tokens
    slots: tuple[int | None, ...]
    """Slot of its state in each group."""


class GroupedStateCache(TextCache):
    """Finds a prefix at the greatest length where all groups store what it needs. It is right."""

    prefixes = TextCache.prefixes.but(finds="some")
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "state groups": (3, 1, 2),
        "drafts": (False, True),
    }
    pool_class = StatePool

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.states: dict[int, torch.Tensor] = {}
        """State of each sequence after its last token, ``[layers, heads, head_dim]``."""
        self.no_state = self.keys.new_zeros(spec.num_layers, spec.num_heads, spec.head_dim)
        groups = min(spec.options["state groups"], spec.num_layers)
        pages = (spec.block_size, 2 * spec.block_size, 1)
        self.pools = [
            self.pool_class(
                range(at, spec.num_layers, groups), pages[at], spec.block_size, self.no_state
            )
            for at in range(groups)
        ]

    # Writes

    def use_states(self, states: torch.Tensor) -> None:
        self.new_states = states

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        for row, seq in enumerate(seqs):
            self.advance(seq, self.new_states[:, row])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Compute the states after the found prefix from the state that was found."""
        (token_ids,) = self.row_tokens
        hit = self.hit(tuple(token_ids))
        super().prefill(seq, key, value)
        found = len(hit.tokens)
        self.states[seq] = self.state_of(hit, seq)
        right = not found or same_bits(self.states[seq], self.new_states[:, found - 1])
        self.token_ids[seq] = list(hit.tokens)
        for at, token in enumerate(token_ids[found:], found):
            self.token_ids[seq].append(token)
            state = self.new_states[:, at]
            self.advance(seq, state if right else torch.full_like(state, torch.nan))

    def advance(self, seq: int, state: torch.Tensor) -> None:
        """Store the state after the present tokens of a sequence."""
        self.states[seq] = state.clone()
        for pool in self.pools:
            if len(self.token_ids[seq]) % pool.page == 0:
                pool.store(tuple(self.token_ids[seq]), state)

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        """Register a block, unless an equal one is: a lookup may have dropped that."""
        key = self.key(token_ids)
        if self.block_of.setdefault(key, table[-1]) == table[-1]:
            self.key_of[table[-1]] = key

    def free(self, seq: int) -> None:
        super().free(seq)
        self.states.pop(seq, None)

    # Lookups

    def hit(self, tokens: Tokens) -> Hit:
        found = tokens[: self.attention_hit(tokens)]
        while (length := self.common_length(found)) < len(found):
            found = found[:length]
        return Hit(found, tuple(pool.slot_of.get(found) for pool in self.pools))

    def attention_hit(self, tokens: Tokens) -> int:
        blocks = len(super().found(tokens))
        return self.spec.block_size * (blocks - bool(blocks and self.spec.options["drafts"]))

    def common_length(self, tokens: Tokens) -> int:
        """Return the least length of the groups, in whole blocks."""
        lengths = [pool.longest(tokens) for pool in self.pools]
        return min(lengths) // self.spec.block_size * self.spec.block_size

    def state_of(self, hit: Hit, seq: int) -> torch.Tensor:  # noqa: ARG002
        """Return the state of all layers after a found prefix."""
        state = self.no_state.clone()
        for pool, slot in zip(self.pools, hit.slots, strict=True):
            if slot is not None:
                state[pool.layers] = pool.slots[slot]
        return state

    def found(self, token_ids: Sequence[int]) -> list[int]:
        return self.blocks_of(self.hit(tuple(token_ids)))

    def blocks_of(self, hit: Hit) -> list[int]:
        return super().found(hit.tokens)

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return len(self.hit(tuple(token_ids)).tokens)

    def look_up(self, token_ids: Sequence[int]) -> object:
        return tuple(token_ids)

    def begin_with(self, prefix: Any, seq: int) -> int:
        return self.begin(seq, self.hit(prefix))

    def begin(self, seq: int, hit: Hit) -> int:
        self.tables[seq] = self.blocks_of(hit)
        for block in self.tables[seq]:
            self.hold(block)
        self.token_ids[seq] = list(hit.tokens)
        self.states[seq] = self.state_of(hit, seq)
        return len(hit.tokens)

    def peek_state(self, seq: int) -> torch.Tensor:
        return self.states[seq]


class DropsTheBlockOfAttentionAlone(GroupedStateCache):
    """S12: drops the last block of attention, and takes the states from where it ended."""

    def hit(self, tokens: Tokens) -> Hit:
        hit = super().hit(tokens)
        longer = tokens[: len(hit.tokens) + self.spec.block_size]
        if hit.tokens and self.spec.options["drafts"]:
            slots = (
                pool.slot_of.get(longer, slot)
                for pool, slot in zip(self.pools, hit.slots, strict=True)
            )
            return Hit(hit.tokens, tuple(slots))
        return hit


class DropsTheStatesWithTheBlock(GroupedStateCache):
    """S12: drops the last block after the groups have agreed, so that it has no states."""

    def attention_hit(self, tokens: Tokens) -> int:
        return self.spec.block_size * len(TextCache.found(self, tokens))

    def hit(self, tokens: Tokens) -> Hit:
        hit = super().hit(tokens)
        if hit.tokens and self.spec.options["drafts"]:
            return Hit(hit.tokens[: -self.spec.block_size], (None,) * len(self.pools))
        return hit


class LetsAGroupRaiseTheLength(GroupedStateCache):
    """Looks up the states of the last group a block further, and goes on where that ends.

    The blocks of attention end earlier, as in vLLM 45614.
    """

    def hit(self, tokens: Tokens) -> Hit:
        hit = super().hit(tokens)
        further = tokens[: len(hit.tokens) + self.spec.block_size]
        if self.spec.options["drafts"] and further in self.pools[-1].slot_of:
            return Hit(further, tuple(pool.slot_of.get(further) for pool in self.pools))
        return hit

    def blocks_of(self, hit: Hit) -> list[int]:
        return super().blocks_of(super().hit(hit.tokens))


class LooksIntoOneStateGroup(GroupedStateCache):
    """Finds a prefix where the first group of states has its state."""

    def common_length(self, tokens: Tokens) -> int:
        return self.pools[0].longest(tokens)


class CountsPagesAsBlocks(GroupedStateCache):
    """T11: finds a page of states by the blocks before it, as if it were as large as they are."""

    class pool_class(StatePool):  # noqa: N801
        def store(self, tokens: Tokens, state: torch.Tensor) -> None:
            super().store(tokens[: len(tokens) // self.page * self.block], state)


class FindsEvictedStates(GroupedStateCache):
    """T26: finds a state by its tokens after its slot was given to another one."""

    class pool_class(StatePool):  # noqa: N801
        def evict(self) -> int:
            oldest = next(iter(self.slot_of))
            self.slot_of.move_to_end(oldest)
            return self.slot_of[oldest]


class BeginsWithSlotsOfTheLookup(GroupedStateCache):
    """S1: begins with the slots that a lookup found, which may have other states since."""

    def look_up(self, token_ids: Sequence[int]) -> object:
        return self.hit(tuple(token_ids))

    def begin_with(self, prefix: Any, seq: int) -> int:
        stored = len(self.blocks_of(prefix)) * self.spec.block_size == len(prefix.tokens)
        return self.begin(seq, prefix if stored else self.hit(prefix.tokens))


class WritesOnInAStoredState(GroupedStateCache):
    """T4: updates the slot of a sequence's last stored state with its next token."""

    def advance(self, seq: int, state: torch.Tensor) -> None:
        previous = tuple(self.token_ids[seq][:-1])
        super().advance(seq, state)
        for pool in self.pools:
            if pool.page > 1 and (slot := pool.slot_of.get(previous)) is not None:
                pool.slots[slot] = state[pool.layers]


RIGHT = GroupedStateCache
BROKEN = (
    DropsTheBlockOfAttentionAlone,
    DropsTheStatesWithTheBlock,
    LetsAGroupRaiseTheLength,
    LooksIntoOneStateGroup,
    CountsPagesAsBlocks,
    FindsEvictedStates,
    BeginsWithSlotsOfTheLookup,
    WritesOnInAStoredState,
)
