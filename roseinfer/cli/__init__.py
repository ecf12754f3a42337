"""The ``roseinfer`` command. Each subcommand is a module that implements ``Command``.

Other packages add subcommands by name, through the entry-point group ``roseinfer.commands``.
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
    "Commands other than generate are entry points of installed packages, and this Python has "
    "none: run pip install . (or -e .) in the folder of roseinfer's sources to add verify."
)


class Command(Protocol):
    """A subcommand: its help, its options and its function."""

    HELP: str
    DESCRIPTION: str

    def add_options(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the options, without heavy imports: every subcommand's options are always added."""

    def run(self, args: argparse.Namespace, /) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    installed = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    commands: dict[str, Command] = {"generate": generate}
    commands |= {entry.name: entry.load() for entry in installed}
    parser = Parser(
        prog="roseinfer", description="A small LLM inference engine, and checks of KV caches."
    )
    parser.add_argument("--version", action="version", version=_version())
    choices = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in commands.items():
        options = choices.add_parser(name, help=command.HELP, description=command.DESCRIPTION)
        command.add_options(options)
        options.set_defaults(run=command.run)
    if not installed:
        parser.epilog = _NOT_INSTALLED
        if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
            parser.error(f"unknown command {arguments[0]!r}. {_NOT_INSTALLED}")
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
