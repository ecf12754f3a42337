"""How many tokens a request may have: the model's positions bound it, and the cache's blocks.

All of it is plain numbers, so that another process can reckon as the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.errors import RequestTooLarge

if TYPE_CHECKING:
    from roseinfer.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """How many blocks a sequence takes at the most, by its length alone."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    """What layers see, for each list of blocks that a sequence takes from the pool."""
    at_once: int | None = None
    """No request stores more tokens in a step."""
    lag: int = 0
    """How many steps are in flight."""

    def alone(self, prompt: int, length: int) -> int:
        """Return the most blocks that a request holds by itself until it has ``length`` tokens."""
        whole = -(-length // self.block_size)
        at_once = min(prompt, self.at_once or prompt)
        return sum(
            whole if window is None else min(whole, self.most_in(window, at_once))
            for window in self.windows
        )

    def most_in(self, window: int, at_once: int) -> int:
        """Return the most blocks that a sequence holds in layers of a window.

        It gives back once a block, and what is in flight is not known yet.
        """
        seen = window - 1 + max(at_once, self.lag)
        return -(-seen // self.block_size) + 2


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """What there is room for. Any thread may ask."""

    needs: BlockNeeds
    capacity: int
    """Blocks of the KV cache."""
    positions: int
    by_max_length: bool
    """The model has more positions, and the engine was told to use these."""

    def most_new(self, prompt_length: int) -> int:
        """Return how many tokens a prompt can be continued by: 0 if it cannot be served."""
        least, most = 0, max(0, self.positions - prompt_length)
        while least < most:  # what fits is found by halves, since windows bend the count of blocks
            middle = (least + most + 1) // 2
            if self._blocks(prompt_length, middle) <= self.capacity:
                least = middle
            else:
                most = middle - 1
        return least

    def most_for(self, prompt_length: int, params: SamplingParams) -> int:
        """Return how many tokens a request may generate, and raise if there is no room for one."""
        positions = self.positions
        if prompt_length >= positions:
            raise RequestTooLarge(
                f"a prompt of {prompt_length} tokens leaves no room for a new one: the model "
                f"has {positions} positions{', by max_length' * self.by_max_length}"
            )
        most = min(params.max_new_tokens, positions - prompt_length)
        blocks = self._blocks(prompt_length, most)
        if blocks > self.capacity:
            raise RequestTooLarge(
                f"a prompt of {prompt_length} tokens and {most} new ones take {blocks} blocks of "
                f"{self.needs.block_size} tokens, and the KV cache has {self.capacity}: ask for "
                "fewer tokens, or build it with a larger kv_cache_tokens"
            )
        return most

    def _blocks(self, prompt_length: int, new_tokens: int) -> int:
        # The last token is never stored.
        return self.needs.alone(prompt_length, prompt_length + new_tokens - 1)
