"""Prefix reuse: lookups of texts, their expected results, and the eviction order."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product, starmap
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from zlib import crc32

from pytest_roseinfer.capabilities import operation, return_values
from pytest_roseinfer.capabilities.cached_blocks import (
    CachedBlocks,
    cached_blocks_note,
    evictions,
    needless_evictions,
)
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    RankPolicy,
    Ranks,
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
)
from pytest_roseinfer.capabilities.operation import call_or_error
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import (
    Append,
    AppendMany,
    Prefill,
    begin_sequence,
    draw_long_writes,
)
from pytest_roseinfer.oracle.pages import State, first_live
from pytest_roseinfer.oracle.texts import TextKey, explain_equal_block
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import TextSlice


@dataclass(frozen=True)
class PrefixTraits(Traits):
    """Shared blocks, results of lookups, and the eviction order."""

    shares: Literal["exact", "equal prefixes", "none"] = "exact"
    """Blocks that sequences share. ``"exact"``: those that ``fork`` shares. ``"equal prefixes"``:
    also blocks with equal tokens and equal prefixes; this needs ``use_tokens``, ``table`` and
    ``ledger``. ``"none"``: no blocks. Equal blocks may be merged when they are stored, or by a
    later step that is not refused."""
    granularity: Literal["block", "token"] = "block"
    """Unit of the lengths that ``match_prefix`` returns: whole blocks, or single tokens."""
    recomputed_tokens: Literal[0, 1] = 0
    """Last tokens of a text that are never found, since the model computes them again."""
    finds: Literal["all", "some"] = "all"
    """Part of the stored tokens of a text that ``match_prefix`` must find. With ``use_hash`` it may
    find fewer in two cases: a hash that it needs is also that of something else that a step hashed,
    or it hashes fewer things than the blocks that it looks up."""
    evicts: Literal["any", "least recent"] = "any"
    """Block that is evicted first among the ``cached`` ones of a ledger. ``"least recent"`` is the
    block whose last holder released it longest ago. If a sequence released several at once, the
    block nearest to its end goes first. A lookup does not renew a block; a sequence that begins
    with the block renews it by releasing it. Free blocks that are not ``cached`` may be reused
    before or after. Needs ``use_tokens``, ``table`` and ``ledger``."""
    evicts_when: Literal["any time", "needed"] = "any time"
    """Time at which a ``cached`` block may be evicted. With ``"needed"``, a write evicts only if it
    would need more blocks than are free and not cached without reusing any, and a refused step
    evicts none. Needs ``use_tokens``, ``table`` and ``ledger``."""
    keeps_prefix: bool = False
    """True if the blocks that a sequence got by ``begin_with`` can be found as long as it holds
    them. If the sequence writes into such a block, or truncates within it, the block is copied as
    if others held it; there must be room for the copy."""


class PrefixMethods:
    """Adapter methods for prefix reuse."""

    prefixes: ClassVar[PrefixTraits] = PrefixTraits()
    """Shared blocks, results of lookups, and the eviction order."""

    @optional
    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Receive the token ids of the next write, or of the next ``reserve``.

        A list for each sequence, in the order of the write, without padding; ``[5, 3]`` if two
        tokens are appended. Sequences with equal first token ids have equal keys and values for
        them. A fork begins with the token ids of its parent.
        """

    @optional
    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """Count the stored first tokens of a text, which a new sequence could reuse.

        The lookup holds no blocks and changes nothing.
        """

    @optional
    def look_up(self, token_ids: Sequence[int]) -> object:
        """Look up a text; a sequence that begins later passes the result to ``begin_with``.

        The lookup holds no blocks: until then, other sequences may take those that it found.
        """

    @optional
    def begin_with(self, prefix: Any, seq: int) -> int:
        """Begin ``seq`` with the found blocks that are still stored; return their token count."""

    @optional
    def use_namespaces(self, namespaces: Sequence[int]) -> None:
        """Receive the namespace of each row of the next write, or of the next lookup.

        It is called before ``use_tokens``, or before the lookup. A namespace is, for example, a
        LoRA adapter or a salt. Equal texts in two namespaces have different keys and values, and a
        lookup in one namespace must not find tokens of another. A fork has the namespace of its
        parent.
        """

    @optional
    def use_hash(self, hash_function: Callable[[object], int]) -> None:
        """Use this hash function from now on; called right after ``make``.

        The function returns one of four values, so that collisions are frequent.
        """


@dataclass(slots=True)
class PendingPrefixes(State):
    """Sequences that are to begin with the result of a lookup."""

    any_of: ClassVar = ("look_up",)

    pending_seqs: dict[int, int] = field(default_factory=dict)
    """Number of tokens that were looked up, by sequence."""


def pending_prefixes(oracle: Oracle) -> dict[int, int]:
    """Return the number of tokens looked up for each sequence that is to begin with the result."""
    return oracle.ensure_state(PendingPrefixes).pending_seqs


class PrefixPages(State):
    """Pages that sequences began with, for caches that keep them unchanged."""

    required_attributes: ClassVar = {"prefixes.keeps_prefix": True}

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        """Number of first pages of each sequence that a lookup found and that are still its own."""

    def begin(self, seq: int, pages: int) -> None:
        """Record that a sequence began with this number of pages."""
        self._counts[seq] = pages

    def on_fork(self, parent: int, child: int, shared: int) -> None:
        self._counts[child] = min(shared, self._counts[parent])

    def on_truncate(self, seq: int, pages: int) -> None:
        self._counts[seq] = min(pages, self._counts[seq])

    def on_release(self, seq: int) -> None:
        del self._counts[seq]

    def keeps(self, seq: int, at: int) -> bool:
        """Return True if a write to this page of a sequence must copy it."""
        return at < self._counts[seq]


@operation.register("LookUp")
class LookUp(operation.Operation):
    """Look up a text for a sequence that begins later."""

    seq: int
    count: int

    needs = frozenset({"use_tokens", "look_up", "begin_with"})

    def describe(self) -> str:
        tokens = format_count(self.count, "token")
        return f"look up the first {tokens} of the text of sequence {self.seq}"

    def new_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        pending_prefixes(oracle)[self.seq] = self.count

    def text_slices(self, oracle: operation.Oracle) -> list[operation.TextSlice]:
        return oracle.text_slices([(self.seq, self.count)])

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.lookup_handles[self.seq] = cache.adapter.look_up(cache.text_slices[0].tokens)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> LookUp:
            seq = writer.name_reusing_prefix()
            return cls(seq, writer.count(seq))

        if len(writer.oracle.sequences) < operation.MAX_SEQUENCES:
            yield operation.DrawOption(90, 3, draw_step)


@operation.register("BeginWith")
class BeginWith(operation.Operation):
    """Begin a sequence with the blocks that a lookup found, as far as they are still stored."""

    seq: int

    needs = frozenset({"use_tokens", "look_up", "begin_with"})

    def describe(self) -> str:
        return f"begin sequence {self.seq} with the result of its lookup"

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in pending_prefixes(oracle)

    def change(self, oracle: operation.Oracle) -> None:
        del pending_prefixes(oracle)[self.seq]
        oracle.sequences[self.seq] = []

    def drive(self, cache: operation.CacheUnderTest) -> object:
        return cache.adapter.begin_with(cache.lookup_handles.pop(self.seq), self.seq)

    def settle(self, oracle: operation.Oracle, answer: object) -> str | None:
        """Append as many tokens of its text to the sequence as the cache reused."""
        if not isinstance(answer, int) or answer < 0:
            return f"begin_with() returned {answer!r}; it must return the number of tokens reused"
        rows = [(self.seq, answer)]
        oracle.append(rows, oracle.new_tokens(rows))
        if state := oracle.state(PrefixPages):
            state.begin(self.seq, len(oracle.sequences[self.seq]))
        return None

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if names := pending_prefixes(writer.oracle):
            yield operation.DrawOption(100, 3, lambda: cls(writer.pick([*names])))
            yield from draw_long_writes(writer)


@invariant(rank=31, needs=("match_prefix", "use_tokens", "table", "ledger"))
def lookups(observation: Observation) -> Finding | None:
    """A lookup must find the stored tokens of a text, and no others."""
    for (text, count), hit in observation.after.matches.items():
        within = _describe_key(observation, text)
        lookup = f"match_prefix() of text {text}{within}, {count} tokens long,"
        if isinstance(hit, Exception):
            return Finding(f"{lookup} raised {describe_error(hit)}", cause=hit)
        max_hit = count_stored(observation, text, count)
        if hit > max_hit:
            problem = f"{lookup} found {hit}, and only {max_hit} of them may be found now"
            return Finding(problem + _describe_false_hit(observation, text, max_hit))
        excused = (
            observation.declared.prefixes.finds == "some"
            or (text, count) in observation.after.collided
        )
        if hit < max_hit and not excused:
            return Finding(f"{lookup} found {hit}, though {max_hit} of them are stored")
        if (
            observation.declared.prefixes.granularity == "block"
            and hit % observation.spec.block_size
        ):
            return Finding(f"{lookup} found {hit}, which are no whole blocks")
    return None


def _describe_key(observation: Observation, text: int) -> str:
    """Describe the key of a text, in brackets; empty for the first namespace."""
    key = observation.oracle.texts.key(text) if observation.oracle.texts else 0
    words = key.describe() if isinstance(key, TextKey) else f"namespace {key}" * bool(key)
    return f" ({words})" * bool(words)


def _describe_false_hit(observation: Observation, text: int, stored: int) -> str:
    """Describe a block with tokens equal to the first block of a text that is not stored."""
    size = observation.spec.block_size
    assert observation.oracle.texts
    begin = stored - stored % size
    requested = observation.oracle.text_tokens(text, begin + size)[begin:]
    every = (
        explain_equal_block(
            observation.oracle.texts, requested, contents, observation.first_writers
        )
        for contents in cached_blocks_note(observation).contents.values()
    )
    return next(filter(None, every), "")


def count_stored(
    observation: Observation, text: int, count: int, below: frozenset[tuple[int, ...]] = frozenset()
) -> int:
    """Count the first tokens of a text that are stored and that a lookup may find.

    The blocks of ``below`` are stored in other tiers.
    """
    size = observation.spec.block_size
    requested = observation.oracle.text_tokens(
        text, count - observation.declared.prefixes.recomputed_tokens
    )
    blocks = [tuple(requested[at : at + size]) for at in range(0, len(requested), size)]
    full = len(requested) // size
    while full and not all(
        _holds(observation, layer, blocks[:full], below)
        for layer in cached_blocks_note(observation).contents
    ):
        full -= 1
    stored = full * size
    if observation.declared.prefixes.granularity == "token" and full < len(blocks):
        every = (
            stored_tokens
            for contents in cached_blocks_note(observation).contents.values()
            for stored_tokens in contents.values()
        )
        stored += max((_common(blocks[full], stored_tokens) for stored_tokens in every), default=0)
    return stored


def _holds(
    observation: Observation,
    layer: int,
    blocks: Sequence[tuple[int, ...]],
    below: frozenset[tuple[int, ...]],
) -> bool:
    """Return True if a layer stores all blocks within the window of a sequence of these blocks."""
    size = observation.spec.block_size
    window = observation.spec.windows[layer] if observation.spec.windows else None
    live = blocks[first_live(window, len(blocks) * size) // size :]
    contents = cached_blocks_note(observation).contents[layer].values()
    return below.union(map(tuple, contents)).issuperset(live)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that two blocks have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# Hash collisions


_VALUES = 4
"""Number of different hashes, so that collisions are frequent."""


@dataclass(slots=True)
class LookupHashes:
    """Things that one lookup hashed."""

    hashed_texts: set[str] = field(default_factory=set)
    collided: bool = False
    """True if one of its hashes collides with that of another thing, which a step hashed."""

    def may_miss(self, blocks: int) -> bool:
        """Return True if a lookup that found this many blocks may have missed one by a collision.

        A cache that hashes fewer things than it looks up has remembered hashes, which may collide
        unnoticed.
        """
        return self.collided or len(self.hashed_texts) <= blocks


class TokenIdFeed(Observer):
    """Feeder of token ids and keys of texts, right before a write."""

    any_of = ("use_tokens", "use_namespaces")

    def before_call(self, step: operation.Operation, text_slices: Sequence[TextSlice]) -> None:
        if text_slices:
            pass_token_ids(self.run.adapter, text_slices, written=bool(step.rows()))


class Collisions(Observer):
    """Provider of a hash function with four values, and counter of its collisions."""

    any_of = ("use_hash",)
    conditions: ClassVar = {
        "hash_collision": "The hash function returns one value for two different things, one of "
        "which a step hashed. Required of a cache that defines ``use_hash``."
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._collisions = 0
        self._hashed: dict[int, set[str]] = defaultdict(set)
        """Things that steps hashed, by hash; lookups are left out, since they store nothing."""
        self._lookup: LookupHashes | None = None
        run.adapter.use_hash(self.record_hash)

    def after(self, observation: Observation) -> Mapping[str, int]:  # noqa: ARG002
        times, self._collisions = self._collisions, 0
        return {"hash_collision": times}

    def record_hash(self, thing: object) -> int:
        """Return the hash of a thing, and record collisions."""
        text = repr(thing)
        value = crc32(text.encode()) % _VALUES
        equal_hashes = self._hashed[value]
        collides = bool(equal_hashes - {text})
        self._collisions += collides
        if self._lookup:
            self._lookup.hashed_texts.add(text)
            self._lookup.collided |= collides
        else:
            equal_hashes.add(text)
        return value

    @contextmanager
    def lookup(self) -> Iterator[LookupHashes]:
        """Record the things that are hashed in this context as a lookup's."""
        self._lookup = LookupHashes()
        try:
            yield self._lookup
        finally:
            self._lookup = None

    @property
    def any(self) -> bool:
        """True once two things that steps hashed have collided."""
        return any(len(equal_hashes) > 1 for equal_hashes in self._hashed.values())


# Token ids and lookups


def pass_token_ids(adapter: Any, text_slices: Sequence[TextSlice], *, written: bool) -> None:
    """Pass the texts of the rows of a write, or the key of a lookup, to a cache."""
    if "use_text_keys" in adapter.abilities:
        adapter.use_text_keys([each.key for each in text_slices])
    if "use_namespaces" in adapter.abilities:
        adapter.use_namespaces([each.namespace for each in text_slices])
    if written and "use_tokens" in adapter.abilities:
        adapter.use_tokens([each.tokens for each in text_slices])


def look_up_all(run: Run, look: SnapshotScope, method: str) -> Mapping[str, Any]:
    """Look up every text, up to one token past the longest sequence, and up to a block boundary.

    This is done for the longest sequence of the present, and for the longest of all steps so far.
    The method is ``match_prefix`` or another one that counts the first tokens of a text.
    """
    adapter, oracle, collisions = run.adapter, run.oracle, run.observer(Collisions)
    size, texts = oracle.block_size, oracle.texts
    if not (look.reads and texts):
        return {}
    lengths = {max(map(oracle.length, oracle.sequences), default=0)}
    if cached_blocks := run.observer(CachedBlocks):
        lengths.add(max(*lengths, cached_blocks.longest))
    counts = {end for each in lengths for end in (each + 1, -(-each // size) * size or size)}

    def find(text: TextSlice) -> int:
        pass_token_ids(adapter, [text], written=False)
        found = getattr(adapter, method)(text.tokens)
        return return_values.count(f"{method}({list(text.tokens)})", found)

    matches: dict[tuple[int, int], int | Exception] = {}
    collided = set()
    for key in product(range(len(texts.initial_branches)), counts):
        text, count = key
        with collisions.lookup() if collisions else nullcontext() as hashes:
            hit = matches[key] = call_or_error(find, texts.text_slice(text, 0, count))
        if hashes and isinstance(hit, int) and hashes.may_miss(hit // size):
            collided.add(key)
    field_name = "matches" if method == "match_prefix" else "tier_matches"
    return {field_name: matches, "collided": frozenset(collided)}


def refuse_sharing(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for traits that need methods which the adapter does not define."""
    lacking = {"use_tokens", "table", "ledger"} - adapter.abilities
    for trait, needing in (
        ("shares", "equal prefixes"),
        ("evicts", "least recent"),
        ("evicts_when", "needed"),
    ):
        if lacking and getattr(adapter.prefixes, trait) == needing:
            raise TypeError(
                f"{adapter.__name__}.prefixes.{trait} is {needing!r}, which cannot be judged "
                f"without {' and '.join(sorted(lacking))}: define "
                f"{'it' if len(lacking) == 1 else 'them'}"
            )


class SharedByPrefix(Observer):
    """Observer that makes the oracle share the blocks that a cache shares, after its checks."""

    any_of = ("prefixes.shares=equal prefixes",)

    def after(self, observation: Observation) -> Mapping[str, int]:
        observation.oracle.adopt_sharing(observation.after.tables_of)
        return {}


def _begin_with(ranks: Ranks, handles: list[Any], seq: int) -> Any:
    counts = ranks.each(lambda at, cache: cache.begin_with(handles[at], seq))
    return ranks.require_equal_answers("begin_with", counts)


def _walk(at: Walk) -> Iterator[operation.Operation]:
    size = at.oracle.block_size
    # Prompts that need all free blocks, or one more, so that cached blocks are evicted.
    if at.oracle.texts and (free := at.oracle.pages_free()):
        counts = [blocks * size for blocks in (free, free + 1)]
        yield from starmap(Prefill, product(at.names, counts))
    if at.oracle.texts and (at.oracle.sequences or at.oracle.lives):
        yield from starmap(LookUp, product(at.names, (size, 2 * size)))
    yield from map(BeginWith, pending_prefixes(at.oracle))


# Preludes


_MAX_TEXTS = 4
"""Most texts of a history; of one more name than that, two have equal texts."""


def cache_one_text(writer: operation.Writer) -> None:
    """Open with a text that is stored and freed, and may be reused; or add no steps."""
    # Two blocks give more positions at which another text may diverge. If sequences can fork, the
    # room is left for the forks.
    comes_again = writer.reuses_prefixes and "fork" not in writer.adapter.abilities
    blocks = writer.pick((1, 0, 2, 2) if comes_again else (1, 0, 2))
    tokens = min(blocks, writer.oracle.capacity) * writer.oracle.block_size
    if tokens and "free" in writer.adapter.abilities:
        begin_sequence(writer, tokens)
        writer.take(Free(*writer.live))
        if LookUp.needs <= writer.adapter.abilities and writer.between(0, 1):
            writer.take(LookUp(writer.name_reusing_prefix(), tokens))
        elif comes_again:
            _reuse_cached_text(writer)


def _reuse_cached_text(writer: operation.Writer) -> None:
    """Begin a sequence with the cached text, or take all free blocks but one, or add no step."""
    which = writer.between(0, 3)
    if which > 1:
        seq = writer.name_reusing_prefix()
        step = Prefill(seq, writer.count(seq), writer.layout())
        if step.fits(writer.oracle):
            writer.take(step)
    elif which and (others := writer.oracle.pages_free() - 1):
        (seq,) = writer.fresh(1)
        writer.take(Prefill(seq, others * writer.oracle.block_size, writer.layout()))


def can_truncate_shared_block(writer: operation.Writer) -> bool:
    """Return True if sequences may share a block by prefix and be truncated within it."""
    parts, needed = writer.oracle.block_size > 1, Truncate.needs | Free.needs
    return writer.reuses_prefixes and parts and needed <= writer.adapter.abilities


def truncate_shared_block(writer: operation.Writer) -> Iterator[operation.Operation]:
    """Yield steps by which one of two sequences that share a block is truncated in it and appends.

    The other one is freed, before or after the append. A later lookup of the block's text must not
    find the overwritten block. Random steps rarely follow each other in this way.
    """
    size, recomputed = writer.oracle.block_size, writer.adapter.prefixes.recomputed_tokens
    full = writer.pick((1, 2) if writer.oracle.capacity > 3 else (1,)) * size
    (first,) = writer.fresh(1)
    yield Prefill(first, full + recomputed, writer.layout())
    second = writer.name_with_prefix(full + recomputed)
    yield Prefill(second, full + recomputed, writer.layout())
    cut, other = writer.shuffle((first, second))
    yield Truncate(cut, writer.between(full - size + 1, full - 1))
    write, free = Append((cut,), writer.layout()), Free(other)
    yield from writer.pick(((free, write), (free, write), (write, free)))
    yield Prefill(writer.name_with_prefix(full + recomputed), full + recomputed, writer.layout())


def can_check_eviction_order(writer: operation.Writer) -> bool:
    """Return True if a cache declares its eviction order, and texts differ in their first block."""
    oracle, abilities, needed = writer.oracle, writer.adapter.abilities, Free.needs | Prefill.needs
    if not writer.reuses_prefixes or writer.adapter.prefixes.evicts == "any":
        return False
    assert oracle.texts
    texts, last = range(len(oracle.texts.initial_branches)), oracle.block_size - 1
    differ = len({oracle.texts.owner(text, last) for text in texts}) > 1
    return differ and needed <= abilities


def free_two_texts(writer: operation.Writer) -> None:
    """Open with two texts that differ in their first block, free both, and need one block more.

    One of the two blocks must be evicted then, and the eviction order decides which. A lookup of
    the text that was freed first, or a prompt of it that is refused, must not change that.
    """
    oldest = _free_two_texts(writer)
    if oldest is None:
        return
    size, recomputed = writer.oracle.block_size, writer.adapter.prefixes.recomputed_tokens
    looks_up, refused = writer.pick(((False, True), (False, False), (True, True), (False, True)))
    if looks_up and LookUp.needs <= writer.adapter.abilities:
        tokens = size + recomputed
        writer.take(LookUp(writer.name_with_prefix(tokens, oldest), tokens))
    if refused and writer.oracle.judges_capacity:
        writer.take(_write_beyond_capacity(writer, writer.name_with_prefix(size, oldest)))
    others = writer.oracle.pages_free() - 1
    third = writer.name_without_prefix(size)
    if others and third is None and len(writer.live) + others <= operation.MAX_SEQUENCES:
        writer.take(Append(writer.fresh(others), writer.layout()))
    elif others:
        seq = writer.fresh(1)[0] if third is None else third
        writer.take(Prefill(seq, others * size, writer.layout()))


def _free_two_texts(writer: operation.Writer) -> int | None:
    """Store and free two texts; return the one freed first, or None if there was no room."""
    size, recomputed = writer.oracle.block_size, writer.adapter.prefixes.recomputed_tokens
    tokens = size + recomputed
    (first,) = writer.fresh(1)
    writer.take(Prefill(first, tokens, writer.layout()))
    second = writer.name_without_prefix(size)
    if second is None or not writer.oracle.fits([(second, tokens)]):
        return None
    writer.take(Prefill(second, tokens, writer.layout()))
    (third,) = writer.fresh(1)
    if size > 1 and writer.oracle.fits([(third, 1)]) and writer.between(0, 1):
        writer.take(Prefill(third, 1, writer.layout()))
    oldest, latest = writer.shuffle((first, second))
    text = writer.oracle.text_of(oldest)
    writer.take(Free(oldest))
    writer.take(Free(latest))
    return text


def _write_beyond_capacity(writer: operation.Writer, seq: int) -> operation.Operation:
    """Return the shortest write of whole blocks that cannot fit, even if it reuses all blocks.

    It is a prompt mostly, and else an append, for which a cache may make room in another way.
    """
    size, blocks = writer.oracle.block_size, 1
    while not writer.oracle.exceeds_capacity([(seq, blocks * size)]):
        blocks += 1
    if AppendMany.needs <= writer.adapter.abilities and not writer.between(0, 2):
        return AppendMany((seq,), (blocks * size,), writer.layout())
    return Prefill(seq, blocks * size, writer.layout())


def store_text_twice(writer: operation.Writer) -> Iterator[operation.Operation]:
    """Yield steps by which two sequences fill equal blocks in one write, and need other blocks.

    One of the two is freed before that, mostly. A cache may have merged the blocks by then, or may
    do so later. If all texts are equal, or all differ, open with one of them.
    """
    size = writer.oracle.block_size
    first, *others = writer.fresh(_MAX_TEXTS + 1)
    blocks = {seq: _first_block(writer.oracle, seq) for seq in (first, *others)}
    second = next((seq for seq in others if blocks[seq] == blocks[first]), None)
    third = next((seq for seq in others if blocks[seq] != blocks[first]), None)
    if second is None or third is None:
        cache_one_text(writer)
        return
    for seq in (first, second):
        if size > 1:
            yield Prefill(seq, size - 1, writer.layout())
    yield Append((first, second), writer.layout())
    if freed := writer.pick(([first], [first], [first], [second], [])):
        yield Free(*freed)
    if free := writer.oracle.pages_free():
        yield Prefill(third, free * size, writer.layout())


def _first_block(oracle: Oracle, seq: int) -> list[int]:
    return oracle.text_tokens(oracle.text_of(seq), oracle.block_size)


def _open(writer: operation.Writer) -> None:
    """Open with one of four preludes that reuse a text, unless another one has begun sequences."""
    if writer.live:
        return
    can_store_twice = writer.reuses_prefixes and Free.needs <= writer.adapter.abilities
    if can_truncate_shared_block(writer) and writer.pick((False,) * 7 + (True,)):
        operation.add_while_fitting(writer, truncate_shared_block(writer))
    elif can_check_eviction_order(writer) and writer.between(0, 1):
        free_two_texts(writer)
    elif can_store_twice and writer.pick((False,) * 3 + (True,)):
        operation.add_while_fitting(writer, store_text_twice(writer))
    else:
        cache_one_text(writer)


PREFIXES = Capability(
    methods=PrefixMethods,
    preludes=(Prelude(("use_tokens",), 10, _open),),
    renamed={
        "texts": "use_tokens(token_ids)",
        "matched": "match_prefix(token_ids)",
        "namespaces": "use_namespaces(namespaces)",
        "sharing": "prefixes = PrefixTraits(shares=...)",
        "match_granularity": "prefixes = PrefixTraits(granularity=...)",
        "match_leaves": "prefixes = PrefixTraits(recomputed_tokens=...)",
        "match_finds": "prefixes = PrefixTraits(finds=...)",
        "evicts": "prefixes = PrefixTraits(evicts=...)",
        "keeps_found": "prefixes = PrefixTraits(keeps_prefix=...)",
    },
    walk=_walk,
    sharded={
        "use_tokens": RankPolicy.SAME,
        "match_prefix": RankPolicy.SAME,
        "use_hash": RankPolicy.SAME,
        "look_up": RankPolicy.EACH,
        "begin_with": _begin_with,
    },
    states=(PrefixPages, PendingPrefixes),
    finishing_steps=lambda oracle: map(BeginWith, [*pending_prefixes(oracle)]),
    needs={
        "match_prefix": ("use_tokens",),
        "look_up": ("begin_with", "use_tokens"),
        "begin_with": ("look_up",),
        "use_namespaces": ("use_tokens",),
    },
    operations=(
        LookUp,
        BeginWith,
    ),
    invariants=(
        lookups,
        evictions,
        needless_evictions,
    ),
    refuse=(refuse_sharing,),
    observers=(TokenIdFeed, Collisions, CachedBlocks, SharedByPrefix),
    views=(View(("match_prefix",), partial(look_up_all, method="match_prefix")),),
)
