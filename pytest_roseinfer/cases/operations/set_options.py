"""Changing the switches of a live cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.cases.operations import operation

if TYPE_CHECKING:
    from collections.abc import Mapping


@operation.register
@dataclass(frozen=True, slots=True)
class SetOptions(operation.Operation):
    """Other values for the switches of the cache."""

    options: Mapping[str, Any] = field(default_factory=dict)

    needs = frozenset({"set_options"})

    def words(self) -> str:
        return "set " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.set_options(self.options)
        cache.options = cache.planned_with = self.options

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.live and writer.has_switches:
            yield operation.Move(9, 2, lambda: cls(writer.switches()))
