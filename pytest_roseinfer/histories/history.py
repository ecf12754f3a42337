"""A history: a cache to build and its steps, as data that is described, saved and replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest_roseinfer.adapters.cache  # noqa: F401 - registers all shipped operations
from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.operation import Operation
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.oracle.texts import (
    WHOLE,
    Branch,
    TextKey,
    branch_from_json,
    branch_to_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


GATHERS_EVERY = (1, 3)
"""Choices of ``History.gathers_every``, the simplest first."""
_FEW = 3
"""Maximum number of equal steps in a row with a line each; more share one line."""


@dataclass(frozen=True, slots=True)
class History:
    """A cache's shape, and the steps that are applied to it."""

    spec: CacheSpec
    operations: tuple[Operation, ...]
    finite: bool = True
    texts: tuple[Branch, ...] = ()
    """Texts of sequences, assigned by name and number of reuse; empty without ``use_tokens``."""
    gathers_every: int = 1
    """Steps between two reads of a sequence by ``gather``, which also reads it after the last step:
    a cache that is read after every step would hide bugs in work that it defers until a read."""

    @property
    def size(self) -> int:
        return len(self.operations)

    @property
    def device(self) -> str:
        return self.spec.device

    @property
    def last_options(self) -> Mapping[str, Any]:
        """Switches that a step has set last, if other than at first; empty if none has."""
        for step in reversed(self.operations):
            if isinstance(step, SetOptions):
                return step.options if step.options != dict(self.spec.options) else {}
        return {}

    def describe(self, notes: Mapping[int, str] | None = None) -> str:
        """Describe it in words, with ``notes`` on the results of steps, numbered from 1."""
        results = {at: f"; {note}" for at, note in (notes or {}).items()}
        fields = {name: value for name, value in asdict(self.spec).items() if value != ()}
        shape = ", ".join(f"{name}={value}" for name, value in fields.items())
        steps = [
            f"{step.describe()}{results.get(at, '')}" for at, step in enumerate(self.operations, 1)
        ]
        texts = [
            *(f"text 0 has {_describe_key(key)}" for _, _, *keys in self.texts[:1] for key in keys),
            *map(self._describe_text, range(1, len(self.texts))),
        ]
        if len(self.texts) == 1:
            texts.append("all sequences have the same text, whose token ids are all 1")
        elif self.texts:
            which = f"text n mod {len(self.texts)}, and the next text when its name is used again"
            texts.append(f"sequence n has {which}")
            texts.append(
                "all token ids are 1, except that the first token of text n after its shared "
                "prefix is n + 1"
            )
        if self.gathers_every > 1:
            when = f"step m if {self.gathers_every} divides n + m, and after the last step"
            texts.append(f"sequence n is gathered after {when}")
        return "\n".join([f"a cache with {shape}", *texts, *_numbered(steps)])

    def _describe_text(self, text: int) -> str:
        """Describe the token ids and the key of a text other than the first."""
        parent, length, *keys = self.texts[text]
        shared = (
            f"text {text} shares its first {length} tokens with text {parent}"
            if length < WHOLE
            else f"text {text} is equal to text {parent}"
        )
        return shared + "".join(f", but has {_describe_key(key)}" for key in keys)

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": asdict(self.spec),
            "finite": self.finite,
            "texts": [*map(branch_to_json, self.texts)],
            "gathers_every": self.gathers_every,
            "operations": [step.to_json() for step in self.operations],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> History:
        windows = tuple(data["spec"].get("windows", ()))
        return cls(
            CacheSpec(**{**data["spec"], "windows": windows}),
            tuple(map(Operation.from_json, data["operations"])),
            data["finite"],
            tuple(branch_from_json(*branch) for branch in data.get("texts", ())),
            data.get("gathers_every", 1),
        )


def _describe_key(key: TextKey | int) -> str:
    return key.describe() if isinstance(key, TextKey) else f"namespace {key}"


def _numbered(steps: Sequence[str]) -> Iterator[str]:
    """Yield a line for each step, and one for many equal steps in a row."""
    done = 0
    for words, alike in groupby(steps):
        begin, done = done + 1, done + len([*alike])
        if done - begin < _FEW:
            yield from (f"  {at}. {words}" for at in range(begin, done + 1))
        else:
            yield f"  {begin}.-{done}. {words}"
