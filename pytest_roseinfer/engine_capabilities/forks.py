"""Forking: one prompt that is stored once, and completed in several ways."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.answers import are_tokens, list_of, returns
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.engine_capabilities.capability import EngineCapability

if TYPE_CHECKING:
    from collections.abc import Sequence


class ForkMethods:
    """The method that forks."""

    @optional
    @returns(list_of(are_tokens), "a list of tokens for each sampling")
    def fork(self, prompt: Sequence[int], samplings: Sequence[Any]) -> list[list[int]]:
        """Store the prompt once, complete it in each of these ways, and return the tokens of each.

        Each must be what ``alone`` gives for it.
        """


FORK = EngineCapability(methods=ForkMethods, renamed={"forked": "fork(prompt, samplings)"})
