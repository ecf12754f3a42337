"""A request, and the supply of blocks that requests take from and give back to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.config import SamplingParams
    from roseinfer.decode.resident import Resident
    from roseinfer.engine.prefix_cache import Held, PrefixCache
    from roseinfer.errors import RoseinferError
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.text.request_text import RequestText


class FinishReason(StrEnum):
    """Why a request has no more tokens to come."""

    STOP = "stop"
    """The model ended the text, or a stop string did."""
    LENGTH = "length"
    """As many tokens as were asked for, or as the model has positions for."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through the engine.

    What is asked does not change. The other fields are each changed by one file only.
    """

    id: int
    """Requests are numbered as they come."""
    params: SamplingParams
    seed: int
    """The one asked for, or one drawn for a request that asked for none."""
    prompt_length: int
    most_tokens: int
    """Tokens it may generate; fewer than asked for where the model's positions end."""
    session: InferenceSession
    text: RequestText | None
    """None for a model without a tokenizer."""

    # The engine's.
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: RoseinferError | None = None

    # BlockSupply's.
    held: Held | None = None
    """What it holds of the prefix cache."""
    found: int = 0
    """Tokens that were stored already when it was last admitted."""

    # The scheduler's.
    waits_for: int = 0
    """Blocks that must be free before it is worth trying to admit it again."""
    passed_over: int = 0
    """Requests that came later and were admitted before it."""
    preempted: int = 0
    """How often its blocks were taken from it."""

    # The runner's.
    in_flight: int = 0
    """Tokens that were chosen, or soon will be, and that have not been read yet."""
    resident: Resident | None = None
    """Its place on the device while it decodes there."""

    full_length: int = field(init=False)
    """Tokens, the prompt's included, when it has all that it may generate."""

    def __post_init__(self) -> None:
        self.full_length = self.prompt_length + self.most_tokens

    @property
    def pending(self) -> int:
        """Tokens that are not stored yet, of which those in flight are not known yet."""
        return len(self.session.token_ids) + self.in_flight - self.session.stored

    @property
    def may_decode(self) -> bool:
        """It has one token to store and another to get, and the next step can know the first."""
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


class BlockSupply:
    """Hands out blocks and takes them back, asking the prefix cache first and last."""

    def __init__(
        self,
        kv: KVBlockManager,
        prefixes: PrefixCache | None,
        withdraw: Callable[[Request], None],
    ) -> None:
        """``withdraw`` is called for a request before its blocks are taken back."""
        self._withdraw = withdraw
        self._kv = kv
        self._prefixes = prefixes

    @property
    def capacity(self) -> int:
        """Blocks of an empty pool."""
        return self._kv.max_blocks_per_layer - 1

    @property
    def available(self) -> int:
        """Blocks that are free or could be freed at once."""
        unused = len(self._prefixes.unused) if self._prefixes else 0
        return self._kv.num_free_blocks(0) + unused

    def needed(self, session: InferenceSession, count: int) -> int:
        """Most blocks that storing so many tokens more can take.

        One more where the last block is partly full and shared. It is one too many if all
        who share it copy it in the same step, since the last of them keeps it.
        """
        size = self._kv.block_size
        blocks = -(-(session.stored + count) // size) - len(session.block_lists[0])
        copies = count > 0 and session.stored % size > 0 and session.stored >= session.room
        return blocks + copies

    def ensure(self, blocks: int) -> None:
        """Free so many, so that a step cannot run out."""
        missing = blocks - self._kv.num_free_blocks(0)
        if missing > 0 and self._prefixes:
            self._prefixes.evict(missing)

    def start(self, request: Request) -> None:
        """Let a request that has nothing stored begin with what is known of its prompt."""
        if self._prefixes is None:
            return
        session = request.session
        match = self._prefixes.match(session.token_ids)
        request.held = match.held
        session.block_lists = match.block_lists
        request.found = session.stored = session.room = match.num_tokens

    def note_stored(self, request: Request) -> None:
        """Offer the blocks that a request has filled to others."""
        if self._prefixes and request.held:
            session = request.session
            known = min(session.stored, len(session.token_ids))
            self._prefixes.insert(request.held, session.token_ids, session.block_lists, known)

    def give_back(self, request: Request) -> None:
        """Take back all that a request holds, of which others may still use what is stored."""
        session = request.session
        self._withdraw(request)
        session.cut(self._kv, len(session.token_ids))
        if self._prefixes and request.held:
            self._prefixes.release(
                request.held, session.token_ids, session.block_lists, session.stored
            )
            request.held = None
        session.rewind(self._kv)

    def spoil(self, request: Request) -> None:
        """Keep from others what a request has stored."""
        if self._prefixes and request.held:
            self._prefixes.forget(request.held)
            request.held = None

    def drop_prefixes(self) -> None:
        """Keep no block but for the requests that hold it."""
        if self._prefixes:
            self._prefixes.clear()
