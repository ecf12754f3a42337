"""A request, the tokens of its prompt, and the supply that it gets blocks from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, RequestTooLarge
from roseinfer.kv.groups import given_back
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.decode.step import Resident
    from roseinfer.engine.drafter import Drafter
    from roseinfer.engine.prefix_cache import Held, PrefixCache
    from roseinfer.errors import RoseinferError
    from roseinfer.guided.compiler import GuideProgress
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.sampling_params import SamplingParams
    from roseinfer.text.request_text import RequestText

# How many tokens a request may have: the model's positions bound it, and the cache's blocks.
#
# All of it is plain numbers, so that another process can reckon as the engine does.


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


NO_PROMPTS = (bytes, bytearray, memoryview, Mapping, Set)
"""These are iterable, and yet no token ids: what they yield are bytes, names, or in no order."""
_EVICTED_AT_ONCE = 16
"""One prefix in so many."""


class FinishReason(StrEnum):
    """Why a request gets no more tokens."""

    STOP = "stop"
    """The model ended the text, or a stop string did."""
    LENGTH = "length"
    """It has as many tokens as were asked for, or as the model has positions for."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, and how far it has come. Each of its fields is changed by one file only."""

    id: int
    params: SamplingParams
    seed: int
    """The seed of ``params``, or one drawn for a request without."""
    prompt_length: int
    most_tokens: int
    """How many tokens it may generate, by its parameters and the model's positions."""
    session: InferenceSession
    text: RequestText | None
    """None for a model without a tokenizer."""
    guide: GuideProgress | None = None
    """What rules out tokens, if the text must be of a form."""

    # Changed by the engine:
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each token the likeliest at its place, as many as were asked for."""
    finish_reason: FinishReason | None = None
    error: RoseinferError | None = None
    queued_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    """When a step first had some of its prompt."""
    first_at: float | None = None
    """When its first token was there."""
    ended_at: float | None = None

    # Changed by BlockSupply:
    held: Held | None = None
    found: int = 0
    """How many tokens the prefix cache had when it was last admitted."""

    # Changed by Speculation:
    drafter: Drafter | None = None
    """What drafts its tokens, if anything does."""

    # Changed by the scheduler:
    waits_for: int = 0
    """How many blocks must be available before it is tried again."""
    passed_over: int = 0
    """How many later requests were admitted before it, and how many steps did without it since it
    was too long for what was left of them."""
    preempted: int = 0

    # Changed by Flight:
    in_flight: int = 0
    """How many of its tokens were launched and not read yet."""

    # Changed by the runner:
    resident: Resident | None = None
    """Its place on the device while it decodes there."""

    # Filled by PromptFlight:
    prompt_logprobs: list[float | None] = field(default_factory=list)
    """Of the prompt's tokens by now, if asked for: the first has none."""

    full_length: int = field(init=False)
    """How many tokens it has in the end if nothing ends it early, with the prompt's."""

    def __post_init__(self) -> None:
        self.full_length = self.prompt_length + self.most_tokens
        if self.params.prompt_logprobs:
            self.prompt_logprobs.append(None)

    @property
    def pending(self) -> int:
        """How many tokens are not stored yet. Those in flight count, though nobody knows them."""
        return len(self.session.token_ids) + self.in_flight - self.session.stored

    @property
    def wants_prompt(self) -> bool:
        """True if it lacks log-probabilities of its prompt, which come of computing it alone."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_length

    @property
    def may_decode(self) -> bool:
        """True if it has one token to store, which the next step can know, and one more to get."""
        session, coming = self.session, self.in_flight
        known = len(session.token_ids)
        if known + coming - session.stored != 1:
            return False
        return not coming or (self.resident is not None and known + coming < self.full_length)

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.session.token_ids[self.prompt_length :]

    @property
    def num_generated(self) -> int:
        return len(self.session.token_ids) - self.prompt_length

    @property
    def decode_s(self) -> float:
        """How long it took from its first token to its end."""
        if self.first_at is None or self.ended_at is None:
            return 0.0
        return self.ended_at - self.first_at


def token_ids_of(prompt: str | Sequence[int], tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt, and raise for what is none."""
    if isinstance(prompt, str) and tokenizer is None:
        raise BadArgument(
            "a text prompt needs a tokenizer, and this model came without one: give token ids"
        )
    if isinstance(prompt, NO_PROMPTS):
        raise BadArgument(f"a prompt is a text or token ids in a list, not {prompt!r}")
    try:
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return list(map(index, token_ids))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(prompt, str) and (at := _not_unicode(prompt)) is not None:
            raise BadArgument(
                f"a prompt is a text, and character {at} of this one, {prompt[at]!r}, is half of "
                "one, as stands for bytes that are no UTF-8"
            ) from None
        raise BadArgument(
            "a prompt is a text that the tokenizer can read, or token ids: "
            f"{type(error).__name__}: {error}"
        ) from error


def _not_unicode(text: str) -> int | None:
    """Return the place of the first character that cannot be written as UTF-8, if there is one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


class BlockSupply:
    """Gives blocks to requests, with cached prefixes in them, and takes them back."""

    def __init__(
        self,
        kv: KVBlockManager,
        prefixes: PrefixCache | None,
        withdraw: Callable[[Request], None],
        *,
        at_once: int | None = None,
        lag: int = 0,
        path_counts: Counter[str] | None = None,
    ) -> None:
        """``withdraw`` is called for a request before its blocks are taken back.

        No request stores more than ``at_once`` tokens in a step, and ``lag`` steps are in flight.
        """
        self._withdraw = withdraw
        self._kv = kv
        self._prefixes = prefixes
        self._path_counts: Counter[str] = Counter() if path_counts is None else path_counts
        windows = tuple(group.window for group in kv.groups) if kv.one_pool else (None,)
        self.needs = BlockNeeds(kv.block_size, windows, at_once, lag)
        self._windows = [
            (at, group) for at, group in enumerate(kv.groups) if group.window is not None
        ]
        self.listens = bool(prefixes is not None or self._windows)
        """What is stored matters here: ``note_stored`` is to be called."""

    @property
    def capacity(self) -> int:
        return self._kv.max_blocks_per_layer - 1

    @property
    def available(self) -> int:
        """How many blocks are free or could be freed at once."""
        unused = self._prefixes.num_unused if self._prefixes else 0
        return self._kv.num_free_blocks(0) + unused

    def needed(self, session: InferenceSession, count: int) -> int:
        """Return the most blocks that storing ``count`` more tokens can take.

        A partial block that is shared takes one more, for its copy. This is one too many if all
        that share it copy it in the same step, since the last of them keeps it.
        """
        size = self._kv.block_size
        blocks = -(-(session.stored + count) // size) - len(session.block_lists[0])
        copies = count > 0 and session.stored % size > 0 and session.stored >= session.room
        if not self._kv.one_pool:
            return blocks + copies
        needed = (blocks + copies) * len(self._kv.groups)
        at_once = self.needs.at_once
        if at_once is None or count <= at_once:
            return needed
        for at, group in self._windows:  # what leaves a window makes room for the steps behind
            own = session.block_lists[at]
            held = len(own) - given_back(own)
            assert group.window is not None
            needed -= max(0, held + blocks - self.needs.most_in(group.window, at_once))
        return needed

    def needed_behind(self, session: InferenceSession, count: int) -> int:
        """Return how many blocks ``count`` tokens take behind the one that is stored next."""
        size = self._kv.block_size
        blocks = -(-(session.stored + 1 + count) // size) - -(-(session.stored + 1) // size)
        return blocks * len(self._kv.groups) if self._kv.one_pool else blocks

    def ensure(self, blocks: int) -> None:
        """Make sure that so many blocks are free, so that a step cannot run out.

        If some prefix must go for it, a sixteenth of those that nobody uses goes at once: then
        the next steps have blocks to give out early, several at a time.
        """
        missing = blocks - self._kv.num_free_blocks(0)
        if missing > 0 and self._prefixes:
            self._prefixes.evict(max(missing, self._prefixes.num_unused // _EVICTED_AT_ONCE))

    def start(self, request: Request) -> None:
        """Give a request that has nothing stored what the prefix cache has of its prompt."""
        if self._prefixes is None:
            return
        session = request.session
        # Nothing can be found of a prompt of one token, since that must be computed.
        tokens = session.token_ids[:1] if request.wants_prompt else session.token_ids
        request.held, session.block_lists, found = self._prefixes.match(tokens)
        request.found = session.stored = session.room = found

    def may_find(self, request: Request) -> bool:
        """Tell if the prefix cache may have some of a prompt that waits."""
        return self._prefixes is not None and self._prefixes.may_match(request.session.token_ids)

    def note_stored(self, request: Request) -> None:
        """Offer the blocks that a request has filled to the prefix cache.

        Those that left a window are given back then.
        """
        session = request.session
        if self._prefixes and request.held:
            self._prefixes.insert(request.held, session)
        stored = min(session.stored, len(session.token_ids))  # what is in flight may come to naught
        for at, group in self._windows:
            left = self._kv.give_back(group.layers[0], session.block_lists[at], stored)
            if left:
                self._path_counts[EnginePath.GAVE_BACK] += len(left)
            if self._prefixes:
                self._prefixes.note_given_back(left)

    def give_back(self, request: Request) -> None:
        """Take back all blocks of a request. The prefix cache may keep what is stored in them."""
        session = request.session
        self._withdraw(request)
        if self._prefixes and request.held:
            session.cut(self._kv, len(session.token_ids))  # what is in flight may come to naught
            self._prefixes.release(request.held, session)
            request.held = None
        in_windows = [block for at, _ in self._windows for block in session.block_lists[at]]
        session.rewind(self._kv)
        if self._prefixes:
            self._prefixes.note_given_back(in_windows)

    def spoil(self, request: Request) -> None:
        """Remove what a request has stored from the prefix cache."""
        if self._prefixes and request.held:
            self._prefixes.forget(request.held)
            request.held = None

    def drop_prefixes(self) -> None:
        if self._prefixes:
            self._prefixes.clear()
