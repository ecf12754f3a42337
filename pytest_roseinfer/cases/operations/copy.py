"""A sequence written again under another name."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.oracle import Oracle, Written


@operation.register
@dataclass(frozen=True, slots=True)
class Copy(operation.Write):
    """A new sequence with the tokens another has, written anew: a fork that shares nothing.

    It is never drawn. Histories with forks are compared with the same ones with copies.
    """

    parent: int
    child: int
    count: int
    layout: str = "plain"

    in_parts = True

    def rows(self) -> operation.Rows:
        return [(self.child, self.count)]

    def words(self) -> str:
        return f"write the {self.count} tokens of sequence {self.parent} again as {self.child}"

    def written(self, oracle: Oracle) -> Written:
        return Written(self.rows(), oracle.tokens(self.parent), self.layout)

    def change(self, oracle: Oracle) -> None:
        oracle.append(self.rows(), oracle.tokens(self.parent))

    def drive(self, cache: operation.Driven) -> None:
        if "prefill" in cache.adapter.abilities:
            cache.adapter.prefill(self.child, cache.key, cache.value)
            return
        for at in range(self.count):
            token = slice(at, at + 1)
            cache.adapter.append([self.child], cache.key[:, token], cache.value[:, token])
