"""Frames of a history: the visible state of a cache after each step."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.payload import as_bits
from pytest_roseinfer.capabilities.reading import beyond
from pytest_roseinfer.capabilities.storage import Storage
from pytest_roseinfer.findings.frame import LayerState
from pytest_roseinfer.oracle.pages import token_label
from pytest_roseinfer.run.machine import HistoryRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.observation import Location, Snapshot
    from pytest_roseinfer.findings.frame import Frame, WrongToken
    from pytest_roseinfer.histories.history import History

_NO_TOKEN = ("poison", "zeros", "NaN")
"""First words of descriptions of contents that are not a token."""
BAD_CALL = "a call that the cache must refuse"


def frames_of(
    adapter: type[KVCacheAdapter], history: History, location: Location | None
) -> list[Frame]:
    """Return a frame from before the first step, and one from after each step.

    The last one marks the ``location``, and all tokens that read back wrong.
    """
    machine = HistoryRunner(adapter, history)
    frames = [_frame(machine, machine.snapshot, location, "an empty cache")]
    ended = False
    with suppress(Exception):  # the failure was reported by the run that found it
        for _ in machine.steps():
            frames.append(
                _frame(machine, machine.snapshot, location, machine.completed_steps[-1].describe())
            )
        ended = True
    if len(machine.completed_steps) == len(frames):
        words = machine.completed_steps[-1].describe()
    elif ended:  # a history that failed only in a comparison with another history
        words = frames.pop()["description"]
    else:
        words = BAD_CALL
    return [*frames, _frame(machine, _look(machine), location, words, last=True)]


def _look(machine: HistoryRunner) -> Snapshot:
    """Take a snapshot; if the cache is too broken for that, return the one before the step."""
    try:
        return machine.take_snapshot(reads=True, copies=False)
    except Exception:
        return machine.snapshot


def _frame(
    machine: HistoryRunner,
    snapshot: Snapshot,
    location: Location | None,
    description: str,
    *,
    last: bool = False,
) -> Frame:
    layer, step = location.layer if location else 0, len(machine.completed_steps)
    look = _ComparedLayer(machine, snapshot, layer, location if last else None, last)
    return look.frame(step, description, machine.refused.get(step, ""))


class _ComparedLayer(LayerState):
    """The visible state of one layer, with the tokens that read back wrong."""

    def __init__(
        self,
        machine: HistoryRunner,
        snapshot: Snapshot,
        layer: int,
        wrong_location: Location | None,
        compares: bool,
    ) -> None:
        super().__init__(machine.oracle, snapshot, layer, wrong_location)
        self.machine, self.payload = machine, machine.payload
        self.scratch_blocks = machine.adapter.scratch_blocks
        self.poisons_free = bool(machine.observer(Storage)) and "table" in machine.features
        self.compares = compares
        """True if reads are compared with the oracle."""

    def wrong(self, seq: int) -> list[WrongToken]:
        """List the tokens that read back wrong, by the first route with a wrong token."""
        if not self.compares:
            return []
        for (_, name, at), pair in self.snapshot.reads.items():
            if (name, at) != (seq, self.layer) or isinstance(pair, Exception):
                continue
            wrong: dict[int, WrongToken] = {}
            for kind, actual in zip("KV", pair, strict=True):
                for each in self._wrong_of_kind(seq, kind, actual):
                    wrong.setdefault(each["position"], each)
            if wrong:
                return [wrong[position] for position in sorted(wrong)]
        return []

    def _wrong_of_kind(self, seq: int, kind: str, actual: torch.Tensor) -> Iterator[WrongToken]:
        tokens, start = self.oracle.tokens(seq), self.oracle.first_live(seq, self.layer)
        written = tokens[start : len(tokens) - self.oracle.unwritten(seq)]
        expected = self.payload.layer(written, self.layer)["KV".index(kind)]
        if actual.shape[1:] != expected.shape[1:] or actual.dtype != expected.dtype:
            return
        actual, expected = actual[: len(expected)].contiguous(), expected[: len(actual)]
        if self.payload.tolerance:
            differs = beyond(self.payload, self.oracle, seq, self.layer, kind, actual)
        else:
            differs = (as_bits(expected) != as_bits(actual)).any(-1)
        known_tokens = [*tokens, *sorted(self.machine.first_writers)]
        for row in differs.any(-1).nonzero().flatten().tolist():
            head = int(differs[row].nonzero()[0])
            rows = expected[row, head], actual[row, head]
            contents = self.payload.describe_mismatch(*rows, self.layer, head, kind, known_tokens)
            words = f"{kind}, head {head}: {contents.describe()}"
            short = _short(contents.actual, contents.token, written[row])
            yield {"position": start + row, "actual": short, "description": words}
        for row in range(len(actual), len(written)):
            yield {"position": start + row, "actual": "none", "description": "it is not read back"}


def _short(actual: str, token: int | None, right: int) -> str:
    """Return a label of the actual contents, about as short as a token's."""
    if token is None:
        word = actual.partition(" ")[0]
        return word if word in _NO_TOKEN else "?"
    return token_label(token) + "*" * (token == right)  # the right token's, but of another head
