"""Frames of a history: what a cache shows after each step."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.payload import as_bits
from pytest_roseinfer.capabilities.reading import beyond
from pytest_roseinfer.capabilities.storage import Storage
from pytest_roseinfer.findings.frame import Look
from pytest_roseinfer.oracle.pages import token_label
from pytest_roseinfer.run.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.observation import Location, Snapshot
    from pytest_roseinfer.findings.frame import Frame, Wrong
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
    look = _Look(machine, shown, layer, location if last else None, last)
    return look.frame(step, words, machine.refused.get(step, ""))


class _Look(Look):
    """What one layer of the cache shows at one moment, with what reads back wrong."""

    def __init__(
        self,
        machine: Machine,
        shown: Snapshot,
        layer: int,
        marked: Location | None,
        compares: bool,
    ) -> None:
        super().__init__(machine.oracle, shown, layer, marked)
        self.machine, self.payload = machine, machine.payload
        self.scratch_blocks = machine.adapter.scratch_blocks
        self.poisons_free = bool(machine.observer(Storage)) and "table" in machine.can
        self.compares = compares
        """What reads back is compared with what must be there."""

    def wrong(self, seq: int) -> list[Wrong]:
        """List the tokens that read back wrong, by the first route by which any does."""
        if not self.compares:
            return []
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


def _short(found: str, token: int | None, right: int) -> str:
    """Name what was found as shortly as tokens are named."""
    if token is None:
        word = found.partition(" ")[0]
        return word if word in _NO_TOKEN else "?"
    return token_label(token) + "*" * (token == right)  # that token's, but of another head, say
