"""Methods of an adapter that cannot be called with what the harness hands them."""

from __future__ import annotations

from inspect import Parameter, Signature, getattr_static, signature
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.base import Adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def refuse_signatures(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for methods that take more, less or in another order than is handed."""
    if wrong := [*_not_made(adapter), *_not_called(adapter)]:
        raise TypeError("; ".join(wrong))


def _not_made(adapter: type[Adapter]) -> Iterator[str]:
    own = _signature(adapter, "__init__")
    if own and not _takes(own, 0):
        yield (
            f"{adapter.__name__}.__init__ takes {_listed(own)}, and the harness calls "
            f"{adapter.__name__}(): build in make what needs them, or give them defaults"
        )


def _not_called(adapter: type[Adapter]) -> Iterator[str]:
    kind = adapter.__mro__[adapter.__mro__.index(Adapter) - 1]
    for name in filter(adapter.defines, (*adapter.required, *adapter.optional)):
        own, due = _signature(adapter, name), _signature(kind, name)
        if own and due and not (_takes(own, len(due.parameters)) and _in_order(own, due)):
            handed = ", ".join(due.parameters)
            yield (
                f"{adapter.__name__}.{name} takes ({_listed(own)}), and the harness calls "
                f"{name}({handed})"
            )


def _signature(adapter: type[Adapter], name: str) -> Signature | None:
    """Return what a method is called with; None where Python cannot say."""
    method: Any = getattr_static(adapter, name)
    bound = isinstance(method, staticmethod | classmethod)
    try:
        found = signature(getattr(adapter, name))
    except (TypeError, ValueError):
        return None
    named = [*found.parameters.values()]
    if bound or not named or named[0].kind is Parameter.VAR_POSITIONAL:
        return found
    return found.replace(parameters=named[1:])


def _takes(own: Signature, handed: int) -> bool:
    try:
        own.bind(*[None] * handed)
    except TypeError:
        return False
    return True


def _in_order(own: Signature, due: Signature) -> bool:
    """Return False for the same names in another order; other names are the user's own."""
    named = [each.name for each in own.parameters.values() if each.kind in _BY_PLACE]
    return sorted(named) != sorted(due.parameters) or named == [*due.parameters]


def _listed(own: Signature) -> str:
    return ", ".join(
        str(each.replace(annotation=Parameter.empty)) for each in own.parameters.values()
    )
