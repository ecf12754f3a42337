"""What the oracle must know of a cache: what its adapter declares of it, and its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARING = ("exact", "equal prefixes", "none")
FORK_SHARES = ("blocks", "full blocks", "nothing")


class Declares(Protocol):
    """What an adapter says of its cache that the oracle must know."""

    @property
    def fork_shares(self) -> str: ...
    @property
    def keeps_found(self) -> bool: ...
    @property
    def truncate_copies(self) -> bool: ...
    @property
    def atomic_batches(self) -> bool: ...
    @property
    def swap_out_holds(self) -> bool: ...
    @property
    def window_pools(self) -> str: ...
    @property
    def window_gives_back(self) -> str: ...
    def trimmable(self, spec: Any, stored: int, length: int, /) -> bool: ...


class Shape(Protocol):
    """What the oracle must know of a cache's spec."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def windows(self) -> Sequence[int | None]: ...


def always(stored: int, length: int) -> bool:  # noqa: ARG001
    """Say that any sequence may be cut."""
    return True
