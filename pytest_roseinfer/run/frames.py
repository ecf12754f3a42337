"""Frames of a history: what a cache shows after each step."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.payload import as_bits
from pytest_roseinfer.capabilities.reading import beyond
from pytest_roseinfer.capabilities.storage import Storage
from pytest_roseinfer.oracle.pages import token_label
from pytest_roseinfer.run.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.observation import Location, Snapshot
    from pytest_roseinfer.findings.frame import Block, Frame, Row, Wrong
    from pytest_roseinfer.histories.history import History

_NO_TOKEN = ("poison", "zeros", "NaN")
"""What may stand in the place of a token, by the word that it is said with."""
BAD_CALL = "a call that the cache must refuse"


def frames_of(
    adapter: type[KVCacheAdapter], history: History, location: Location | None
) -> list[Frame]:
    """Return a frame from before the first step, and one from after each.

    In the last one the ``location`` is marked, and all that reads back wrong.
    """
    machine = Machine(adapter, history)
    frames = [_frame(machine, machine.now, location, "an empty cache")]
    ended = False
    with suppress(Exception):  # what is wrong was said by the run that found it
        for _ in machine.steps():
            frames.append(_frame(machine, machine.now, location, machine.done[-1].words()))
        ended = True
    if len(machine.done) == len(frames):
        words = machine.done[-1].words()
    elif ended:  # on its own it is right: it was compared with another history
        words = frames.pop()["words"]
    else:
        words = BAD_CALL
    return [*frames, _frame(machine, _look(machine), location, words, last=True)]


def _look(machine: Machine) -> Snapshot:
    """Return what the cache shows now; one that is too broken is as it was before the step."""
    try:
        return machine.look(reads=True, copies=False)
    except Exception:
        return machine.now


def _frame(
    machine: Machine, shown: Snapshot, location: Location | None, words: str, *, last: bool = False
) -> Frame:
    layer, step = location.layer if location else 0, len(machine.done)
    at = _Look(machine, shown, layer, location if last else None, last)
    return {
        "step": step,
        "words": words,
        "refused": machine.refused.get(step, ""),
        "sequences": [at.row(seq) for seq in sorted(machine.oracle.named)],
        "blocks": list(at.blocks()),
    }


class _Look:
    """What one layer of the cache shows at one moment."""

    def __init__(
        self,
        machine: Machine,
        shown: Snapshot,
        layer: int,
        marked: Location | None,
        compares: bool,
    ) -> None:
        self.machine, self.shown, self.layer = machine, shown, layer
        self.oracle, self.payload = machine.oracle, machine.payload
        self.marked = marked
        self.compares = compares
        """What reads back is compared with what must be there."""
        self.ledger = shown.ledger_or_none(layer)

    def row(self, seq: int) -> Row:
        oracle, here = self.oracle, seq in self.oracle.sequences
        absence = oracle.absent.get(seq)
        wrong = list(self._wrong(seq)) if here and self.compares else []
        tokens = absence.tokens if absence and not here else oracle.tokens(seq)
        return {
            "name": seq,
            "state": absence.words if absence else "",
            "tokens": list(map(token_label, tokens)),
            "unwritten": oracle.unwritten(seq) if here else 0,
            "blocks": self._tables(self.layer).get(seq) if here else [],
            "given_back": oracle.given_back(seq, self.layer) if here else 0,
            "wrong": wrong,
            "marked": self.marked is not None and seq in self.marked.holders and not wrong,
        }

    def _tables(self, layer: int) -> dict[int, list[int | None]]:
        """Return the tables of a layer that can be read."""
        every = self.shown.tables_or_errors(layer).items()
        return {seq: table for seq, table in every if not isinstance(table, Exception)}

    def _wrong(self, seq: int) -> list[Wrong]:
        """List the tokens that read back wrong, by the first route by which any does."""
        for (_, name, at), pair in self.shown.reads.items():
            if (name, at) != (seq, self.layer) or isinstance(pair, Exception):
                continue
            wrong: dict[int, Wrong] = {}
            for kind, got in zip("KV", pair, strict=True):
                for each in self._wrong_of_kind(seq, kind, got):
                    wrong.setdefault(each["position"], each)
            if wrong:
                return [wrong[position] for position in sorted(wrong)]
        return []

    def _wrong_of_kind(self, seq: int, kind: str, got: torch.Tensor) -> Iterator[Wrong]:
        tokens, start = self.oracle.tokens(seq), self.oracle.first_live(seq, self.layer)
        written = tokens[start : len(tokens) - self.oracle.unwritten(seq)]
        want = self.payload.layer(written, self.layer)["KV".index(kind)]
        if got.shape[1:] != want.shape[1:] or got.dtype != want.dtype:
            return
        got, want = got[: len(want)].contiguous(), want[: len(got)]
        if self.payload.tolerance:
            differs = beyond(self.payload, self.oracle, seq, self.layer, kind, got)
        else:
            differs = (as_bits(want) != as_bits(got)).any(-1)
        known = [*tokens, *sorted(self.machine.seen)]
        for row in differs.any(-1).nonzero().flatten().tolist():
            head = int(differs[row].nonzero()[0])
            rows = want[row, head], got[row, head]
            contents = self.payload.contents(*rows, self.layer, head, kind, known)
            words = f"{kind}, head {head}: {contents.words()}"
            short = _short(contents.found, contents.token, written[row])
            yield {"position": start + row, "found": short, "words": words}
        for row in range(len(got), len(written)):
            yield {"position": start + row, "found": "none", "words": "it is not read back"}

    def blocks(self) -> Iterator[Block]:
        holders, (free, cached, refcounts) = self._holders(), self._books()
        wrong = self.marked.block if self.marked else None
        numbers = {*holders, *free, *cached, *refcounts, *([] if wrong is None else [wrong])}
        for number in sorted(numbers - {*self.machine.adapter.scratch_blocks}):
            own = holders.get(number, [])
            yield {
                "number": number,
                "states": self._states(len(own), number in free, number in cached),
                "refcount": refcounts.get(number),
                "holders": own,
                "marked": number == wrong,
            }

    def _states(self, holders: int, free: bool, cached: bool) -> list[str]:
        states = ["shared" if holders > 1 else "held"] if holders else []
        states += ["free"] * free + ["cached"] * cached
        if states == ["free"] and self.machine.observer(Storage) and "table" in self.machine.can:
            states.append("poisoned")
        return states or ["counted"]

    def _books(self) -> tuple[set[int], set[int], Mapping[int, int]]:
        """Return what is free, what of that is kept for later texts, and refcounts."""
        if self.ledger is None:
            return set(), set(), {}
        return {*self.ledger.free}, {*self.ledger.cached}, self.ledger.refcounts

    def _holders(self) -> dict[int, list[int]]:
        """Return, for each block of the layer's pool, the sequences whose tables name it."""
        found: dict[int, list[int]] = {}
        for layer in self.oracle.pool_of(self.layer):
            for seq, table in self._tables(layer).items():
                for block in table:
                    if block is not None and seq not in found.setdefault(block, []):
                        found[block].append(seq)
        return found


def _short(found: str, token: int | None, right: int) -> str:
    """Name what was found as shortly as tokens are named."""
    if token is None:
        word = found.partition(" ")[0]
        return word if word in _NO_TOKEN else "?"
    return token_label(token) + "*" * (token == right)  # that token's, but of another head, say
