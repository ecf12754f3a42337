"""Prefix reuse: lookups of texts, what they must find, and the order of evictions."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product, starmap
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from zlib import crc32

from pytest_roseinfer.capabilities import answers, operation
from pytest_roseinfer.capabilities.capability import (
    Across,
    Capability,
    Look,
    Observer,
    Prelude,
    Ranks,
    Run,
    Traits,
    View,
    Walk,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.kept_blocks import KeptTexts, evictions, note_of
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Observation,
    invariant,
)
from pytest_roseinfer.capabilities.operation import asked
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill, floods, start
from pytest_roseinfer.oracle.pages import State, first_live
from pytest_roseinfer.oracle.texts import same_block_behind_another
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import Said


@dataclass(frozen=True)
class PrefixTraits(Traits):
    """The blocks that sequences share, what is found of a text, and the order of evictions."""

    shares: Literal["exact", "equal prefixes", "none"] = "exact"
    """Blocks that sequences share: those that ``fork`` shares, ``"exact"``; with ``use_tokens``,
    ``table`` and ``ledger``, any whose tokens and all before them are equal, ``"equal prefixes"``;
    or ``"none"``."""
    granularity: Literal["block", "token"] = "block"
    """Unit in which ``match_prefix`` finds tokens: whole blocks, or single tokens."""
    recomputed_tokens: Literal[0, 1] = 0
    """Last tokens of a text that are never found, since the model computes them again."""
    finds: Literal["all", "some"] = "all"
    """Part of the stored tokens of a text that ``match_prefix`` must find. With ``use_hash`` it may
    find less where a hash that it needs is also that of another thing, which a step hashed, or
    where it hashes fewer things than it looks for."""
    evicts: Literal["any", "least recent"] = "any"
    """Block that is evicted first among those that a ledger has as ``cached``. ``"least recent"``
    is the one that its last holder released longest ago, and of those that one sequence released
    at once, the one nearest to its end. A lookup does not renew a block; a sequence that begins
    with it does, when it releases it. Free blocks that are not ``cached`` may go before and after.
    Needs ``use_tokens``, ``table`` and ``ledger``."""
    keeps_prefix: bool = False
    """True if what ``begin_with`` found can be found as long as the sequence holds it. Where the
    sequence writes into such a block, or cuts one, it gets a copy as if others held the block, and
    there must be room for that."""


class PrefixMethods:
    """The methods of prefix reuse."""

    prefixes: ClassVar[PrefixTraits] = PrefixTraits()
    """The blocks that sequences share, what is found of a text, and the order of evictions."""

    @optional
    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Receive the token ids of the next write, or of the next ``reserve``.

        A list for each sequence, in the order of the write, padding left out; ``[5, 3]`` where two
        tokens are appended. Sequences whose first token ids are equal store the same for them. A
        fork begins with the token ids of its parent.
        """

    @optional
    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """Count the first tokens of a text that a sequence could begin with, since they are stored.

        The lookup holds nothing and changes nothing.
        """

    @optional
    def look_up(self, token_ids: Sequence[int]) -> object:
        """Look up a text for a sequence that begins later; return what ``begin_with`` gets.

        The lookup holds nothing: until then, others may take what was found.
        """

    @optional
    def begin_with(self, prefix: Any, seq: int) -> int:
        """Begin ``seq`` with what was found and is still there; return how many tokens that is."""

    @optional
    def use_namespaces(self, namespaces: Sequence[int]) -> None:
        """Receive the namespace of each row of the next write, or of the text that is looked up.

        It is passed before ``use_tokens``, or before the lookup. A namespace is an adapter of the
        model's weights, say, or a salt. Equal texts in two namespaces store different things, and
        one is not found where the other is looked up. A fork lies in the namespace of its parent.
        """

    @optional
    def use_hash(self, hash_function: Callable[[object], int]) -> None:
        """Hash with this function from now on; it is called right after ``make``.

        The function returns one of four values, so that different things often have one hash.
        """


@dataclass(slots=True)
class LookedUp(State):
    """The sequences that are to begin with what a lookup found."""

    any_of: ClassVar = ("look_up",)

    promised: dict[int, int] = field(default_factory=dict)
    """How many tokens each of them was looked up for."""


def looked_up(oracle: Oracle) -> dict[int, int]:
    """Return the sequences that are to begin with what was found, and for how many tokens."""
    return oracle.begun(LookedUp).promised


class FoundPages(State):
    """The pages that sequences began with, where a cache keeps what was found as it is."""

    where: ClassVar = {"prefixes.keeps_prefix": True}

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        """How many first pages of each sequence were found, and are still those."""

    def begin(self, seq: int, pages: int) -> None:
        """Note that a sequence began with so many pages."""
        self._counts[seq] = pages

    def forked(self, parent: int, child: int, shared: int) -> None:
        self._counts[child] = min(shared, self._counts[parent])

    def cut(self, seq: int, pages: int) -> None:
        self._counts[seq] = min(pages, self._counts[seq])

    def gave_up(self, seq: int) -> None:
        del self._counts[seq]

    def keeps(self, seq: int, at: int) -> bool:
        return at < self._counts[seq]


@operation.register("LookUp")
class LookUp(operation.Operation):
    """Look up a text for a sequence that begins later."""

    seq: int
    count: int

    needs = frozenset({"use_tokens", "look_up", "begin_with"})

    def words(self) -> str:
        tokens = some(self.count, "token")
        return f"look up the first {tokens} of what sequence {self.seq} will say"

    def begins(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        looked_up(oracle)[self.seq] = self.count

    def said(self, oracle: operation.Oracle) -> list[operation.Said]:
        return oracle.said([(self.seq, self.count)])

    def drive(self, cache: operation.Driven) -> None:
        cache.looked_up[self.seq] = cache.adapter.look_up(cache.said[0].tokens)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> LookUp:
            seq = writer.beginner()
            return cls(seq, writer.count(seq))

        if len(writer.oracle.sequences) < operation.MOST_SEQUENCES:
            yield operation.Move(90, 3, drawn)


@operation.register("BeginWith")
class BeginWith(operation.Operation):
    """Begin a sequence with what a lookup found, as far as it is still there."""

    seq: int

    needs = frozenset({"use_tokens", "look_up", "begin_with"})

    def words(self) -> str:
        return f"begin sequence {self.seq} with what was found for it"

    def changed(self) -> list[int]:
        return [self.seq]

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in looked_up(oracle)

    def change(self, oracle: operation.Oracle) -> None:
        del looked_up(oracle)[self.seq]
        oracle.sequences[self.seq] = []

    def drive(self, cache: operation.Driven) -> object:
        return cache.adapter.begin_with(cache.looked_up.pop(self.seq), self.seq)

    def settle(self, oracle: operation.Oracle, answer: object) -> str | None:
        """Have the sequence say as much of its text as the cache took."""
        if not isinstance(answer, int) or answer < 0:
            return f"begin_with() returned {answer!r}, and must say how many tokens it took"
        rows = [(self.seq, answer)]
        oracle.append(rows, oracle.new_tokens(rows))
        if state := oracle.state(FoundPages):
            state.begin(self.seq, len(oracle.sequences[self.seq]))
        return None

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if names := looked_up(writer.oracle):
            yield operation.Move(100, 3, lambda: cls(writer.pick([*names])))
            yield from floods(writer)


@invariant(rank=31, needs=("match_prefix", "use_tokens", "table", "ledger"))
def lookups(seen: Observation) -> Finding | None:
    """A lookup must find the stored tokens of a text, and no others."""
    for (text, count), found in seen.after.matches.items():
        namespace = seen.oracle.texts.namespace(text) if seen.oracle.texts else 0
        within = f" (namespace {namespace})" if namespace else ""
        asked = f"match_prefix() of text {text}{within}, {count} tokens long,"
        if isinstance(found, Exception):
            return Finding(f"{asked} raised {type(found).__name__}: {found}", cause=found)
        most = _stored(seen, text, count)
        if found > most:
            what = f"{asked} found {found}, and only {most} of them may be found now"
            return Finding(what + _taken_for_it(seen, text, most))
        excused = seen.declared.prefixes.finds == "some" or (text, count) in seen.after.collided
        if found < most and not excused:
            return Finding(f"{asked} found {found}, though {most} of them are stored")
        if seen.declared.prefixes.granularity == "block" and found % seen.spec.block_size:
            return Finding(f"{asked} found {found}, which are no whole blocks")
    return None


def _taken_for_it(seen: Observation, text: int, stored: int) -> str:
    """Say which block says what a text says in the first block that is not stored."""
    size = seen.spec.block_size
    assert seen.oracle.texts
    begin = stored - stored % size
    wanted = seen.oracle.text_tokens(text, begin + size)[begin:]
    every = (
        same_block_behind_another(seen.oracle.texts, wanted, contents, seen.seen)
        for contents in note_of(seen).contents.values()
    )
    return next(filter(None, every), "")


def _stored(seen: Observation, text: int, count: int) -> int:
    """Count the first tokens of a text that blocks hold, as many as a lookup may find."""
    size = seen.spec.block_size
    wanted = seen.oracle.text_tokens(text, count - seen.declared.prefixes.recomputed_tokens)
    blocks = [tuple(wanted[at : at + size]) for at in range(0, len(wanted), size)]
    full = len(wanted) // size
    while full and not all(_holds(seen, layer, blocks[:full]) for layer in note_of(seen).contents):
        full -= 1
    stored = full * size
    if seen.declared.prefixes.granularity == "token" and full < len(blocks):
        every = (held for contents in note_of(seen).contents.values() for held in contents.values())
        stored += max((_common(blocks[full], held) for held in every), default=0)
    return stored


def _holds(seen: Observation, layer: int, blocks: Sequence[tuple[int, ...]]) -> bool:
    """Return True if a layer has all that is live there once a sequence has these full blocks."""
    size = seen.spec.block_size
    window = seen.spec.windows[layer] if seen.spec.windows else None
    live = blocks[first_live(window, len(blocks) * size) // size :]
    return {tuple(held) for held in note_of(seen).contents[layer].values()}.issuperset(live)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that two blocks have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# A hash function whose values collide all the time, for caches that take one.


_VALUES = 4


@dataclass(slots=True)
class LookupHashes:
    """The hashes that one lookup needs."""

    things: set[str] = field(default_factory=set)
    collided: bool = False
    """Another thing got one of its hashes before, in a step."""

    def may_miss(self, blocks: int) -> bool:
        """Return True if a lookup that found so many blocks may have missed one by its hash.

        A cache that hashes less than it looks for remembers hashes, and nobody knows which.
        """
        return self.collided or len(self.things) <= blocks


class ToldTexts(Observer):
    """Tells a cache the texts that come next."""

    any_of = ("use_tokens", "use_namespaces")

    def driving(self, step: operation.Operation, said: Sequence[Said]) -> None:
        if said:
            tell(self.run.adapter, said, written=bool(step.rows()))


class Collisions(Observer):
    """Hashes to one of four values, and counts different things that get the same one."""

    any_of = ("use_hash",)
    conditions: ClassVar = {
        "hash_collision": "The hash function returns one value for two different things, of which "
        "a step hashed one. Required of a cache that defines ``use_hash``."
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._seen = 0
        self._hashed: dict[int, set[str]] = defaultdict(set)
        """The things that steps hashed, by value. A lookup stores nothing under its hashes."""
        self._lookup: LookupHashes | None = None
        run.adapter.use_hash(self.hashed)

    def after(self, seen: Observation) -> Mapping[str, int]:  # noqa: ARG002
        times, self._seen = self._seen, 0
        return {"hash_collision": times}

    def hashed(self, thing: object) -> int:
        said = repr(thing)
        value = crc32(said.encode()) % _VALUES
        alike = self._hashed[value]
        collides = bool(alike - {said})
        self._seen += collides
        if self._lookup:
            self._lookup.things.add(said)
            self._lookup.collided |= collides
        else:
            alike.add(said)
        return value

    @contextmanager
    def lookup(self) -> Iterator[LookupHashes]:
        """Record what is hashed inside as a lookup's."""
        self._lookup = LookupHashes()
        try:
            yield self._lookup
        finally:
            self._lookup = None

    @property
    def any(self) -> bool:
        """True once two things that steps hashed got the same value."""
        return any(len(alike) > 1 for alike in self._hashed.values())


# What a cache is told of texts, and what it finds of each.


def tell(adapter: Any, said: Sequence[Said], *, written: bool) -> None:
    """Tell a cache what comes next: rows of a write, or a text that is looked up."""
    if "use_namespaces" in adapter.abilities:
        adapter.use_namespaces([each.namespace for each in said])
    if written and "use_tokens" in adapter.abilities:
        adapter.use_tokens([each.tokens for each in said])


def _look_up_all(run: Run, look: Look) -> Mapping[str, Any]:
    """Look up every text, a little longer than any sequence and up to a block's edge."""
    adapter, oracle, collisions = run.adapter, run.oracle, run.observer(Collisions)
    size, texts = oracle.block_size, oracle.texts
    if not (look.reads and texts):
        return {}
    longest = max(map(oracle.length, oracle.sequences), default=0)
    counts = {longest + 1, -(-longest // size) * size or size}

    def find(text: Said) -> int:
        tell(adapter, [text], written=False)
        return answers.count(
            f"match_prefix({list(text.tokens)})", adapter.match_prefix(text.tokens)
        )

    matches: dict[tuple[int, int], int | Exception] = {}
    collided = set()
    for key in product(range(len(texts.drawn)), counts):
        text, count = key
        with collisions.lookup() if collisions else nullcontext() as hashes:
            found = matches[key] = asked(find, texts.said(text, 0, count))
        if hashes and isinstance(found, int) and hashes.may_miss(found // size):
            collided.add(key)
    return {"matches": matches, "collided": frozenset(collided)}


def refuse_sharing(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for traits that cannot be judged without methods that are not offered."""
    lacking = {"use_tokens", "table", "ledger"} - adapter.abilities
    for trait, needing in (("shares", "equal prefixes"), ("evicts", "least recent")):
        if lacking and getattr(adapter.prefixes, trait) == needing:
            raise TypeError(
                f"{adapter.__name__}.prefixes.{trait} is {needing!r}, which cannot be judged "
                f"without {' and '.join(sorted(lacking))}: define "
                f"{'it' if len(lacking) == 1 else 'them'}"
            )


class SharedByPrefix(Observer):
    """Has the oracle share what the cache shares, once that was found right."""

    any_of = ("prefixes.shares=equal prefixes",)

    def after(self, seen: Observation) -> Mapping[str, int]:
        seen.oracle.adopt_sharing(seen.after.tables_of)
        return {}


def _begin_with(ranks: Ranks, found: list[Any], seq: int) -> Any:
    counts = ranks.each(lambda at, cache: cache.begin_with(found[at], seq))
    return ranks.agreed("begin_with", counts)


def _walk(at: Walk) -> Iterator[operation.Operation]:
    size = at.oracle.block_size
    # All blocks that are left are needed, so that what is kept for later texts is evicted.
    if at.oracle.texts and (free := at.oracle.pages_free()):
        counts = [blocks * size for blocks in (free, free + 1)]
        yield from starmap(Prefill, product(at.names, counts))
    if at.oracle.texts and (at.oracle.sequences or at.oracle.lives):
        yield from starmap(LookUp, product(at.names, (size, 2 * size)))
    yield from map(BeginWith, looked_up(at.oracle))


# First steps of histories.


def leave_a_text(writer: operation.Writer) -> None:
    """Open with a text that was stored and given up, and perhaps comes again, or with none."""
    # Inside of two blocks there are more places where another text may go another way. Where
    # sequences fork, the room is for what they share.
    comes_again = writer.finds_prompts and "fork" not in writer.adapter.abilities
    blocks = writer.pick((1, 0, 2, 2) if comes_again else (1, 0, 2))
    tokens = min(blocks, writer.oracle.capacity) * writer.oracle.block_size
    if tokens and "free" in writer.adapter.abilities:
        start(writer, tokens)
        writer.take(Free(*writer.live))
        if LookUp.needs <= writer.adapter.abilities and writer.between(0, 1):
            writer.take(LookUp(writer.beginner(), tokens))
        elif comes_again:
            _come_again(writer)


def _come_again(writer: operation.Writer) -> None:
    """Begin with what was left, if there is room; or take all blocks but one; or do nothing."""
    which = writer.between(0, 3)
    if which > 1:
        seq = writer.beginner()
        step = Prefill(seq, writer.count(seq), writer.layout())
        if step.fits(writer.oracle):
            writer.take(step)
    elif which and (others := writer.oracle.pages_free() - 1):
        (seq,) = writer.fresh(1)
        writer.take(Prefill(seq, others * writer.oracle.block_size, writer.layout()))


def may_cut_what_is_found(writer: operation.Writer) -> bool:
    """Return True if a cache may find a block of which its holders may keep a part."""
    parts, needed = writer.oracle.block_size > 1, Truncate.needs | Free.needs
    return writer.finds_prompts and parts and needed <= writer.adapter.abilities


def cut_what_is_found(writer: operation.Writer) -> None:
    """Open with two who hold a full block: one is cut in it and writes, the other lets go of it.

    Who then says what it held must not find what was written. Drawn one by one, these steps hardly
    ever follow each other.
    """
    operation.take_while_they_fit(writer, _cut_what_is_found(writer))


def _cut_what_is_found(writer: operation.Writer) -> Iterator[operation.Operation]:
    size, recomputed = writer.oracle.block_size, writer.adapter.prefixes.recomputed_tokens
    full = writer.pick((1, 2) if writer.oracle.capacity > 3 else (1,)) * size
    (first,) = writer.fresh(1)
    yield Prefill(first, full + recomputed, writer.layout())
    second = writer.repeater(full + recomputed)
    yield Prefill(second, full + recomputed, writer.layout())
    cut, other = writer.shuffled((first, second))
    yield Truncate(cut, writer.between(full - size + 1, full - 1))
    write, let_go = Append((cut,), writer.layout()), Free(other)
    yield from writer.pick(((let_go, write), (let_go, write), (write, let_go)))
    yield Prefill(writer.repeater(full + recomputed), full + recomputed, writer.layout())


def may_evict_in_order(writer: operation.Writer) -> bool:
    """Return True if a cache says which of the blocks that it keeps it gives to others first."""
    abilities, needed = writer.adapter.abilities, Free.needs | Prefill.needs
    return writer.finds_prompts and writer.adapter.prefixes.evicts != "any" and needed <= abilities


def let_two_texts_go(writer: operation.Writer) -> None:
    """Open with two texts that part in their first block, let go of them, and need one block more.

    One of the two blocks must be given to others then, and it is known which.
    """
    operation.take_while_they_fit(writer, _let_two_texts_go(writer))


def _let_two_texts_go(writer: operation.Writer) -> Iterator[operation.Operation]:
    size, recomputed = writer.oracle.block_size, writer.adapter.prefixes.recomputed_tokens
    (first,) = writer.fresh(1)
    yield Prefill(first, size + recomputed, writer.layout())
    second = writer.parting(size)
    if second is None:
        return
    yield Prefill(second, size + recomputed, writer.layout())
    for seq in writer.shuffled((first, second)):
        yield Free(seq)
    (third,) = writer.fresh(1)
    if others := writer.oracle.pages_free() - 1:
        yield Prefill(third, others * size, writer.layout())


def _open(writer: operation.Writer) -> None:
    """Open with a text that is found again, in one of three ways."""
    if may_cut_what_is_found(writer) and writer.pick((False,) * 7 + (True,)):
        cut_what_is_found(writer)
    elif may_evict_in_order(writer) and writer.pick((False,) * 3 + (True,)):
        let_two_texts_go(writer)
    else:
        leave_a_text(writer)


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
        "use_tokens": Across.SAME,
        "match_prefix": Across.SAME,
        "use_hash": Across.SAME,
        "look_up": Across.EACH,
        "begin_with": _begin_with,
    },
    states=(FoundPages, LookedUp),
    endings=lambda oracle: map(BeginWith, [*looked_up(oracle)]),
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
    ),
    refuse=(refuse_sharing,),
    observers=(ToldTexts, Collisions, KeptTexts, SharedByPrefix),
    views=(View(("match_prefix",), _look_up_all),),
)
