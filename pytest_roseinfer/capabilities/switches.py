"""Changing the switches of a live cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Across, Capability, optional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SwitchMethods:
    """The method that changes switches."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Switches and their values, the usual one first. Each history draws one of each for
    ``spec.options``."""

    @optional
    def set_options(self, options: Mapping[str, Any]) -> None:
        """Change the switches of a live cache."""


@operation.register("SetOptions")
class SetOptions(operation.Operation):
    """Change the switches of the cache."""

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


SWITCHES = Capability(
    methods=SwitchMethods,
    sharded={"set_options": Across.SAME},
    operations=(SetOptions,),
)
