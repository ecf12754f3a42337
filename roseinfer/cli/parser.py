"""The parser of every command: an option that it does not know is refused with what was close."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from roseinfer.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse what is left here already: who called a subcommand's parser knows none of it."""
        given = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(given, namespace)
        if unknown:
            named = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            known = [word[2:] for word in self._option_string_actions if word.startswith("--")]
            alike = did_you_mean(named[0].lstrip("-"), known, "--") if named else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{alike}")
        return found, unknown
