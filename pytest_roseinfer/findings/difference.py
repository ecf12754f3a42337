"""The error that says what is wrong with a target: it is shown as its message, and saved."""

from __future__ import annotations


class Difference(AssertionError):
    """What was tested does something else than it must."""

    def __init__(self, what: str, details: str) -> None:
        super().__init__(f"{what}\n\n{details}")
        self.what = what
        """In one line."""
