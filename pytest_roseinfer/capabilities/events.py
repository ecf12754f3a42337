"""Events of stored and removed blocks, by which others know what a cache has."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pytest_roseinfer.capabilities.cache_data import AllBlocksCleared, BlockRemoved, BlockStored
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    RankPolicy,
    Run,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Observation,
    describe_error,
    invariant,
)
from pytest_roseinfer.capabilities.operation import Operation, add_while_fitting, call_or_error
from pytest_roseinfer.capabilities.return_values import are_tokens, elements, raise_invalid
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.capabilities.cache_data import Event
    from pytest_roseinfer.capabilities.observation import Snapshot
    from pytest_roseinfer.capabilities.operation import Writer


class EventMethods:
    """Adapter method that returns events."""

    @optional
    def events(self) -> Sequence[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Return the events since the last call, in their order. It is called after every step.

        A reader of all events must find as many whole blocks of each text as ``match_prefix``. It
        may get a ``BlockStored`` of a block twice, and the block is gone after one
        ``BlockRemoved``: send that when its last copy is.
        """


class StoredBlock(NamedTuple):
    """A block as the events describe it."""

    parent: Hashable | None
    token_ids: tuple[int, ...]
    namespace: int

    def describe(self) -> str:
        place = "first" if self.parent is None else f"after block {self.parent!r}"
        within = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{place}{within}, with token ids {list(self.token_ids)}"


@dataclass(frozen=True)
class EventReplay:
    """The blocks that are stored after all events so far, as a reader of them knows."""

    block_size: int
    blocks: Mapping[Hashable, StoredBlock] = field(default_factory=dict)
    """Stored blocks by hash."""
    problem: str = ""
    """Fault of the latest event; empty unless no reader can follow it."""

    def after(self, events: Sequence[Event]) -> EventReplay:
        """Return the replay after further events, up to the first that is wrong."""
        blocks, problem = dict(self.blocks), ""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    blocks.pop(block_hash, None)
            elif problem := self._store(blocks, event):
                break
        return EventReplay(self.block_size, blocks, problem)

    def _store(self, blocks: dict[Hashable, StoredBlock], event: BlockStored) -> str:
        """Add the blocks of an event; return a problem, or an empty string."""
        size, parent = self.block_size, event.parent_block_hash
        hashes, token_ids = event.block_hashes, event.token_ids
        if len(token_ids) != size * len(hashes):
            return (
                f"it has {format_count(len(token_ids), 'token id')} for "
                f"{format_count(len(hashes), 'block')} of {size}"
            )
        for at, block_hash in enumerate(hashes):
            own = tuple(token_ids[at * size : (at + 1) * size])
            block = StoredBlock(parent, own, event.namespace)
            known = blocks.setdefault(block_hash, block)
            if known != block:
                return (
                    f"block {block_hash!r} comes {block.describe()}, and is stored already: it "
                    f"came {known.describe()}"
                )
            parent = block_hash
        return ""

    @cached_property
    def hashes(self) -> Mapping[StoredBlock, set[Hashable]]:
        """Hashes of the stored blocks, by their contents."""
        hashes = defaultdict[StoredBlock, set[Hashable]](set)
        for block_hash, block in self.blocks.items():
            hashes[block].add(block_hash)
        return hashes

    def match_prefix(self, token_ids: Sequence[int], namespace: int) -> int:
        """Count the first tokens of a text that are stored, in whole blocks."""
        size = self.block_size
        parents: set[Hashable | None] = {None}
        for end in range(size, len(token_ids) + 1, size):
            own = tuple(token_ids[end - size : end])
            blocks = (StoredBlock(parent, own, namespace) for parent in parents)
            parents = {each for block in blocks for each in self.hashes.get(block, ())}
            if not parents:
                return end - size
        return len(token_ids) // size * size


class Events(Observer):
    """Replay of the events, and counter of blocks that are stored again."""

    any_of = ("events",)
    conditions: ClassVar = {
        "block_stored_again": "An event stores a block that earlier ones stored and removed, or "
        "cleared. Required of a cache that defines ``events``, ``prefill`` and ``free``.",
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._replay = EventReplay(run.spec.block_size)
        self._removed: set[Hashable] = set()
        """Hashes of blocks that were stored and are not stored now."""

    def notes(self, after: Snapshot) -> EventReplay:
        events = () if isinstance(after.events, Exception) else after.events
        return self._replay.after(events)

    def after(self, observation: Observation) -> Mapping[str, int]:
        before, self._replay = self._replay, observation.notes[Events]
        stored = self._replay.blocks.keys()
        again = self._removed & stored
        self._removed = (self._removed | before.blocks.keys()) - stored
        return {"block_stored_again": len(again)}


@invariant(rank=33, needs=("events",))
def events(observation: Observation) -> Finding | None:
    """A reader of the events must find the same prefixes as lookups do."""
    if isinstance(error := observation.after.events, Exception):
        return Finding(f"events() raised {describe_error(error)}", cause=error)
    replay: EventReplay = observation.notes[Events]
    if replay.problem:
        return Finding(f"BlockStored, returned by events(): {replay.problem}", kind="wrong")
    size, texts = observation.spec.block_size, observation.oracle.texts
    for (text, count), hit in observation.after.matches.items():
        if isinstance(hit, Exception) or not texts:
            continue
        usable = texts.text_slice(text, 0, count - observation.declared.prefixes.recomputed_tokens)
        known, found = replay.match_prefix(usable.tokens, usable.namespace), hit // size * size
        if known < found or (known > found and (text, count) not in observation.after.collided):
            begin = min(known, found)
            within = f" (namespace {usable.namespace})" if usable.namespace else ""
            return Finding(
                f"by its events, the cache stores {known} tokens of text {text}{within}, and "
                f"match_prefix() finds {found} in whole blocks; the first block that differs has "
                f"token ids {usable.tokens[begin : begin + size]}",
                kind="unknown block" if known < found else "stale block",
            )
    return None


def _show_events(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    return {"events": call_or_error(_read_events, run)} if look.reads else {}


def _read_events(run: Run) -> list[Event]:
    value: Any = run.adapter.events()
    listed = elements(value)
    if listed is None or not all(map(_is_event, listed)):
        right = "a list of BlockStored, BlockRemoved and AllBlocksCleared, with lists of hashes"
        raise_invalid("events()", value, right)
    return listed


def _is_event(event: Any) -> bool:
    if isinstance(event, BlockStored):
        each = (event.parent_block_hash, *(elements(event.block_hashes) or [[]]))
        return all(isinstance(one, Hashable) for one in each) and are_tokens(event.token_ids)
    if isinstance(event, BlockRemoved):
        return all(isinstance(one, Hashable) for one in elements(event.block_hashes) or [[]])
    return isinstance(event, AllBlocksCleared)


def refuse_unknown_contents(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a cache whose events do not tell which texts a block is of."""
    if "events" not in adapter.abilities:
        return
    for other, offered in (("windows", adapter.windows.groups), ("key_parts", adapter.key_parts)):
        if offered:
            raise TypeError(
                f"{adapter.__name__} defines events, which cannot be judged with {other} yet: "
                "leave out one of them"
            )


# Prelude


def evict_and_store_again(writer: Writer) -> None:
    """Open with one write that evicts a text's block and fills another with the same tokens.

    In either order: the text is removed and stored again, or is stored all the time. Or add no
    steps.
    """
    able = Prefill.needs | Free.needs <= writer.adapter.abilities
    if able and writer.oracle.block_size > 1 and writer.pick((False, False, True)):
        add_while_fitting(writer, _evict_and_store_again(writer))


def _evict_and_store_again(writer: Writer) -> Iterator[Operation]:
    size, (first,) = writer.oracle.block_size, writer.fresh(1)
    whole = size + writer.adapter.prefixes.recomputed_tokens
    yield Prefill(first, whole, writer.layout())
    text = writer.oracle.text_of(first)
    yield Free(first)
    second = writer.name_with_prefix(whole, text)
    yield Prefill(second, size - 1, writer.layout())
    third = writer.name_without_prefix(size)
    if third is None:
        return
    if others := writer.oracle.pages_free() - 1:
        yield Prefill(third, others * size, writer.layout())
        yield Append(tuple(writer.shuffle((second, third))), writer.layout())


EVENTS = Capability(
    methods=EventMethods,
    needs={"events": ("match_prefix", "use_tokens")},
    refuse=(refuse_unknown_contents,),
    preludes=(Prelude(("events",), 9, evict_and_store_again),),
    observers=(Events,),
    views=(View(("events",), _show_events),),
    invariants=(events,),
    sharded={"events": RankPolicy.SAME},
)
