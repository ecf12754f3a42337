"""The blocks there are for requests: the pool's free ones, and those of unused prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roseinfer.decode.resident import ResidentDecode
    from roseinfer.engine.prefix_cache import PrefixCache
    from roseinfer.engine.request import Request
    from roseinfer.engine.sequences import InferenceSession, SequenceRunner
    from roseinfer.kv.manager import KVBlockManager


class BlockSupply:
    """Hands out and takes back, asking the prefix cache first and last."""

    def __init__(
        self,
        sessions: SequenceRunner,
        prefixes: PrefixCache | None,
        resident: ResidentDecode | None,
    ) -> None:
        self._sessions = sessions
        self._resident = resident
        self._kv: KVBlockManager = sessions.kv
        self._prefixes = prefixes

    @property
    def capacity(self) -> int:
        """Blocks of an empty pool."""
        return self._kv.max_blocks_per_layer - 1

    @property
    def available(self) -> int:
        """Blocks that are free or could be freed at once."""
        unused = self._prefixes.num_evictable if self._prefixes else 0
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
        if self._resident and request.resident is not None:
            self._resident.leave(request.resident)
            request.resident = None
        request.in_flight = 0
        self._sessions.cut(session, len(session.token_ids))
        if self._prefixes and request.held:
            self._prefixes.release(
                request.held, session.token_ids, session.block_lists, session.stored
            )
            request.held = None
        self._sessions.rewind(session)

    def spoil(self, request: Request) -> None:
        """Keep from others what a request has stored."""
        if self._prefixes and request.held:
            self._prefixes.forget(request.held)
            request.held = None

    def drop_prefixes(self) -> None:
        """Keep no block but for the requests that hold it."""
        if self._prefixes:
            self._prefixes.clear()
