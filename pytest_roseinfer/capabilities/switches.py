"""Switches of a cache, and changes of them while it is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, RankPolicy, optional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SwitchMethods:
    """Adapter method and attribute for switches."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Values of each switch, the usual one first. Each history draws one value per switch for
    ``spec.options``."""

    @optional
    def set_options(self, options: Mapping[str, Any]) -> None:
        """Change the switches of a cache in use."""


@operation.register("SetOptions")
class SetOptions(operation.Operation):
    """Change the switches of the cache."""

    options: dict[str, Any]

    needs = frozenset({"set_options"})

    def describe(self) -> str:
        return "set " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.set_options(self.options)
        cache.options = cache.planned_options = self.options

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if writer.live and writer.adapter.option_choices:
            yield operation.DrawOption(91, 2, lambda: cls(writer.switches()))


SWITCHES = Capability(
    methods=SwitchMethods,
    sharded={"set_options": RankPolicy.SAME},
    operations=(SetOptions,),
)
