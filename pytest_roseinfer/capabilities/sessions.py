"""Sessions: sequences that have ended and are kept, so that later ones begin with their tokens.

The oracle keeps the pages of a session under a name of its own, which no sequence of a history has.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation, return_values
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    RankPolicy,
    Ranks,
    Run,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.operation import call_or_error
from pytest_roseinfer.capabilities.writes import Append, begin_sequence, draw_long_writes
from pytest_roseinfer.oracle.pages import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.observation import Observation


class SessionMethods:
    """Adapter methods for sessions."""

    @optional
    def keep_session(self, seq: int) -> object:
        """End a sequence and keep its tokens as a session; return a handle, which is not None.

        The name may be used again. Until ``release_session``, no step takes the session's blocks,
        however few are free, and lookups find them as before.
        """

    @optional
    def resume_session(self, session: Any, seq: int) -> None:
        """Begin a new sequence with all tokens of a session, as a fork of it.

        The session is kept, so that it can be resumed again, also while this sequence goes on.
        """

    @optional
    def release_session(self, session: Any) -> None:
        """Release a session, whose handle is not used again; resumed sequences go on."""

    @optional
    def session_table(self, session: Any, layer: int) -> Sequence[int | None]:
        """Return the blocks of a session, as ``table`` does for a sequence."""


def _name(seq: int) -> int:
    """Return the oracle's name for the session of a sequence."""
    return -1 - seq


@dataclass(slots=True)
class Sessions(State):
    """Sessions, by the sequences that they were."""

    any_of: ClassVar = ("keep_session",)

    kept: set[int] = field(default_factory=set)

    @property
    def ended(self) -> Mapping[int, str]:
        return {_name(seq): f"the session of sequence {seq}" for seq in sorted(self.kept)}


def kept_sessions(oracle: operation.Oracle) -> set[int]:
    """Return the sessions that are not released, by the sequences that they were."""
    return oracle.ensure_state(Sessions).kept


@operation.register("KeepSession")
class KeepSession(operation.Operation):
    """End a sequence, and keep its tokens as a session."""

    seq: int

    needs = frozenset({"keep_session", "resume_session", "release_session"})
    needs_tokens = True

    def describe(self) -> str:
        return f"keep sequence {self.seq} as a session"

    def uses(self) -> list[int]:
        return [self.seq]

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        is_kept = self.seq in kept_sessions(oracle)
        return not is_kept and operation.Operation.possible(self, oracle)

    def change(self, oracle: operation.Oracle) -> None:
        if oracle.texts:
            oracle.texts.assign(_name(self.seq), oracle.text_of(self.seq))
            oracle.texts.forget(self.seq)
        oracle.rename(self.seq, _name(self.seq))
        oracle.lives[self.seq] += 1
        kept_sessions(oracle).add(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        session = cache.adapter.keep_session(self.seq)
        if session is None:
            return_values.raise_invalid(f"keep_session({self.seq})", session, "a handle")
        cache.sessions[self.seq] = session

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        names = [seq for seq in writer.filled if seq not in kept_sessions(writer.oracle)]
        if names and len(kept_sessions(writer.oracle)) < _MAX_SESSIONS:
            yield operation.DrawOption(151, 3, lambda: cls(writer.pick(names)))


@operation.register("ResumeSession")
class ResumeSession(operation.Operation):
    """Begin a sequence with all tokens of the session of a former one."""

    parent: int
    child: int

    needs = KeepSession.needs

    def describe(self) -> str:
        return f"resume the session of sequence {self.parent} as sequence {self.child}"

    def new_seqs(self) -> list[int]:
        return [self.child]

    def changed_seqs(self) -> list[int]:
        return [self.child]

    def possible(self, oracle: operation.Oracle) -> bool:
        is_kept = self.parent in kept_sessions(oracle)
        return is_kept and operation.Operation.possible(self, oracle)

    def forked_seqs(self) -> list[int]:
        return [_name(self.parent)]

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.fork_fits(_name(self.parent))

    def change(self, oracle: operation.Oracle) -> None:
        oracle.fork(_name(self.parent), self.child)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.resume_session(cache.sessions[self.parent], self.child)

    def copies_blocks(self, oracle: operation.Oracle) -> bool:
        return oracle.fork_shares != "blocks"

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        kept = sorted(kept_sessions(writer.oracle))
        if kept and len(writer.oracle.sequences) < operation.MAX_SEQUENCES:
            yield operation.DrawOption(152, 4, lambda: cls(writer.pick(kept), *writer.fresh(1)))
            yield from draw_long_writes(writer)


@operation.register("ReleaseSession")
class ReleaseSession(operation.Operation):
    """Release the session of a former sequence."""

    parent: int

    needs = KeepSession.needs

    def describe(self) -> str:
        return f"release the session of sequence {self.parent}"

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.parent in kept_sessions(oracle)

    def change(self, oracle: operation.Oracle) -> None:
        kept_sessions(oracle).remove(self.parent)
        oracle.release_pages(_name(self.parent))

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.release_session(cache.sessions.pop(self.parent))

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if kept := sorted(kept_sessions(writer.oracle)):
            times = 6 if writer.oracle.pages_free() < 2 else 2
            yield operation.DrawOption(153, times, lambda: cls(writer.pick(kept)))


_MAX_SESSIONS = 2
"""Most sessions of a drawn history at a time."""


def _resume_all(oracle: operation.Oracle) -> list[operation.Operation]:
    """Return a step that resumes each session, which shows whether its tokens are still there."""
    first = max([0, *oracle.named, *oracle.pending_seqs]) + 1
    return [ResumeSession(seq, first + at) for at, seq in enumerate(sorted(kept_sessions(oracle)))]


def keep_under_pressure(writer: operation.Writer) -> None:
    """Open with a session that is resumed twice, while others need all free blocks.

    Or add no steps. Its blocks were shared with a fork, mostly, which was freed.
    """
    if not writer.live and writer.pick((True, True, False)):
        operation.add_while_fitting(writer, _keep_under_pressure(writer))


def _keep_under_pressure(writer: operation.Writer) -> Iterator[operation.Operation]:
    size, can = writer.oracle.block_size, writer.adapter.abilities
    begin_sequence(writer, writer.pick((size + 1, 2 * size - 1, size, 1)))
    if writer.no_more_steps or not writer.filled:
        return
    parent, others = writer.filled[0], list[int]()
    if Fork.needs <= can and writer.between(0, 2):
        others = [*writer.fresh(1)]
        yield Fork(parent, *others)
    yield KeepSession(parent)
    if others and Free.needs <= can and writer.between(0, 2):
        yield Free(*others)
    for each in draw_long_writes(writer):
        if writer.between(0, 1):
            yield (step := each.draw())
            if Free.needs <= can:
                yield from map(Free, step.changed_seqs())
    for _ in range(2):
        (child,) = writer.fresh(1)
        yield ResumeSession(parent, child)
        yield Append((child,), writer.layout())


# Tables


def _show_tables(run: Run, look: SnapshotScope) -> Mapping[str, Any]:  # noqa: ARG001
    sessions = run.cache_under_test.sessions
    tables = {
        (_name(seq), layer): call_or_error(_table, run, seq, session, layer)
        for seq, session in sessions.items()
        for layer in range(run.spec.num_layers)
    }
    return {"tables": tables} if tables else {}


def _table(run: Run, seq: int, session: object, layer: int) -> list[int | None]:
    call = f"session_table of the session of sequence {seq} in layer {layer}"
    return return_values.table(call, run.adapter.session_table(session, layer))


def refuse_sessions(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a cache that shows tables of sequences, and none of sessions."""
    if adapter.abilities >= {"keep_session", "table"} and "session_table" not in adapter.abilities:
        raise TypeError(
            f"{adapter.__name__} defines keep_session and table: define session_table too, which "
            "shows the blocks of sessions"
        )


# Conditions


class SessionConditions(Observer):
    """Counter of sessions that are resumed in the states that a cache may handle wrongly."""

    any_of = ("keep_session",)
    conditions: ClassVar = {
        "session_resumed_twice": "A session is resumed that was resumed before. Required of a "
        "cache that defines ``keep_session``.",
        "session_resumed_after_pressure": "A session is resumed after no block was free. Required "
        "of a cache that also defines ``ledger``.",
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._resumed: set[int] = set()
        """Sessions that were resumed."""
        self._survived: set[int] = set()
        """Sessions that were kept while no block was free."""

    def after(self, observation: Observation) -> Mapping[str, int]:
        step, oracle = observation.operation, observation.oracle
        counts: Mapping[str, int] = {}
        if isinstance(step, ResumeSession) and observation.outcome.fits:
            counts = {
                "session_resumed_twice": int(step.parent in self._resumed),
                "session_resumed_after_pressure": int(step.parent in self._survived),
            }
            self._resumed.add(step.parent)
        kept = kept_sessions(oracle)
        self._resumed &= kept
        self._survived &= kept
        if kept and (not observation.outcome.fits or not oracle.pages_free()):
            self._survived |= kept
        return counts


def _resume(ranks: Ranks, handles: list[Any], seq: int) -> None:
    ranks.each(lambda at, cache: cache.resume_session(handles[at], seq))


def _release(ranks: Ranks, handles: list[Any]) -> None:
    ranks.each(lambda at, cache: cache.release_session(handles[at]))


def _table_of_ranks(ranks: Ranks, handles: list[Any], layer: int) -> Any:
    return ranks.each(lambda at, cache: cache.session_table(handles[at], layer))[0]


_TOGETHER = ("keep_session", "resume_session", "release_session")
SESSIONS = Capability(
    methods=SessionMethods,
    states=(Sessions,),
    preludes=(Prelude(("keep_session",), 6, keep_under_pressure),),
    needs={
        **{name: tuple(each for each in _TOGETHER if each != name) for name in _TOGETHER},
        "session_table": ("keep_session", "table"),
    },
    refuse=(refuse_sessions,),
    sharded={
        "keep_session": RankPolicy.EACH,
        "resume_session": _resume,
        "release_session": _release,
        "session_table": _table_of_ranks,
    },
    finishing_steps=_resume_all,
    views=(View(("session_table",), _show_tables, in_pictures=True),),
    observers=(SessionConditions,),
    operations=(KeepSession, ResumeSession, ReleaseSession),
)
