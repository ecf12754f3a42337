"""Runs a history on a cache and its oracle side by side, checking everything after each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.adapter import KVCacheAdapter, abilities
from pytest_roseinfer.bad_calls import check_bad_calls
from pytest_roseinfer.bookkeeping import check_conditions, check_switches, conditions_met
from pytest_roseinfer.divergence import Divergence, describe_mismatch
from pytest_roseinfer.history import (
    AppendMany,
    AppendPadded,
    Copy,
    Fill,
    Fork,
    Free,
    History,
    Operation,
    Prefill,
    Reserve,
    SetOptions,
    apply_to_oracle,
    is_write,
    tokens_of,
)
from pytest_roseinfer.model import Oracle, padding_token
from pytest_roseinfer.payload import Payload, as_bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

    from pytest_roseinfer.history import Write

_Slot = tuple[int, int]
"""Block and position within it."""


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same ``[layers, tokens, heads, head_dim]`` values with other strides or dtype.

    ``apart``, where keys and values differ, is none of one tensor.
    """
    if layout == "fused":  # one third of a wider tensor, as a qkv projection leaves it
        wide = tensor.new_empty((*tensor.shape[:2], 3, *tensor.shape[2:]))
        wide[:, :, 1] = tensor
        return wide[:, :, 1]
    if layout == "transposed":  # [heads, tokens] in memory, as a prompt's keys are
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":  # every other element of the last dimension
        wide = tensor.new_empty((*tensor.shape, 2))
        wide[..., 1] = tensor
        return wide[..., 1]
    if layout == "wider":  # a dtype the cache must convert from, losing nothing
        return tensor.float()
    return tensor.clone()


@dataclass(slots=True)
class _Reservation:
    """Room made for tokens that are not written yet."""

    handle: object
    step: Reserve
    tokens: list[int]
    options: Mapping[str, Any]
    """The switches when it was planned."""


@dataclass(slots=True)
class _Before:
    """What stood in the cache before a step."""

    arena: tuple[torch.Tensor, torch.Tensor] | None
    owners: list[Counter[int]]
    books: object
    counts: Counter[str]
    conditions: Counter[str]
    """What the rows of the step are to find."""


class Machine:
    """One cache under test, its oracle, and the checks between them."""

    def __init__(self, adapter_type: type[KVCacheAdapter], history: History) -> None:
        self.history = history
        self.spec = history.spec
        self.can = abilities(adapter_type)
        self.oracle = Oracle(self.spec.block_size, self.spec.num_blocks, adapter_type.fork_shares)
        self.payload = Payload(self.spec, history.finite)
        self.adapter = adapter_type()
        self.adapter.make(self.spec)
        self.counts: Counter[str] = Counter()
        self.done: list[Operation] = []
        self.seen: set[int] = set()
        self.reserved: list[_Reservation] = []
        self.options = self.spec.options
        if "arena" in self.can:
            for cache in self.adapter.arena():
                cache.fill_(float("nan"))

    def run(self) -> Counter[str]:
        """Do every step; return how often each path ran and condition was met."""
        for step in self.history.operations:
            self.step(step)
        if "bad_calls" in self.can:
            check_bad_calls(self)
        return self.counts

    def step(self, step: Operation) -> None:
        before = self._look(step)
        self.done.append(step)
        tokens: list[int] = []
        fits = True
        if is_write(step):
            tokens = tokens_of(self.oracle, step)
            self.seen.update(tokens)
            free = self.oracle.capacity - self.oracle.pages_used()
            needed = self.oracle.pages_needed(step.rows())
            fits = apply_to_oracle(self.oracle, step)
            self._write(step, tokens, fits=fits, room=f"{needed} blocks needed, {free} free")
        elif isinstance(step, Fill):
            tokens = self._fill()
        else:
            fits = apply_to_oracle(self.oracle, step)
            self._call(step, fits=fits)
        self._check_read_back()
        if "ledger" in self.can and "table" in self.can:
            self._check_books()
        if not fits and self._books() != before.books:
            self.fail("a step that found no room changed the books")
        slots = self._slots(step) if fits else []
        if before.arena is not None:
            self._check_arena(tokens, slots, before)
        if "path_counts" in self.can:
            may_copy = fits and (
                isinstance(step, Reserve)
                or (isinstance(step, Fork) and self.adapter.fork_shares != "blocks")
            )
            wrote = isinstance(step, Fill) or (is_write(step) and fits and not may_copy)
            ran = self._check_paths(slots, before.counts, wrote=wrote, may_copy=may_copy)
            if not isinstance(step, Copy):  # which may be written token by token
                check_conditions(self, ran, before.conditions if fits else Counter())
            check_switches(
                self, ran, self.filling.options if isinstance(step, Fill) else self.options
            )

    # ---------------------------------------------------------------------------- doing

    def _write(self, step: Write, tokens: list[int], *, fits: bool, room: str) -> None:
        if isinstance(step, AppendPadded):
            coming = iter(tokens)
            tokens = [
                padding_token(row) if seq is None else next(coming)
                for row, seq in enumerate(step.seqs)
            ]
        key, value = self._inputs(tokens, step.layout)
        try:
            self._call_write(step, tokens, key, value)
        except self.adapter.full_errors as error:
            if fits:
                self.fail(f"refused a write that fits ({room}): {error}", error)
        except Exception as error:
            self.fail(f"the write raised {type(error).__name__}: {error}", error)
        else:
            if not fits:
                self.fail(f"accepted a write that does not fit ({room})")
        # A cache that keeps the caller's memory reads nonsense from here on.
        key.fill_(float("nan"))
        value.fill_(float("nan"))

    def _inputs(self, tokens: list[int], layout: str) -> list[torch.Tensor]:
        """Keys and values to write."""
        if layout == "wider" and not self.payload.finite:
            layout = "plain"  # NaN patterns survive no conversion
        layouts = ("fused", "transposed") if layout == "apart" else (layout, layout)
        both = zip(self.payload.all_layers(tokens), layouts, strict=True)
        return [lay_out(tensor, own) for tensor, own in both]

    def _call_write(
        self, step: Write, tokens: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if isinstance(step, Prefill):
            self.adapter.prefill(step.seq, key, value)
        elif isinstance(step, Reserve):
            handle = self.adapter.reserve(step.seqs, step.counts)
            self.reserved.append(_Reservation(handle, step, tokens, self.options))
        elif isinstance(step, AppendPadded):
            self.adapter.append_padded(step.seqs, key, value)
        elif isinstance(step, AppendMany):
            self.adapter.append_many(step.seqs, step.counts, key, value)
        elif isinstance(step, Copy) and "prefill" in self.can:
            self.adapter.prefill(step.child, key, value)
        elif isinstance(step, Copy):
            for at in range(step.count):
                token = slice(at, at + 1)
                self.adapter.append([step.child], key[:, token], value[:, token])
        else:
            self.adapter.append(step.seqs, key, value)

    def _fill(self) -> list[int]:
        due = self.reserved.pop(0)
        key, value = self._inputs(due.tokens, due.step.layout)
        self.filling = due
        try:
            self.adapter.fill(due.handle, key, value)
        except Exception as error:
            self.fail(f"fill raised {type(error).__name__}: {error}", error)
        key.fill_(float("nan"))
        value.fill_(float("nan"))
        return due.tokens

    def _unwritten(self, seq: int) -> int:
        """How many of a sequence's tokens have room but were not written yet."""
        rows = [row for due in self.reserved for row in due.step.rows()]
        return sum(count for name, count in rows if name == seq)

    def _call(self, step: Operation, *, fits: bool) -> None:
        try:
            if isinstance(step, Fork):
                self.adapter.fork(step.parent, step.child)
            elif isinstance(step, Free):
                self.adapter.free(step.seq)
            elif isinstance(step, SetOptions):
                self.adapter.set_options(step.options)
                self.options = step.options
        except self.adapter.full_errors as error:
            if fits:
                self.fail(f"refused a step that fits: {error}", error)
        except Exception as error:
            self.fail(f"the step raised {type(error).__name__}: {error}", error)
        else:
            if not fits:
                self.fail("accepted a step that does not fit")

    # --------------------------------------------------------------------------- looking

    def _look(self, step: Operation) -> _Before:
        arena = None
        if {"arena", "table"} <= self.can:
            keys, values = self.adapter.arena()
            arena = (keys.clone(), values.clone())
        owners = self._owners() if arena is not None else []
        counts = self._reported() if "path_counts" in self.can else Counter()
        met = conditions_met(self.oracle, step)
        return _Before(arena, owners, self._books(), counts, met)

    def _reported(self) -> Counter[str]:
        return Counter({str(name): n for name, n in self.adapter.path_counts().items()})

    def _owners(self) -> list[Counter[int]]:
        """How many sequences' tables name each block, layer by layer."""
        return [
            Counter(
                block for seq in self.oracle.sequences for block in self.adapter.table(seq, layer)
            )
            for layer in range(self.spec.num_layers)
        ]

    def _books(self) -> object:
        if "ledger" not in self.can:
            return None
        books = []
        for layer in range(self.spec.num_layers):
            ledger = self.adapter.ledger(layer)
            books.append((dict(ledger.refcounts), sorted(ledger.free)))
        return books

    # -------------------------------------------------------------------------- checking

    def _check_read_back(self) -> None:
        routes = ["peek", "gather"] if "gather" in self.can else ["peek"]
        for seq in self.oracle.sequences:
            tokens = self.oracle.tokens(seq)
            written = len(tokens) - self._unwritten(seq)
            expected = self.payload.all_layers(tokens[:written])
            for layer in range(self.spec.num_layers):
                for route in routes:
                    try:
                        found = getattr(self.adapter, route)(seq, layer)
                    except Exception as error:
                        self.fail(
                            f"{route}({seq}, {layer}) raised {type(error).__name__}: {error}", error
                        )
                    if written < len(tokens):
                        found = (found[0][:written], found[1][:written])
                    self._compare(seq, layer, route, [cache[layer] for cache in expected], found)

    def _compare(
        self,
        seq: int,
        layer: int,
        route: str,
        expected: list[torch.Tensor],
        found: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        for kind, want, got in zip("KV", expected, found, strict=True):
            if not same_bits(want, got.contiguous()):
                tokens = self.oracle.tokens(seq)
                known = [*tokens, *self.seen]
                what = describe_mismatch(self.payload, want, got, layer, known)
                self.fail(f"{route}: sequence {seq}, layer {layer}, {kind}: {what}")

    def _check_books(self) -> None:
        for layer, owners in enumerate(self._owners()):
            ledger = self.adapter.ledger(layer)
            held = {block: count for block, count in ledger.refcounts.items() if count}
            if held != dict(owners):
                self.fail(f"layer {layer}: refcounts {held} but the tables hold {dict(owners)}")
            if len(set(ledger.free)) < len(ledger.free):
                self.fail(f"layer {layer}: the free list names a block twice: {ledger.free}")
            if both := set(ledger.free) & set(owners):
                self.fail(f"layer {layer}: blocks {sorted(both)} are free and held")
            if len(ledger.free) + len(owners) != ledger.total:
                self.fail(
                    f"layer {layer}: {len(ledger.free)} free + {len(owners)} held blocks are not "
                    f"the {ledger.total} there are"
                )
            self._check_sharing(layer)

    def _check_sharing(self, layer: int) -> None:
        """Sequences share a block exactly where they share a page of the oracle."""
        block_of: dict[int, int] = {}
        page_of: dict[int, int] = {}
        for seq, pages in self.oracle.sequences.items():
            table = self.adapter.table(seq, layer)
            if len(table) != len(pages):
                self.fail(
                    f"layer {layer}: sequence {seq} has {len(table)} blocks for "
                    f"{self.oracle.length(seq)} tokens; {len(pages)} are right"
                )
            for block, page in zip(table, pages, strict=True):
                if block_of.setdefault(id(page), block) != block:
                    self.fail(
                        f"layer {layer}: sequence {seq} has block {block} of its own where it "
                        f"shares block {block_of[id(page)]}: a block was copied needlessly"
                    )
                if page_of.setdefault(block, id(page)) != id(page):
                    self.fail(
                        f"layer {layer}: block {block} of sequence {seq} is shared with a "
                        "sequence that must have one of its own by now"
                    )

    def _check_arena(self, tokens: list[int], slots: list[list[_Slot]], before: _Before) -> None:
        """Nothing changed but the slots written and the blocks copied to."""
        arena = self.adapter.arena()
        for layer, owners in enumerate(self._owners()):
            written = slots[layer] if slots else []
            expected = [cache[layer].clone() for cache in before.arena or ()]
            opened = {block for block, at in written if at == 0}
            free_to_change = set(owners) - set(before.owners[layer]) - opened
            if isinstance(self.done[-1], AppendPadded):
                free_to_change |= self.adapter.scratch_blocks
            for block in free_to_change:
                for image, cache in zip(expected, arena, strict=True):
                    image[block] = cache[layer, block]  # a copy: read-back has checked it
            if written:
                blocks, positions = zip(*written, strict=True)
                for image, new in zip(expected, self.payload.layer(tokens, layer), strict=True):
                    image[list(blocks), :, list(positions)] = new
            for kind, image, cache in zip("KV", expected, arena, strict=True):
                if not torch.equal(as_bits(image), as_bits(cache[layer])):
                    self._fail_arena(layer, kind, image, cache[layer])
            for block in set(before.owners[layer]) - set(owners):
                for cache in arena:
                    cache[layer, block].fill_(float("nan"))

    def _slots(self, step: Operation) -> list[list[_Slot]]:
        """Block and position of every token just written, in written order, for each layer."""
        if isinstance(step, Fill):
            step = self.filling.step
        elif not is_write(step) or isinstance(step, Reserve):
            return []
        if "table" not in self.can:
            return []
        size = self.spec.block_size
        slots: list[list[_Slot]] = []
        for layer in range(self.spec.num_layers):
            slots.append([])
            for seq, count in step.rows():
                table = self.adapter.table(seq, layer)
                length = self.oracle.length(seq)
                slots[-1] += [
                    (table[at // size], at % size) for at in range(length - count, length)
                ]
        return slots

    def _fail_arena(
        self, layer: int, kind: str, expected: torch.Tensor, found: torch.Tensor
    ) -> NoReturn:
        wrong = (as_bits(expected) != as_bits(found)).any(-1).nonzero()[0].tolist()
        block, head, position = wrong
        known = sorted(self.seen)
        self.fail(
            f"layer {layer}, {kind}, block {block}, position {position}, head {head}: expected "
            f"{self.payload.decode(expected[block, head, position], layer, head, known)}, found "
            f"{self.payload.decode(found[block, head, position], layer, head, known)}"
        )

    def _check_paths(
        self, slots: list[list[_Slot]], before: Counter[str], *, wrote: bool, may_copy: bool
    ) -> dict[str, int]:
        after = self._reported()
        ran = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        twins = {path.equals for path in self.adapter.paths.values()}
        paths = set(self.adapter.paths) | twins
        for name, times in ran.items():
            if name not in paths | set(self.adapter.conditions):
                self.fail(f"path {name!r} ran and is not declared")
            if times < 0:
                self.fail(f"the count of {name!r} went down by {-times}")
        moved = paths & set(ran)
        if moved and not wrote and not may_copy:
            self.fail(f"paths {sorted(moved)} were counted though nothing was written")
        if wrote and not moved:
            self.fail("tokens were written and no path was counted")
        positions = {at for layer in slots for _, at in layer}
        # A copy is written token by token; and where a slow twin took some of the rows,
        # those that were left may have had one position.
        whole = not isinstance(self.done[-1], Copy | Reserve) and not moved & twins
        for name in moved & self.adapter.paths.keys():
            if whole and len(positions) > 1 and self.adapter.paths[name].one_position:
                self.fail(
                    f"path {name!r} was counted, which writes one position for all rows; these "
                    f"rows needed positions {sorted(positions)}"
                )
        self.counts.update(ran)
        return ran

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        raise Divergence(self, what) from cause


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raises ``Divergence`` where cache and oracle differ."""
    return Machine(adapter, history).run()
