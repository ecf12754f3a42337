"""The ``roseinfer`` command, which finds its commands: each is a module, a ``Command``.

Other packages add theirs through the entry-point group ``roseinfer.commands``, by their names.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Protocol

from roseinfer.cli import generate
from roseinfer.cli.model_options import Parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ENTRY_POINTS = "roseinfer.commands"
_NOT_INSTALLED = (
    "Commands other than generate are known once they are installed, and in this Python "
    "none is: pip install . (or -e .) in the folder of roseinfer's sources adds verify."
)


class Command(Protocol):
    HELP: str
    DESCRIPTION: str

    def add_options(self, parser: argparse.ArgumentParser, /) -> None:
        """Import nothing heavy: this is called whichever command was asked for."""

    def run(self, args: argparse.Namespace, /) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    installed = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    found: dict[str, Command] = {"generate": generate}
    found |= {entry.name: entry.load() for entry in installed}
    parser = Parser(
        prog="roseinfer", description="A small LLM inference engine, and proof that it is right."
    )
    parser.add_argument("--version", action="version", version=_version())
    choices = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in found.items():
        options = choices.add_parser(name, help=command.HELP, description=command.DESCRIPTION)
        command.add_options(options)
        options.set_defaults(run=command.run)
    if not installed:
        parser.epilog = _NOT_INSTALLED
        if arguments and not arguments[0].startswith("-") and arguments[0] not in found:
            parser.error(f"there is no command {arguments[0]!r}. {_NOT_INSTALLED}")
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    status: int = args.run(args)
    return status


def _version() -> str:
    try:
        return f"roseinfer {version('roseinfer')}"
    except PackageNotFoundError:
        return "roseinfer, not installed"
