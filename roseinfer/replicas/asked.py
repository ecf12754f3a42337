"""A request as it goes to a replica, and what is told of one that a replica lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roseinfer.server.refusals import LATER, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Message, Scope

_KEPT = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
"""What a replica gets of a scope. The rest belongs to the process that listens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request: all of it, since nothing is handed on before its body was read."""

    id: str
    scope: dict[str, Any] = field(repr=False)
    body: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, scope: Scope, body: bytes) -> Asked:
        return cls(name, {key: scope[key] for key in _KEPT if key in scope}, body)


def is_last(messages: Sequence[Message]) -> bool:
    """Return whether an answer ends with these."""
    if not messages:
        return False
    last = messages[-1]
    return bool(last["type"] == "http.response.body" and not last.get("more_body", False))


class ReplicaLost(Refused):
    """A replica ended with a request in it, or none is there to take one."""

    def __init__(self) -> None:
        why = "the replica that had this request has ended: ask again, and another will take it"
        super().__init__(503, why, code="replica_lost", headers=LATER)
