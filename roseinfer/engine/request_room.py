"""How many tokens a request may have: the model's positions bound it, and the cache's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.errors import RequestTooLarge

if TYPE_CHECKING:
    from roseinfer.engine.request import BlockSupply
    from roseinfer.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """What there is room for. Any thread may ask."""

    supply: BlockSupply
    positions: int
    block_size: int
    by_max_length: bool
    """The model has more positions, and the engine was told to use these."""

    def most_new(self, prompt_length: int) -> int:
        """Return how many tokens a prompt can be continued by: 0 if it cannot be served."""
        least, most = 0, max(0, self.positions - prompt_length)
        while least < most:  # what fits is found by halves, since windows bend the count of blocks
            middle = (least + most + 1) // 2
            if self._blocks(prompt_length, middle) <= self.supply.capacity:
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
        if blocks > self.supply.capacity:
            raise RequestTooLarge(
                f"a prompt of {prompt_length} tokens and {most} new ones take {blocks} blocks of "
                f"{self.block_size} tokens, and the KV cache has {self.supply.capacity}: ask for "
                "fewer tokens, or build it with a larger kv_cache_tokens"
            )
        return most

    def _blocks(self, prompt_length: int, new_tokens: int) -> int:
        # The last token is never stored.
        return self.supply.needed_alone(prompt_length, prompt_length + new_tokens - 1)
