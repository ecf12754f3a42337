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
        help=f"how hard to look (default: {PROFILE})",
    )
    parser.add_argument("--quick", action="store_true", help="one seed each, compared with nothing")
    parser.add_argument(
        "--jobs",
        type=int_at_least(1),
        default=os.cpu_count() or 1,
        help="processes at a time (default: one for each CPU)",
    )
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        help="put the result into this page and, of a hunt for all bugs with "
        "all seeds, into what roseinfer verify says of itself",
    )
    parser.add_argument(
        "--false-alarms",
        type=int_at_least(1),
        metavar="SEEDS",
        help="instead, run the dev profile with so many seeds on targets without a planted bug",
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="instead, make what fails as small as it goes, of the bugs whose smallest example is "
        "known, and say which are made that small",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        metavar="TARGET",
        help="which ones, as package.module:Class (default: those that are shipped and required)",
    )
