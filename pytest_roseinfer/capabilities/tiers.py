"""Tiers: other stores below a prefix cache, to and from which blocks are copied asynchronously.

The harness ends each transfer, at a step of its choice and with a result of its choice, so that
failures, late and partial arrivals are steps of a history. What a cache finds in lower tiers, which
it evicts and when it stores are its own choices.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pytest_roseinfer.capabilities import operation, return_values
from pytest_roseinfer.capabilities.cache_data import Transfer, TransferResult
from pytest_roseinfer.capabilities.cached_blocks import CachedBlocks
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    Run,
    SnapshotScope,
    Traits,
    View,
    Walk,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Observation,
    describe_error,
    invariant,
    location_of_block,
)
from pytest_roseinfer.capabilities.operation import add_while_fitting, call_or_error
from pytest_roseinfer.capabilities.prefixes import (
    BeginWith,
    LookUp,
    count_stored,
    look_up_all,
    pending_prefixes,
)
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.oracle.pages import Absence, State
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.cached_blocks import BlockTokens
    from pytest_roseinfer.capabilities.observation import Snapshot
    from pytest_roseinfer.oracle.oracle import Oracle

Block = tuple[int, ...]
"""Tokens of a full block, which also determine all tokens before it."""


@dataclass(frozen=True)
class TierTraits(Traits):
    """Contents of the tiers below the first one."""

    holds_blocks: bool = True
    """True if the blocks of a store are not reused until it ends; False if their data was copied
    elsewhere when it began."""
    keeps: int = 0
    """Number of different blocks that the lower tiers store before they evict one, so that all of
    them must be found; 0 if any of them may be evicted at any time."""
    verifies: bool = False
    """True if the cache detects blocks that were not copied although the transfer reported success,
    as by a checksum, before a sequence uses them."""
    can_fail: bool = True
    """False if each transfer succeeds, as copies to memory of the same host do."""
    stores_evicted: bool = False
    """True if a step may store the blocks that it evicts. ``transfers_in_flight`` lists no such
    store, since it ends before the step does."""


class TierMethods:
    """Adapter methods for tiers."""

    tiers: ClassVar[TierTraits] = TierTraits()
    """Contents of the tiers below the first one."""

    @optional
    def match_tiers(self, token_ids: Sequence[int]) -> int:
        """Count the first tokens of a text that ``load_prefix`` would begin a sequence with.

        They are stored in the first tier or in others; a block is found there when its store has
        ended. The lookup changes nothing.
        """

    @optional
    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        """Begin ``seq`` as ``begin_with`` does, and begin to load the next blocks from other tiers.

        Return the number of tokens that are stored, and of those that are being loaded, which may
        be fewer than ``match_tiers`` found. The blocks of both are in its ``table``. Only ``free``
        may use the sequence until the harness ends the load. If it is freed before, the load stays
        in flight, unless the cache cancels it.
        """

    @optional
    def transfers_in_flight(self) -> Sequence[Transfer]:
        """List the transfers in flight, in the order of their begin.

        The cache begins stores at times of its choice. One that it waits for itself, as before it
        reuses a block, leaves the list. A block of a load or store that no table names is not free,
        unless ``holds_blocks`` is False. Transfers from a prefill cache are listed too.
        """

    @optional
    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        """Copy the blocks that arrive, and report the result to the cache.

        For a load, return the number of tokens that its sequence has now: those that were stored
        before, and the loaded ones up to the first block that did not arrive. The others are
        written again later. The blocks that did not arrive are no longer in its ``table``.
        """

    @optional
    def restart_tiers(self, keep: bool) -> None:
        """Restart the lower tiers, with the blocks that they stored if ``keep``, else empty.

        Transfers in flight stay in flight.
        """


# The oracle's part


class Loading(NamedTuple):
    """A sequence whose last tokens are being loaded."""

    ready: int
    """Number of its first tokens, which are stored."""
    tokens: list[int]
    """All of its tokens, those that are being loaded included."""


class End(NamedTuple):
    """A transfer that ended in the present step, with its result."""

    transfer: Transfer
    result: TransferResult


@dataclass(slots=True)
class Tiers(State):
    """Sequences that wait for loads, and transfers in flight."""

    any_of: ClassVar = ("load_prefix",)
    uncertain_room: ClassVar = True
    spared_blocks: ClassVar = "blocks of transfers in flight"

    loading: dict[int, Loading] = field(default_factory=dict)
    """Sequences that wait for a load; in a drawn history, without tokens."""
    ending: dict[int, Loading] = field(default_factory=dict)
    """Sequences whose load ends in the present step."""
    others: int = 0
    """Number of transfers in flight that no sequence waits for."""
    held: int = 0
    """Number of blocks of transfers in flight that no sequence has."""
    under_stores: int = 0
    """Number of blocks of stores in flight that sequences have."""
    end: End | None = None
    """The transfer that ended in the present step."""
    trusted: bool = True
    """False once the data of a store was lost although it reported success."""
    kept: bool | None = None
    """Choice of ``keep`` if the lower tiers restarted in the present step."""

    @property
    def absent(self) -> Mapping[int, Absence]:
        loads = self.loading.items()
        return {seq: Absence("being loaded", load.tokens) for seq, load in loads}

    @property
    def hidden(self) -> Collection[int]:
        return self.loading.keys()

    def unwritten(self, seq: int) -> int:
        load = self.loading.get(seq)
        return len(load.tokens) - load.ready if load else 0

    def on_free(self, seq: int) -> None:
        self.loading.pop(seq, None)

    def blocks_to_spare(self, seqs: Collection[int]) -> int:
        # A write to a block that is being stored may need a copy.
        return self.held + (self.under_stores if seqs else 0)


def tiers_of(oracle: Oracle) -> Tiers:
    return oracle.ensure_state(Tiers)


# Results of transfers


DONE, TWICE, FAILED, FULL, PART, UNNOTICED = (
    "done",
    "twice",
    "failed",
    "full",
    "part",
    "unnoticed",
)
RESULTS = {
    DONE: "",
    TWICE: ", and reports that twice",
    FAILED: ", which fails",
    FULL: ", which fails as there is no space",
    PART: ", in part",
    UNNOTICED: ", in part, and reports that all is copied",
}
"""Results of a transfer that are drawn, with descriptions."""


def result_of(transfer: Transfer, name: str, at: int) -> TransferResult:
    """Return a result of a transfer by its name; ``at`` determines the part that arrives."""
    blocks = transfer.num_blocks
    part = at % blocks if blocks else 0
    if name == PART:
        return TransferResult(part, part)
    if name == UNNOTICED:
        return TransferResult(part, blocks)
    if name in (FAILED, FULL):
        return TransferResult(0, 0, full=name == FULL and transfer.kind != "load")
    return TransferResult(blocks, blocks, reports=1 + (name == TWICE))


_DRAWN = (DONE, DONE, DONE, FAILED, PART, PART, TWICE, FULL)
"""Results of a transfer, each as often as it is drawn."""
_DRAWN_OF_LOADS = (DONE, DONE, FAILED, FAILED, FAILED, PART, PART, TWICE)
"""Results of a load in a prelude, each as often as it is drawn."""


def _draw_result(writer: operation.Writer, names: Sequence[str] = _DRAWN) -> str:
    """Draw a result; one that loses data unnoticed only if the cache detects that."""
    if writer.adapter.tiers.verifies:
        names = [*names, UNNOTICED, UNNOTICED]
    return writer.pick(_possible(writer.adapter, names))


def _possible(adapter: Any, names: Sequence[str]) -> Sequence[str]:
    """Return the results that transfers of a cache can have."""
    return names if adapter.tiers.can_fail else (DONE,)


# Operations


_NEEDS = frozenset({"load_prefix", "transfers_in_flight", "end_transfer"})
_BEGIN_TRANSFERS = frozenset({"load_prefix", "begin_receive"})
"""Methods after which transfers may be in flight, from other tiers or from a prefill cache."""


@operation.register("LoadPrefix")
class LoadPrefix(BeginWith):
    """Begin a sequence with the result of a lookup, and begin to load the rest from other tiers."""

    needs = BeginWith.needs | _NEEDS

    def describe(self) -> str:
        return f"begin sequence {self.seq} with the result of its lookup, and load the rest of it"

    def change(self, oracle: Oracle) -> None:
        BeginWith.change(self, oracle)
        tiers_of(oracle).loading[self.seq] = Loading(0, [])

    def drive(self, cache: operation.CacheUnderTest) -> object:
        before = {each.id for each in list_transfers(cache.adapter)}
        answer = cache.adapter.load_prefix(cache.lookup_handles.pop(self.seq), self.seq)
        for each in list_transfers(cache.adapter):
            if each.id not in before and (each.kind, each.seq) == ("load", self.seq):
                cache.loads[self.seq] = each
        return answer, cache.loads.get(self.seq)

    def settle(self, oracle: Oracle, answer: object) -> str | None:
        """Append the tokens that are stored, and those that are being loaded."""
        assert isinstance(answer, tuple)
        counts, load = answer
        valid = isinstance(counts, tuple) and len(counts) == 2 and return_values.are_numbers(counts)
        if not valid or min(counts) < 0:
            right = "the numbers of tokens that are stored and that are being loaded"
            return f"load_prefix() returned {counts!r}; it must return {right}"
        ready, coming = counts
        if bool(coming) != (load is not None):
            begins = f"load_prefix() begins to load {format_count(coming, 'token')}"
            listed = f"{'a' if load else 'no'} load of sequence {self.seq}"
            return f"{begins}, and transfers_in_flight() lists {listed}"
        loading = tiers_of(oracle).loading
        del loading[self.seq]
        wrong = BeginWith.settle(self, oracle, ready + coming)
        if coming:
            loading[self.seq] = Loading(ready, oracle.tokens(self.seq))
        return wrong

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if names := pending_prefixes(writer.oracle):
            yield operation.DrawOption(101, 6, lambda: cls(writer.pick([*names])))


def list_transfers(adapter: Any) -> list[Transfer]:
    return return_values.transfers(adapter.transfers_in_flight())


def end_with_result(
    cache: operation.CacheUnderTest, transfer: Transfer, name: str, at: int
) -> tuple[End, object, str | None]:
    """End a transfer; return its end, the cache's answer, and a problem or None."""
    end, answer, problem = End(transfer, result_of(transfer, name, at)), None, None
    which = f"transfers_in_flight() {{}} transfer {transfer.id!r}, "
    if not _lists(cache.adapter, transfer):
        problem = which.format("lacks") + f"for which sequence {transfer.seq} waits"
    else:
        answer = cache.adapter.end_transfer(transfer, end.result)
        if _lists(cache.adapter, transfer):
            problem = which.format("still lists") + "which has ended"
    return end, answer, problem


def _lists(adapter: Any, transfer: Transfer) -> bool:
    return transfer.id in {each.id for each in list_transfers(adapter)}


@operation.register("EndLoad")
class EndLoad(operation.Operation):
    """End the load that a sequence waits for."""

    seq: int
    result: str = DONE
    at: int = 0
    """Number that determines the part that arrives."""

    needs = _NEEDS

    def describe(self) -> str:
        return f"end the load of sequence {self.seq}{RESULTS[self.result]}"

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def restored_seqs(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: Oracle) -> bool:
        return self.seq in tiers_of(oracle).loading

    def change(self, oracle: Oracle) -> None:
        tiers = tiers_of(oracle)
        tiers.ending[self.seq] = tiers.loading.pop(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> object:
        return end_with_result(cache, cache.loads.pop(self.seq), self.result, self.at)

    def settle(self, oracle: Oracle, answer: object) -> str | None:
        """Drop the tokens that did not arrive."""
        assert isinstance(answer, tuple)
        end, tokens, problem = answer
        if problem:
            return str(problem)
        tiers = tiers_of(oracle)
        load, tiers.end = tiers.ending.pop(self.seq), end
        if not return_values.is_number(tokens):
            right = "the number of tokens that the sequence has"
            return f"end_transfer() returned {tokens!r} for a load; it must return {right}"
        # Lost data that was reported may be right all the same, in a block of an earlier load.
        arrived = max(end.result.arrived, end.result.reported) * oracle.block_size
        most = min(load.ready + arrived, len(load.tokens))
        complete = end.result.reported == end.result.arrived == end.transfer.num_blocks
        least = most if complete and tiers.trusted else load.ready
        if not least <= tokens <= most:
            right = f"{least}" if least == most else f"{least} to {most}"
            return (
                f"sequence {self.seq} has {format_count(tokens, 'token')} after its load, and "
                f"{right} are right: {load.ready} were stored, and {end.result.arrived} of "
                f"{format_count(end.transfer.num_blocks, 'block')} arrived"
            )
        oracle.drop_unwritten(self.seq, tokens)
        return None

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> EndLoad:
            seq = writer.pick([*tiers_of(writer.oracle).loading])
            return cls(seq, _draw_result(writer), writer.between(0, 3))

        if tiers_of(writer.oracle).loading:
            yield operation.DrawOption(132, 8, draw_step)


@operation.register("EndTransfer")
class EndTransfer(operation.Operation):
    """End a transfer that no sequence waits for: a store, a move, or the load of a freed one."""

    number: int = 0
    """Its index among these, modulo their number."""
    result: str = DONE
    at: int = 0
    """Number that determines the part that arrives."""

    needs = _NEEDS

    def describe(self) -> str:
        return f"end transfer {self.number} that none waits for{RESULTS[self.result]}"

    def possible(self, oracle: Oracle) -> bool:
        return tiers_of(oracle).others > 0

    def drive(self, cache: operation.CacheUnderTest) -> object:
        awaited = {each.id for each in cache.loads.values()}
        others = [each for each in list_transfers(cache.adapter) if each.id not in awaited]
        return end_with_result(cache, others[self.number % len(others)], self.result, self.at)

    def settle(self, oracle: Oracle, answer: object) -> str | None:
        assert isinstance(answer, tuple)
        tiers_of(oracle).end, _, problem = answer
        return str(problem) if problem else None

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> EndTransfer:
            return cls(writer.between(0, 2), _draw_result(writer), writer.between(0, 3))

        if writer.oracle.lives or writer.oracle.sequences:
            yield operation.DrawOption(131, 8, draw_step)


@operation.register("RestartTiers")
class RestartTiers(operation.Operation):
    """Restart the lower tiers, with what they stored or empty."""

    keep: bool = True

    needs = frozenset({"restart_tiers"})

    def describe(self) -> str:
        return f"restart the lower tiers {'with their blocks' if self.keep else 'empty'}"

    def change(self, oracle: Oracle) -> None:
        tiers_of(oracle).kept = self.keep

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.restart_tiers(self.keep)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if writer.oracle.lives:
            yield operation.DrawOption(133, 1, lambda: cls(writer.pick((True, False))))


# Contents of lower tiers


@dataclass(frozen=True, slots=True)
class TierBooks:
    """Blocks that lower tiers may store, and those of transfers in flight."""

    findable: frozenset[Block] = frozenset()
    """Blocks that may be found there."""
    stored: frozenset[Block] = frozenset()
    """Blocks that must be found there; none once others may have taken their place."""
    in_flight: Mapping[int | str, Sequence[frozenset[Block]]] = field(default_factory=dict)
    """Possible contents of each block of a transfer when it began, by the transfer's id."""

    def restart(self, *, moving: bool) -> TierBooks:
        """Return the books of tiers that lost their blocks, unless some are ``moving``.

        The blocks of a move are not known.
        """
        return TierBooks(self.findable if moving else frozenset(), in_flight=self.in_flight)

    def end(self, end: End) -> TierBooks:
        """Return the books after the end of a transfer."""
        in_flight = dict(self.in_flight)
        contents, result = in_flight.pop(end.transfer.id, ()), end.result
        if end.transfer.kind == "load":
            return replace(self, in_flight=in_flight)
        complete = result.arrived == end.transfer.num_blocks
        known = [each for each in contents if len(each) == 1] if complete else []
        return replace(
            self,
            in_flight=in_flight,
            findable=self.findable.union(*contents[: max(result.arrived, result.reported)]),
            stored=self.stored.union(*known),
        )

    def vanish(self, ids: Iterable[int | str]) -> TierBooks:
        """Return the books after the cache has waited for transfers, or cancelled them."""
        in_flight = dict(self.in_flight)
        contents = chain.from_iterable([in_flight.pop(each) for each in ids])
        return replace(self, in_flight=in_flight, findable=self.findable.union(*contents))

    def begin(self, transfer: Transfer, contents: Sequence[frozenset[Block]]) -> TierBooks:
        """Return the books after the begin of a transfer."""
        return replace(self, in_flight={**self.in_flight, transfer.id: contents})

    def evict(self, keeps: int) -> TierBooks:
        """Return the books of tiers that store this number of blocks before they evict one."""
        coming = chain.from_iterable(self.in_flight.values())
        if len(self.findable.union(*coming)) <= keeps:
            return self
        return replace(self, stored=frozenset())


@dataclass(frozen=True, slots=True)
class TierNote:
    """Knowledge of the tiers that invariants need to judge a step."""

    books: TierBooks
    contents: BlockTokens
    """Tokens of blocks of the first tier."""
    awaited: Mapping[int | str, int]
    """Sequence that waits for each load."""


class TierContents(Observer):
    """Blocks that the lower tiers may store, and the transfers in flight."""

    any_of = ("load_prefix",)
    conditions: ClassVar = {
        "block_loaded": "A load ends with some of its blocks, for a sequence that waits for it, or "
        "before ``load_prefix`` returns. Required of a cache that defines ``load_prefix``.",
        "load_failed": "A load ends without any block. Required of a cache that defines "
        "``load_prefix``, unless its transfers cannot fail.",
        "load_in_part": "A load ends with some of its blocks, but not all. Required of a cache "
        "that defines ``load_prefix``, unless its transfers cannot fail.",
        "block_left_under_store": "A store is in flight after the last sequence with one of its "
        "blocks has left it. Required of a cache that defines ``load_prefix``, unless it stores "
        "blocks when it evicts them.",
        "restarted_warm": "The lower tiers restart with blocks that they stored. Required of a "
        "cache that defines ``restart_tiers``.",
        "restarted_empty": "The lower tiers lose the blocks that they stored. Required of a cache "
        "that defines ``restart_tiers``.",
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.books = TierBooks()
        self._next = self.books
        """Books after the present step."""
        self._contents: BlockTokens = {}
        """Tokens of blocks of the first tier after the latest step."""
        self._contents_next: BlockTokens = {}

    def notes(self, after: Snapshot) -> TierNote:
        cached = self.run.observer(CachedBlocks)
        assert cached
        self._contents_next = cached.block_tokens_after(after).get(0, {})
        self._next = self._advance(after)
        awaited = {each.id: seq for seq, each in self.run.cache_under_test.loads.items()}
        return TierNote(self._next, self._contents_next, awaited)

    def _advance(self, after: Snapshot) -> TierBooks:
        """Return the books after the present step."""
        tiers, books = tiers_of(self.run.oracle), self.books
        listed = {} if isinstance(after.transfers, Exception) else _by_id(after.transfers)
        if tiers.end:
            books = books.end(tiers.end)
        books = books.vanish(books.in_flight.keys() - listed.keys())
        if tiers.kept is False:
            books = books.restart(moving=any(each.kind == "move" for each in listed.values()))
        if self.run.declared.tiers.stores_evicted:
            books = replace(books, findable=books.findable | self._evicted())
        for name in listed.keys() - books.in_flight.keys():
            books = books.begin(listed[name], self._contents_of(listed[name], after))
        return books.evict(self.run.declared.tiers.keeps)

    def _evicted(self) -> set[Block]:
        """Return the full blocks that the first tier has lost in the present step."""
        size = self.run.spec.block_size
        before, after = (
            {tuple(tokens) for tokens in contents.values() if len(tokens) == size}
            for contents in (self._contents, self._contents_next)
        )
        return before - after

    def _contents_of(self, transfer: Transfer, after: Snapshot) -> list[frozenset[Block]]:
        """Return the possible contents of each block of a new transfer.

        A block may have been evicted and written again in the step in which its store began.
        """
        if transfer.kind == "load":
            return [frozenset(self._loaded_into(block, after)) for block in transfer.blocks]
        size = self.run.spec.block_size
        both = [
            (tuple(self._contents.get(block, ())), tuple(self._contents_next.get(block, ())))
            for block in transfer.blocks
        ]
        return [frozenset(each for each in pair if len(each) == size) for pair in both]

    def _loaded_into(self, block: int, after: Snapshot) -> Iterator[Block]:
        """Yield the tokens that a load writes to a block."""
        for seq, table in after.tables_of(0).items():
            if block in table[: len(pages := self.run.oracle.sequences[seq])]:
                yield tuple(pages[table.index(block)].tokens)

    def after(self, observation: Observation) -> Mapping[str, int]:
        tiers, transfers = tiers_of(observation.oracle), observation.after.transfers
        assert not isinstance(transfers, Exception)
        counts = Counter(_conditions(observation, tiers, self.books, self._contents))
        self.books, self._contents = self._next, self._contents_next
        if tiers.end and tiers.end.transfer.kind != "load":
            tiers.trusted &= tiers.end.result.arrived >= tiers.end.result.reported
        tiers.end = tiers.kept = None
        owned = {*observation.after.owners(0)} if observation.after.tables else set[int]()
        in_flight = observation.after.blocks_in_flight.keys()
        tiers.others = len(transfers) - len(tiers.loading)
        tiers.held = len(in_flight - owned)
        tiers.under_stores = len(in_flight & owned)
        return counts


def _by_id(transfers: Sequence[Transfer]) -> dict[int | str, Transfer]:
    return {each.id: each for each in transfers}


def _conditions(
    observation: Observation, tiers: Tiers, before: TierBooks, contents: BlockTokens
) -> Iterator[str]:
    """Yield the conditions that a step met; ``before`` are the books before it.

    ``contents`` are the tokens of blocks of the first tier before it.
    """
    if tiers.kept is not None and before.findable:
        yield "restarted_warm" if tiers.kept else "restarted_empty"
    step = observation.operation
    if isinstance(step, LoadPrefix) and step.seq not in tiers.loading:
        blocks_now = {tuple(page.tokens) for page in observation.oracle.sequences[step.seq]}
        if blocks_now & before.findable - {*map(tuple, contents.values())}:
            yield "block_loaded"
    if tiers.end and tiers.end.transfer.kind == "load":
        arrived, blocks = tiers.end.result.arrived, tiers.end.transfer.num_blocks
        if isinstance(step, EndLoad) and arrived:
            yield "block_loaded"
        if arrived < blocks:
            yield "load_in_part" if arrived else "load_failed"
    assert not isinstance(observation.after.transfers, Exception)
    owned = observation.after.owners(0) if observation.after.tables else {}
    for each in observation.after.transfers:
        if each.kind == "store" and not owned.keys() >= {*each.blocks}:
            yield "block_left_under_store"


def tier_note(observation: Observation) -> TierNote:
    note: TierNote = observation.notes[TierContents]
    return note


@invariant(rank=19, needs=("load_prefix",))
def blocks_in_flight(observation: Observation) -> Finding | None:
    """A block must keep its contents until its store ends, and have no user until its load ends."""
    transfers = observation.after.transfers
    if isinstance(transfers, Exception):
        return Finding(f"transfers_in_flight() raised {describe_error(transfers)}", cause=transfers)
    if observation.after.tables is None:
        return None
    note = tier_note(observation)
    for each in transfers:
        if each.kind == "load":
            wrong = _used_under_load(observation, each, note.awaited.get(each.id))
        else:
            wrong = _changed_under_store(observation, each)
        if wrong:
            return wrong
    return None


def _used_under_load(
    observation: Observation, load: Transfer, awaiting: int | None
) -> Finding | None:
    """Find a block of a load that is in the table of another sequence than the one that waits."""
    for seq, table in observation.after.tables_of(0).items():
        for block in load.blocks if seq != awaiting else ():
            if block in table:
                problem = f"block {block} of sequence {seq} is written by load {load.id!r}"
                location = location_of_block(observation, 0, block)
                return Finding(f"{problem}, in flight", location, kind="under a load")
    return None


def _changed_under_store(observation: Observation, store: Transfer) -> Finding | None:
    """Find a block of a store that holds other tokens than when the store began."""
    if not observation.declared.tiers.holds_blocks:
        return None
    note = tier_note(observation)
    for block, possible in zip(store.blocks, note.books.in_flight[store.id], strict=True):
        now = tuple(note.contents.get(block, ()))
        if possible and not any(each[: len(now)] == now for each in possible):
            problem = f"block {block} was written again, and store {store.id!r} of it is in flight"
            return Finding(problem, location_of_block(observation, 0, block), kind="under a store")
    return None


@invariant(rank=33, needs=("match_tiers", "table", "ledger"))
def tier_lookups(observation: Observation) -> Finding | None:
    """A lookup in all tiers must find what was stored there, and nothing that was not."""
    for (text, count), hit in observation.after.tier_matches.items():
        lookup = f"match_tiers() of text {text}, {format_count(count, 'token')} long,"
        if isinstance(hit, Exception):
            return Finding(f"{lookup} raised {describe_error(hit)}", cause=hit)
        most = count_stored(observation, text, count, tier_note(observation).books.findable)
        if hit > most:
            problem = f"{lookup} found {hit}, and only {most} of them are stored in any tier"
            return Finding(problem, kind="not stored")
        if hit < (least := _least_match(observation, text, count)):
            return Finding(f"{lookup} found {hit}, and {least} of them are stored", kind="lost")
    return None


def _least_match(observation: Observation, text: int, count: int) -> int:
    """Count the first tokens of a text that a lookup in all tiers must find.

    These are the tokens that ``match_prefix`` finds, and the blocks after them in lower tiers.
    """
    after, note = observation.after, tier_note(observation)
    found = after.matches.get((text, count))
    if not isinstance(found, int) or (text, count) in after.collided:
        return 0
    size, recomputed = observation.spec.block_size, observation.declared.prefixes.recomputed_tokens
    tokens, end = observation.oracle.text_tokens(text, count - recomputed), found // size * size
    while len(tokens) >= end + size and tuple(tokens[end : end + size]) in note.books.stored:
        end += size
    return max(found, end)


def _show_tiers(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    transfers = call_or_error(list_transfers, run.adapter)
    held: dict[str, list[int]] = {"load": [], "store": [], "move": [], "receive": []}
    for each in () if isinstance(transfers, Exception) else transfers:
        if each.kind in ("load", "receive") or run.declared.tiers.holds_blocks:
            held[each.kind] += each.blocks
        held["store"] += each.held_blocks  # their contents stay, too
    shown = {
        "transfers": transfers,
        "blocks_in_flight": Counter(held["load"] + held["store"] + held["receive"]),
        "blocks_of_stores": frozenset(held["store"]),
    }
    if "match_tiers" in run.features:
        shown |= look_up_all(run, look, "match_tiers")
    return shown


# Preludes


def _load_a_text(writer: operation.Writer) -> None:
    """Open with a text that is stored, evicted and loaded again; or add no steps."""
    needed = LoadPrefix.needs | LookUp.needs | Prefill.needs | Free.needs
    if needed <= writer.adapter.abilities and not writer.live and writer.between(0, 9):
        steps = writer.pick((*[_store_evict_and_load] * 3, _fill_a_tier))
        add_while_fitting(writer, steps(writer))


def _store_evict_and_load(writer: operation.Writer) -> Iterator[operation.Operation]:
    size, recomputed = writer.oracle.block_size, writer.adapter.prefixes.recomputed_tokens
    most = writer.oracle.capacity * size
    blocks = writer.pick([n for n in (2, 3, 3, 2, 1) if n * size + recomputed <= most])
    tokens = blocks * size + recomputed
    (first,) = writer.fresh(1)
    text = writer.oracle.text_of(first)
    yield Prefill(first, tokens, writer.layout())
    other = _name_of_another(writer)
    other_text = writer.oracle.text_of(other)
    yield from _end_stores(writer, writer.pick((*[blocks] * 7, 0)))
    yield Free(first)
    keeps = writer.adapter.tiers.keeps
    # Full blocks may be stored, and so evict the text from the tier as well.
    fits = not keeps or blocks + writer.oracle.capacity <= keeps
    full = None if fits else writer.pick((False, False, None))
    yield from _evict(writer, other, full=full, most_left=min(1, blocks - 1))
    # Twice as many, where the blocks that a tier evicts move on to the next one.
    yield from _end_stores(writer, writer.pick((2 * blocks, 2 * blocks, blocks)))
    if "restart_tiers" in writer.adapter.abilities and writer.between(0, 1):
        yield RestartTiers(writer.pick((True, True, True, False)))
        if writer.between(0, 3):
            yield from _evict(writer, writer.name_with_prefix(1, other_text), full=True)
    for _ in range(2):
        yield from _load(writer, text, other_text, tokens)


def _fill_a_tier(writer: operation.Writer) -> Iterator[operation.Operation]:
    """Yield steps that store a text in a tier, and then more blocks than the tier has room for.

    The text is evicted from the first tier before. Either a load of it is in flight meanwhile, or
    the first store of the others fails as there is no space.
    """
    size, recomputed = writer.oracle.block_size, writer.adapter.prefixes.recomputed_tokens
    (first,) = writer.fresh(1)
    text, tokens = writer.oracle.text_of(first), size + recomputed
    yield Prefill(first, tokens, writer.layout())
    yield EndTransfer()
    yield Free(first)
    yield from _evict(writer, _name_of_another(writer), full=False, most_left=0)
    seq = None
    if loads := writer.between(0, 1):
        seq = writer.name_with_prefix(tokens, text)
        yield LookUp(seq, tokens)
        yield LoadPrefix(seq)
    most = max(1, (writer.adapter.tiers.keeps or 2) - 1)
    other, end, room = _name_of_another(writer), 0, writer.oracle.pages_free() - loads
    fails = writer.adapter.tiers.can_fail and not loads
    for name in (FULL if fails else DONE, DONE) if room > 0 else ():
        other_text = writer.oracle.text_of(other)
        end = min(end + writer.pick((most, max(1, most - 1))), room)
        yield Prefill(other, end * size, writer.layout())
        yield EndTransfer(0, name)
        yield Free(other)
        other = writer.name_with_prefix(end * size, other_text)
    if seq is not None:
        yield EndLoad(seq)


def _name_of_another(writer: operation.Writer) -> int:
    """Draw a name with a text that differs from the stored ones, if there is one."""
    name = writer.name_without_prefix(writer.oracle.block_size)
    return writer.fresh(1)[0] if name is None else name


def _end_stores(writer: operation.Writer, count: int) -> Iterator[operation.Operation]:
    """Yield the ends of stores, which most often succeed."""
    names = (DONE,) * 11 + (PART, PART, TWICE, FAILED, FULL)
    name = writer.pick(_possible(writer.adapter, names))
    for _ in range(count):
        yield EndTransfer(0, name, 1)


def _evict(
    writer: operation.Writer,
    seq: int,
    loading: int = 0,
    *,
    full: bool | None = None,
    most_left: int = 1,
) -> Iterator[operation.Operation]:
    """Yield steps that take free blocks, for a new sequence and maybe others, and free them.

    They take all, or leave ``most_left``, so that the first block of an earlier text may stay.
    ``loading`` is the number of blocks of a load, which the drawing does not know to be taken. With
    ``full``, all blocks are full, and so are stored; if it is False, as few as possible are; None
    draws one of both.
    """
    oracle = writer.oracle
    size, before = oracle.block_size, {*oracle.sequences}
    free = oracle.pages_free() - loading - writer.pick((0, 0, most_left))
    if free <= 0:
        return
    few = min(free, operation.MAX_SEQUENCES - len(before)) - 1
    fills = full or size == 1 or few < 0 or (full is None and not writer.between(0, 2))
    if fills:
        yield Prefill(seq, free * size, writer.layout())
    else:
        yield Prefill(seq, (free - few - 1) * size + 1, writer.layout())
        if few:
            yield Append(writer.fresh(few), writer.layout())
    if full or (full is None and writer.between(0, 1)):
        yield from _end_stores(writer, 1)
    for each in [each for each in oracle.sequences if each not in before]:
        yield Free(each)


def _load(
    writer: operation.Writer, text: int, other: int, tokens: int
) -> Iterator[operation.Operation]:
    """Yield the load of a text for a new sequence, which goes on, or is freed before the end."""
    seq, blocks = writer.name_with_prefix(tokens, text), tokens // writer.oracle.block_size
    yield LookUp(seq, tokens)
    yield LoadPrefix(seq)
    meanwhile = writer.pick(("nothing", "evicted", "freed", "evicted"))
    if meanwhile == "freed":
        yield Free(seq)
    if meanwhile != "nothing":
        name = writer.name_with_prefix(1, other)
        yield from _evict(writer, name, blocks, full=writer.pick((True, True, None)))
        yield EndTransfer(0, DONE)
    if meanwhile == "freed":
        return
    result, size = _draw_result(writer, _DRAWN_OF_LOADS), writer.oracle.block_size
    yield EndLoad(seq, result, 1)
    # After lost blocks, the first block that is full again shows which text the cache goes on with.
    for _ in range(writer.pick((size, size, 1, size if result in (FAILED, PART) else 0))):
        yield Append((seq,), writer.layout())
    if writer.between(0, 3):
        yield Free(seq)
        yield from _evict(writer, writer.name_with_prefix(1, other))
        yield from _end_stores(writer, 2)


def _walk(at: Walk) -> Iterator[operation.Operation]:
    state = at.oracle.state(Tiers)
    if state and (at.oracle.sequences or at.oracle.lives):
        results = _possible(at.adapter, (DONE, FAILED))
        yield from (EndTransfer(0, name) for name in results)
        yield from map(LoadPrefix, pending_prefixes(at.oracle))
        yield from (EndLoad(seq, name) for seq in state.loading for name in results)


def _return_steps(oracle: Oracle) -> list[operation.Operation]:
    state = oracle.state(Tiers)
    return [EndLoad(seq) for seq in state.loading] if state else []


def refuse_tiers(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for declarations about tiers that cannot be judged."""
    if "load_prefix" in adapter.abilities and adapter.windows.groups:
        raise TypeError(
            f"{adapter.__name__} defines load_prefix, which cannot be judged with windows yet"
        )
    if adapter.abilities & {"transfers_in_flight"} and not adapter.abilities & _BEGIN_TRANSFERS:
        raise TypeError(
            f"{adapter.__name__} defines transfers_in_flight and must then define load_prefix or "
            "begin_receive too"
        )
    keeps = adapter.tiers.keeps
    if type(keeps) is not int or keeps < 0:
        raise TypeError(
            f"{adapter.__name__}.tiers.keeps is {keeps!r}: write a number of blocks, 0 for none"
        )


def _required_conditions(adapter: type[Any]) -> Iterator[str]:
    if "load_prefix" not in adapter.abilities:
        return
    if not adapter.tiers.stores_evicted:
        yield "block_left_under_store"
    if adapter.tiers.can_fail:
        yield from ("load_failed", "load_in_part")


TIERS = Capability(
    methods=TierMethods,
    states=(Tiers,),
    preludes=(Prelude(("load_prefix",), 9, _load_a_text),),
    operations=(LoadPrefix, EndLoad, EndTransfer, RestartTiers),
    return_steps=_return_steps,
    needs={
        "load_prefix": (
            "transfers_in_flight",
            "end_transfer",
            "match_prefix",
            "look_up",
            "begin_with",
        ),
        "transfers_in_flight": ("end_transfer",),
        "end_transfer": ("transfers_in_flight",),
        "match_tiers": ("load_prefix",),
        "restart_tiers": ("load_prefix",),
    },
    invariants=(blocks_in_flight, tier_lookups),
    observers=(TierContents,),
    required_conditions=_required_conditions,
    views=(View(_BEGIN_TRANSFERS, _show_tiers),),
    walk=_walk,
    refuse=(refuse_tiers,),
)
