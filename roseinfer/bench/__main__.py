"""``python -m roseinfer.bench NAME``: run a benchmark, print its tables and write its JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from roseinfer.bench.command import add_all, run_command
from roseinfer.cli.model_options import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m roseinfer.bench", description=__doc__)
    add_all(parser.add_subparsers(required=True, metavar="NAME"))
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
