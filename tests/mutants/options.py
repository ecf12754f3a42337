"""The options of ``python -m tests.mutants``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roseinfer.bench.cases import int_at_least
from tests.mutants.jobs import PROFILE

if TYPE_CHECKING:
    import argparse

DESCRIPTION = (
    "Plant every bug of the catalogue in a copy of the engine, one at a time, and search each "
    "copy as a profile does, without a GPU. Exit status 0 only when every bug was found by "
    "every seed."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these bugs (default: all)")
    parser.add_argument("--list", action="store_true", help="name the bugs and do nothing else")
    parser.add_argument(
        "--seeds", type=int_at_least(1), default=10, help="searches of each bug (default: 10)"
    )
    parser.add_argument(
        "--profile",
        choices=("dev", PROFILE),
        default=PROFILE,
        help=f"search effort (default: {PROFILE})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed each, without comparisons or searches of targets without a bug",
    )
    parser.add_argument(
        "--jobs",
        type=int_at_least(1),
        default=os.cpu_count() or 1,
        help="processes at a time (default: one for each CPU)",
    )
    parser.add_argument(
        "--resume",
        metavar="FILE",
        help="keep the outcomes of planted bugs in this file; the same command with it goes on "
        "where the last one was cut off",
    )
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        help="write the results into this page and, for all bugs with all seeds, the "
        "strength that roseinfer verify reports",
    )
    parser.add_argument(
        "--false-alarms",
        type=int_at_least(1),
        metavar="SEEDS",
        help="instead, run the dev profile with this number of seeds on targets without a bug",
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="instead, shrink failures on bugs whose smallest example is known, and report "
        "which are shrunk to that size",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        metavar="TARGET",
        help="targets of --false-alarms, as package.module:Class (default: those shipped)",
    )
