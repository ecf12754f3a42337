"""Changing the switches of a live cache."""

from __future__ import annotations

from typing import Any

from pytest_roseinfer.capabilities import operation


@operation.register
class SetOptions(operation.Operation):
    options: dict[str, Any]

    needs = frozenset({"set_options"})

    def words(self) -> str:
        return "set " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.set_options(self.options)
        cache.options = cache.planned_with = self.options

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.live and writer.adapter.option_choices:
            yield operation.Move(91, 2, lambda: cls(writer.switches()))
