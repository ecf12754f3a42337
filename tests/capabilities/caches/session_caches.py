"""Caches that keep sessions: right ones, and broken ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.branching_text_caches import BranchingTextCache
from tests.capabilities.caches.truncating_caches import CopiesAtTheCut, CutCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec


@dataclass(slots=True)
class Session:
    """The blocks of a sequence that has ended, and the number of its tokens."""

    table: list[int]
    length: int


class SessionCache(CutCache):
    """Holds the blocks of a session as if the sequence went on. It is right."""

    head_counts = (1, 2)
    head_dims = (4,)
    prefill = CopiesAtTheCut.prefill

    def keep_session(self, seq: int) -> object:
        session = Session(self.tables.pop(seq), self.lengths.pop(seq))
        self.pin(session)
        return session

    def pin(self, session: Session) -> None:
        """Do nothing: the sequence's references are the session's."""

    def resume_session(self, session: Any, seq: int) -> None:
        self.tables[seq], self.lengths[seq] = list(session.table), session.length
        self.hold(session)

    def hold(self, session: Session) -> None:
        self.holders.update(session.table)

    def release_session(self, session: Any) -> None:
        self.drop(session.table)

    def session_table(self, session: Any, layer: int) -> Sequence[int]:  # noqa: ARG002
        return session.table  # type: ignore[no-any-return]


class PinsNothing(SessionCache):
    """13: keeps the table of a session, and gives its blocks back."""

    def pin(self, session: Session) -> None:
        self.drop(session.table)

    def release_session(self, session: Any) -> None: ...


class PinsTheLastBlock(SessionCache):
    """13: pins the last block of a session, and gives the blocks before it back."""

    def pin(self, session: Session) -> None:
        self.drop(session.table[:-1])

    def release_session(self, session: Any) -> None:
        self.drop(session.table[-1:])


class PinsOwnBlocksOnly(SessionCache):
    """T27: pins the blocks of a session that no other sequence holds when it is kept."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.pinned: dict[int, list[int]] = {}

    def pin(self, session: Session) -> None:
        self.pinned[id(session)] = [block for block in session.table if self.holders[block] == 1]
        self.drop(block for block in session.table if self.holders[block] > 1)

    def release_session(self, session: Any) -> None:
        self.drop(self.pinned.pop(id(session)))


class WritesToTheSession(SessionCache):
    """1: writes to the last block of a session that it resumed, without a copy."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.resumed: set[int] = set()

    def resume_session(self, session: Any, seq: int) -> None:
        super().resume_session(session, seq)
        self.resumed.add(seq)

    def must_copy(self, seq: int) -> bool:
        return seq not in self.resumed and super().must_copy(seq)


class HandsTheBlocksOver(SessionCache):
    """12: hands a session's blocks over to each sequence that resumes it, and frees them twice."""

    def hold(self, session: Session) -> None: ...


class LeaksReleasedSessions(SessionCache):
    """Keeps the blocks of a session that was released."""

    def release_session(self, session: Any) -> None: ...


class FreesUnderResumedOnes(SessionCache):
    """12: frees the blocks of a released session, though resumed sequences hold them."""

    def release_session(self, session: Any) -> None:
        for block in session.table:
            self.holders[block] = 0
            self.unused.append(block)


class KeepsFullBlocks(SessionCache):
    """Keeps the full blocks of a session, and gives back the last one with its tokens."""

    def pin(self, session: Session) -> None:
        full = session.length // self.spec.block_size
        self.drop(session.table[full:])
        del session.table[full:]


@dataclass(slots=True)
class TextSession:
    """The blocks of a sequence that has ended, and its token ids."""

    table: list[int]
    token_ids: list[int]


class TextSessionCache(BranchingTextCache):
    """Keeps the token ids of a session with its blocks. It is right."""

    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)

    def keep_session(self, seq: int) -> object:
        return TextSession(self.tables.pop(seq), self.token_ids.pop(seq))

    def resume_session(self, session: Any, seq: int) -> None:
        self.tables[seq], self.token_ids[seq] = list(session.table), self.text_of(session)
        for block in session.table:
            self.hold(block)

    def text_of(self, session: TextSession) -> list[int]:
        """Return the list of token ids of a sequence that resumes a session."""
        return list(session.token_ids)

    def release_session(self, session: Any) -> None:
        for block in reversed(session.table):
            self.drop(block)

    def session_table(self, session: Any, layer: int) -> Sequence[int]:  # noqa: ARG002
        return session.table  # type: ignore[no-any-return]


class SharesTheText(TextSessionCache):
    """14: gives all sequences that resume a session its list of token ids, which they extend."""

    def text_of(self, session: TextSession) -> list[int]:
        return session.token_ids


class ForgetsTheSessionsBlocks(TextSessionCache):
    """Does not find the blocks of a session any more."""

    def keep_session(self, seq: int) -> object:
        for block in self.tables[seq]:
            self.forget(block)
        return super().keep_session(seq)


RIGHT = (SessionCache, TextSessionCache)
BROKEN = (
    PinsNothing,
    PinsTheLastBlock,
    PinsOwnBlocksOnly,
    WritesToTheSession,
    HandsTheBlocksOver,
    LeaksReleasedSessions,
    FreesUnderResumedOnes,
    KeepsFullBlocks,
    SharesTheText,
    ForgetsTheSessionsBlocks,
)
