"""Requests: their state, their limits, and the allocator that gives them blocks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, RequestTooLarge
from roseinfer.kv.pool import count_out_of_window
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.decode.step import Resident
    from roseinfer.engine.drafter import Drafter
    from roseinfer.engine.prefix_cache import HeldPrefix, PrefixCache
    from roseinfer.errors import RoseinferError
    from roseinfer.guided.compiler import GuideMatcher
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import CachedSequence
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.text.completion_text import CompletionText

# Limits on the tokens of a request: the model's positions and the blocks of the cache.
#
# These are plain numbers, so that another process can compute the same limits as the engine.


@dataclass(frozen=True, slots=True)
class BlockRequirements:
    """Upper bounds on the blocks of a sequence, from its length alone."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    """Window of each block list that a sequence takes from the pool; None for full attention."""
    max_tokens_per_step: int | None = None
    """Most tokens that a request stores in a step; None for unlimited."""
    max_steps_in_flight: int = 0
    """Most steps in flight when another is launched."""

    def max_blocks_of_request(self, prompt: int, length: int) -> int:
        """Return the most blocks that a request holds before it has ``length`` tokens."""
        whole = -(-length // self.block_size)
        max_tokens_per_step = min(prompt, self.max_tokens_per_step or prompt)
        return sum(
            whole
            if window is None
            else min(whole, self.max_blocks_in_window(window, max_tokens_per_step))
            for window in self.windows
        )

    def max_blocks_in_window(self, window: int, max_tokens_per_step: int) -> int:
        """Return the most blocks that a sequence holds in a windowed layer.

        It frees blocks only once for each block of new tokens, and not for tokens in flight.
        """
        tokens = window - 1 + max(max_tokens_per_step, self.max_steps_in_flight)
        return -(-tokens // self.block_size) + 2


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on the length of a request. Any thread may use them."""

    block_requirements: BlockRequirements
    capacity: int
    """Blocks of the KV cache."""
    positions: int
    """Most tokens of a request, prompt and completion together."""
    limited_by_max_length: bool
    """True if ``max_length`` limits the positions, rather than the model."""

    def max_new_tokens_after(self, prompt_length: int) -> int:
        """Return the most tokens that a prompt can be continued by: 0 if it cannot be served."""
        lower, upper = 0, max(0, self.positions - prompt_length)
        while lower < upper:  # bisection, since block counts are not linear with windows
            middle = (lower + upper + 1) // 2
            if self._blocks(prompt_length, middle) <= self.capacity:
                lower = middle
            else:
                upper = middle - 1
        return lower

    def validated_max_tokens(self, prompt_length: int, params: SamplingParams) -> int:
        """Return the most tokens that a request may generate; raise if it can never be served."""
        positions = self.positions
        if prompt_length >= positions:
            raise RequestTooLarge(
                f"a prompt of {prompt_length} tokens leaves no room for a new one: the model "
                f"has {positions} positions{', by max_length' * self.limited_by_max_length}"
            )
        max_tokens = min(params.max_new_tokens, positions - prompt_length)
        blocks = self._blocks(prompt_length, max_tokens)
        if blocks > self.capacity:
            raise RequestTooLarge(
                f"a prompt of {prompt_length} tokens and {max_tokens} new ones take {blocks} "
                f"blocks of {self.block_requirements.block_size} tokens, and the KV cache has "
                f"{self.capacity}: ask for fewer tokens, or build it with a larger kv_cache_tokens"
            )
        return max_tokens

    def _blocks(self, prompt_length: int, new_tokens: int) -> int:
        # The last token is never stored.
        return self.block_requirements.max_blocks_of_request(
            prompt_length, prompt_length + new_tokens - 1
        )


NON_PROMPT_TYPES = (bytes, bytearray, memoryview, Mapping, Set)
"""Iterable types that are not token ids: they yield bytes or names, or have no order."""
_EVICTION_DIVISOR = 16
"""Divisor of the evictable blocks: one in this many is evicted at once."""


class FinishReason(StrEnum):
    """The reason why a request gets no more tokens."""

    STOP = "stop"
    """End-of-sequence token, stop string, or complete guide."""
    LENGTH = "length"
    """Limit reached: the requested number of tokens, or the model's positions."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the state of its completion. Each field is changed by one module only."""

    id: int
    params: SamplingParams
    seed: int
    """Seed of ``params``, or a random one if these have none."""
    prompt_length: int
    max_generated_tokens: int
    """Most tokens to generate, from its parameters and the model's positions."""
    sequence: CachedSequence
    text: CompletionText | None
    """Completion text; None for a model without a tokenizer."""
    guide: GuideMatcher | None = None
    """Mask of allowed tokens for guided decoding; None for free text."""

    # Changed by the engine:
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Most probable tokens at each position, at most ``params.top_logprobs`` of them."""
    finish_reason: FinishReason | None = None
    error: RoseinferError | None = None
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """Time of the first step with some of its prompt; None until then."""
    first_token_at: float | None = None
    """Time when its first token was read back; None until then."""
    ended_at: float | None = None

    # Changed by RequestBlockAllocator:
    held_prefix: HeldPrefix | None = None
    num_cached_tokens: int = 0
    """Tokens served from the prefix cache when it was last admitted."""

    # Changed by Speculation:
    drafter: Drafter | None = None
    """Source of its drafts; None without speculation."""
    drafts: list[int] = field(default_factory=list)
    """Drafts that its next step stores after its newest token, until they are verified."""

    # Changed by the scheduler:
    min_available_blocks: int = 0
    """Available blocks below which admission is not tried again."""
    times_skipped: int = 0
    """Number of later requests admitted before it, plus the number of steps that it was too long
    for."""
    times_preempted: int = 0

    # Changed by TokensInFlight:
    num_in_flight: int = 0
    """Number of its tokens that were launched and not read back."""

    # Changed by the runner:
    resident: Resident | None = None
    """Slot on the device while it decodes there; None otherwise."""

    # Filled by PromptLogprobsInFlight:
    prompt_logprobs: list[float | None] = field(default_factory=list)
    """Log-probabilities of the prompt tokens so far, if requested; None for the first token."""

    max_total_length: int = field(init=False)
    """Most tokens of prompt and completion together."""

    def __post_init__(self) -> None:
        self.max_total_length = self.prompt_length + self.max_generated_tokens
        if self.params.prompt_logprobs:
            self.prompt_logprobs.append(None)

    @property
    def num_unstored(self) -> int:
        """Number of tokens not stored yet, unread tokens in flight included."""
        return len(self.sequence.token_ids) + self.num_in_flight - self.sequence.num_stored

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if log-probabilities of its prompt are missing, which only computing it yields."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_length

    @property
    def may_decode(self) -> bool:
        """True if it has one token to store, known to the next step, and one more to generate."""
        sequence, pending = self.sequence, self.num_in_flight
        num_tokens = len(sequence.token_ids)
        if num_tokens + pending - sequence.num_stored != 1:
            return False
        return not pending or (
            self.resident is not None and num_tokens + pending < self.max_total_length
        )

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens."""
        return self.sequence.token_ids[self.prompt_length :]

    @property
    def num_generated(self) -> int:
        return len(self.sequence.token_ids) - self.prompt_length

    @property
    def decode_s(self) -> float:
        """Seconds from its first token to its end; 0 if it lacks either."""
        if self.first_token_at is None or self.ended_at is None:
            return 0.0
        return self.ended_at - self.first_token_at


def tokenize_prompt(prompt: str | Sequence[int], tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt; raise for a value that is not a prompt."""
    if isinstance(prompt, str) and tokenizer is None:
        raise BadArgument(
            "a text prompt needs a tokenizer, and this model has none; give token ids"
        )
    if isinstance(prompt, NON_PROMPT_TYPES):
        raise BadArgument(f"a prompt must be a text, or token ids in a list, not {prompt!r}")
    try:
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return list(map(index, token_ids))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(prompt, str) and (at := _find_lone_surrogate(prompt)) is not None:
            raise BadArgument(
                f"prompt: character {at}, {prompt[at]!r}, is a lone surrogate, which UTF-8 cannot "
                "encode; give a text without it"
            ) from None
        raise BadArgument(
            "a prompt must be a text that the tokenizer can read, or token ids: "
            f"{type(error).__name__}: {error}"
        ) from error


def _find_lone_surrogate(text: str) -> int | None:
    """Return the index of the first character that UTF-8 cannot encode, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


class RequestBlockAllocator:
    """The allocator of blocks for requests, which reuses cached prefixes."""

    def __init__(
        self,
        kv: KVBlockManager,
        prefixes: PrefixCache | None,
        withdraw: Callable[[Request], None],
        *,
        max_tokens_per_step: int | None = None,
        max_steps_in_flight: int = 0,
        path_counts: Counter[str] | None = None,
    ) -> None:
        """Create an allocator.

        ``withdraw`` is called with a request before its blocks are freed. A request stores at most
        ``max_tokens_per_step`` tokens in a step, and at most ``max_steps_in_flight`` steps are in
        flight when another is launched.
        """
        self._withdraw = withdraw
        self._kv = kv
        self._prefixes = prefixes
        self._path_counts: Counter[str] = Counter() if path_counts is None else path_counts
        windows = tuple(group.window for group in kv.groups) if kv.one_pool else (None,)
        self.block_requirements = BlockRequirements(
            kv.block_size, windows, max_tokens_per_step, max_steps_in_flight
        )
        self._windows = [
            (at, group) for at, group in enumerate(kv.groups) if group.window is not None
        ]
        self.tracks_stored_blocks = bool(prefixes is not None or self._windows)
        """True if ``publish_stored_blocks`` has an effect and must be called."""

    @property
    def capacity(self) -> int:
        return self._kv.max_blocks_per_layer - 1

    @property
    def available(self) -> int:
        """Number of blocks that are free or can be evicted."""
        unused = self._prefixes.num_evictable_blocks if self._prefixes else 0
        return self._kv.num_free_blocks(0) + unused

    def count_needed_blocks(self, sequence: CachedSequence, count: int) -> int:
        """Return the most blocks that storing ``count`` more tokens can take.

        A shared partial block takes one more, for its copy. This is one too many if all holders
        copy it in the same step, since the last of them keeps it.
        """
        size = self._kv.block_size
        blocks = -(-(sequence.num_stored + count) // size) - len(sequence.block_lists[0])
        copies = (
            count > 0
            and sequence.num_stored % size > 0
            and sequence.num_stored >= sequence.token_capacity
        )
        if not self._kv.one_pool:
            return blocks + copies
        needed = (blocks + copies) * len(self._kv.groups)
        max_tokens_per_step = self.block_requirements.max_tokens_per_step
        if max_tokens_per_step is None or count <= max_tokens_per_step:
            return needed
        for at, group in self._windows:  # blocks that leave a window are free for later steps
            block_ids = sequence.block_lists[at]
            num_held = len(block_ids) - count_out_of_window(block_ids)
            assert group.window is not None
            needed -= max(
                0,
                num_held
                + blocks
                - self.block_requirements.max_blocks_in_window(group.window, max_tokens_per_step),
            )
        return needed

    def count_draft_blocks(self, sequence: CachedSequence, count: int) -> int:
        """Return the number of blocks that ``count`` tokens take after the next token's block."""
        size = self._kv.block_size
        blocks = -(-(sequence.num_stored + 1 + count) // size) - -(
            -(sequence.num_stored + 1) // size
        )
        return blocks * len(self._kv.groups) if self._kv.one_pool else blocks

    def ensure(self, blocks: int) -> None:
        """Make ``blocks`` blocks free by eviction, so that a step cannot run out.

        If anything must be evicted, a sixteenth of all evictable blocks is: then the next steps
        have blocks to give out early, several at a time.
        """
        missing = blocks - self._kv.num_free_blocks(0)
        if missing > 0 and self._prefixes:
            self._prefixes.evict(
                max(missing, self._prefixes.num_evictable_blocks // _EVICTION_DIVISOR)
            )

    def reuse_prefix(self, request: Request) -> None:
        """Begin a request that has no stored tokens with its longest cached prefix."""
        if self._prefixes is None:
            return
        sequence = request.sequence
        # One token never matches, since the last token must be computed.
        tokens = sequence.token_ids[:1] if request.needs_prompt_logprobs else sequence.token_ids
        request.held_prefix, sequence.block_lists, num_tokens = self._prefixes.match(tokens)
        request.num_cached_tokens = sequence.num_stored = sequence.token_capacity = num_tokens

    def may_hit_prefix(self, request: Request) -> bool:
        """Return True if the prefix cache may have a prefix of a waiting request."""
        return self._prefixes is not None and self._prefixes.may_match(request.sequence.token_ids)

    def publish_stored_blocks(self, request: Request) -> None:
        """Publish the blocks that a request has filled in the prefix cache.

        Blocks that left a window are given back.
        """
        sequence = request.sequence
        if self._prefixes and request.held_prefix:
            self._prefixes.insert(request.held_prefix, sequence)
        # Tokens in flight do not count, since they may be dropped.
        stored = min(sequence.num_stored, len(sequence.token_ids))
        for at, group in self._windows:
            blocks = sequence.block_lists[at]
            freed_blocks = self._kv.free_out_of_window(group.layers[0], blocks, stored)
            if freed_blocks:
                self._path_counts[EnginePath.FREED_OUT_OF_WINDOW] += len(freed_blocks)
            if self._prefixes:
                self._prefixes.record_out_of_window(freed_blocks)

    def release_blocks(self, request: Request) -> None:
        """Release all blocks of a request. The prefix cache may keep them."""
        sequence = request.sequence
        self._withdraw(request)
        if self._prefixes and request.held_prefix:
            # Tokens in flight are dropped.
            sequence.truncate(self._kv, len(sequence.token_ids))
            self._prefixes.release(request.held_prefix, sequence)
            request.held_prefix = None
        in_windows = [block for at, _ in self._windows for block in sequence.block_lists[at]]
        sequence.free_all_blocks(self._kv)
        if self._prefixes:
            self._prefixes.record_out_of_window(in_windows)

    def invalidate_prefix(self, request: Request) -> None:
        """Remove the blocks that a request has stored from the prefix cache."""
        if self._prefixes and request.held_prefix:
            self._prefixes.release_and_invalidate(request.held_prefix)
            request.held_prefix = None

    def clear_prefix_cache(self) -> None:
        if self._prefixes:
            self._prefixes.clear()
