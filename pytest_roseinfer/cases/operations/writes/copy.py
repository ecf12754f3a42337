"""Write the tokens of a sequence again under a new name: a fork that shares nothing.

It is never drawn. Histories with forks are compared with the same ones with copies.
"""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.plural import some


@operation.register
class Copy(operation.Write):
    parent: int
    child: int
    count: int
    layout: str = "plain"

    in_parts = True

    def rows(self) -> operation.Rows:
        return [(self.child, self.count)]

    def words(self) -> str:
        tokens = some(self.count, "token")
        return f"write the {tokens} of sequence {self.parent} again as {self.child}"

    def fitted(self, oracle: operation.Oracle) -> operation.Operation:
        return Copy(self.parent, self.child, oracle.length(self.parent), self.layout)

    def tokens(self, oracle: operation.Oracle) -> operation.Tokens:
        return oracle.tokens(self.parent)

    def said(self, oracle: operation.Oracle) -> list[operation.Said]:
        return oracle.said_by(self.parent)

    def change(self, oracle: operation.Oracle) -> None:
        oracle.append(self.rows(), self.tokens(oracle))
        oracle.begin_as(self.parent, self.child)

    def drive(self, cache: operation.Driven) -> None:
        if "prefill" in cache.adapter.abilities:
            cache.adapter.prefill(self.child, cache.key, cache.value)
            return
        for at in range(self.count):
            token = slice(at, at + 1)
            cache.adapter.append([self.child], cache.key[:, token], cache.value[:, token])
