"""A history: the steps done to a cache, as plain data that can be said, saved and replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest_roseinfer.adapters.cache  # noqa: F401 - which has every shipped operation
from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.operation import Operation
from pytest_roseinfer.oracle.texts import WHOLE, Branch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


GATHERS_EVERY = (1, 3)
"""After how many steps a sequence is gathered, the plainest first."""
_FEW = 3
"""So many steps that are alike have a line each."""


@dataclass(frozen=True, slots=True)
class History:
    """A cache's shape and all that is done to it."""

    spec: CacheSpec
    operations: tuple[Operation, ...]
    finite: bool = True
    texts: tuple[Branch, ...] = ()
    """What sequences say, by name and in turns, if the cache is told."""
    gathers_every: int = 1
    """A sequence is gathered after one step in so many, and after the last step: a cache that is
    read after each one never shows what it forgets to bring up to date before the next read."""

    @property
    def size(self) -> int:
        return len(self.operations)

    @property
    def device(self) -> str:
        return self.spec.device

    def words(self, notes: Mapping[int, str] | None = None) -> str:
        """Say it in words; ``notes`` tell what came of steps, which are numbered from 1."""
        came = {at: f"; {note}" for at, note in (notes or {}).items()}
        fields = {name: value for name, value in asdict(self.spec).items() if value != ()}
        shape = ", ".join(f"{name}={value}" for name, value in fields.items())
        said = [f"{step.words()}{came.get(at, '')}" for at, step in enumerate(self.operations, 1)]
        texts = [
            f"text {text} begins as text {parent}"
            + (f" for {length} tokens" if length < WHOLE else " and is equal to it")
            + "".join(f", but lies in namespace {namespace}" for namespace in namespaces)
            for text, (parent, length, *namespaces) in enumerate(self.texts)
            if parent != text
        ]
        if len(self.texts) == 1:
            texts.append("all sequences say the same, which is tokens that are 1")
        elif self.texts:
            which = f"text n mod {len(self.texts)}, and the next text when its name is used again"
            texts.append(f"sequence n has {which}")
            texts.append(
                "all tokens are 1, but where text n leaves the one it begins as, it is n + 1"
            )
        if self.gathers_every > 1:
            when = f"step m if {self.gathers_every} divides n + m, and after the last step"
            texts.append(f"sequence n is gathered after {when}")
        return "\n".join([f"a cache with {shape}", *texts, *_numbered(said)])

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": asdict(self.spec),
            "finite": self.finite,
            "texts": self.texts,
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
            tuple(map(tuple, data.get("texts", ()))),
            data.get("gathers_every", 1),
        )


def _numbered(said: Sequence[str]) -> Iterator[str]:
    """Yield a line for each step, and one for many that follow each other and are alike."""
    done = 0
    for words, alike in groupby(said):
        begin, done = done + 1, done + len([*alike])
        if done - begin < _FEW:
            yield from (f"  {at}. {words}" for at in range(begin, done + 1))
        else:
            yield f"  {begin}.-{done}. {words}"
