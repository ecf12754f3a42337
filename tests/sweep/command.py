"""``python -m tests.sweep``: compare the engine with every causal model of transformers."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.plugin.reference import PageError
from roseinfer.bench.cases import int_at_least
from roseinfer.cli.model_options import Parser
from roseinfer.terminal import track_progress
from tests.sweep import table
from tests.sweep.outcome import Kind
from tests.sweep.run import run
from tests.sweep.subject import every_class
from tests.sweep.variants import every_variant

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tests.sweep.subject import Subject
    from tests.sweep.table import Outcomes

_COMMAND = "python -m tests.sweep"
_DESCRIPTION = (
    "Build a tiny model of every class that transformers has for causal language models, and of "
    "variants of some, and serve it by the engine: it must agree with transformers or refuse the "
    "model with an error that has the reason. Exit status 0 only without other outcomes."
)
_MAX_UNBUILT_SHARE = 0.25
"""Largest share of subjects that may fail to be built, because those are not checked."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    subjects = _selected([*every_class(), *every_variant()], args)
    if not subjects:
        parser.error(f"no subject has a name like {' or '.join(args.names)}")
    if args.write_docs and (args.names or args.tenth is not None):
        parser.error("--write-docs: a page needs all subjects; drop names and --tenth")
    try:
        for page in filter(None, (args.write_docs, args.against_docs)):
            table.require(page)
    except PageError as error:
        parser.error(str(error))
    outcomes = _check_all(subjects, args)
    errors = [f"{subject}: {out}" for subject, out in outcomes.items() if out.kind is Kind.WRONG]
    if (
        sum(out.kind is Kind.NOT_BUILT for out in outcomes.values())
        > len(outcomes) * _MAX_UNBUILT_SHARE
    ):
        errors.append("too many could not be built: extend tests/sweep/tiny_configs.py")
    if args.against_docs and table.is_of_these_versions(args.against_docs):
        errors += table.differences(args.against_docs, outcomes)
    if args.write_docs:
        table.write(args.write_docs, outcomes, f"{_COMMAND} --write-docs {args.write_docs}")
    print(table.tables(outcomes), *errors, sep="\n")
    return int(bool(errors))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=_COMMAND, description=_DESCRIPTION)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="only subjects with this in their names (default: all)",
    )
    parser.add_argument(
        "--tenth", type=int_at_least(0), metavar="SEED", help="only a random tenth, by this seed"
    )
    parser.add_argument(
        "--jobs",
        type=int_at_least(1),
        default=os.cpu_count() or 1,
        help="processes at a time (default: one for each CPU)",
    )
    parser.add_argument(
        "--seconds", type=int_at_least(1), default=120, help="most seconds for each (default: 120)"
    )
    parser.add_argument(
        "--write-docs",
        type=Path,
        metavar="FILE",
        help="write the outcomes of all subjects into this page",
    )
    parser.add_argument(
        "--against-docs",
        type=Path,
        metavar="FILE",
        help="also fail if this page, of the same versions, has another outcome",
    )
    return parser


def _selected(subjects: list[Subject], args: argparse.Namespace) -> list[Subject]:
    """Return the selected subjects, in the order of the tables."""
    names = [name.lower() for name in args.names]
    named = [each for each in subjects if not names or any(n in str(each).lower() for n in names)]
    if args.tenth is None:
        return named
    drawn = random.Random(args.tenth).sample(range(len(named)), -(-len(named) // 10))
    return [named[at] for at in sorted(drawn)]


def _check_all(subjects: list[Subject], args: argparse.Namespace) -> Outcomes:
    """Return the outcomes in the order of the subjects."""
    outcomes = {}
    with track_progress(len(subjects), "models", "classes and variants") as advance:
        for subject, outcome in run(subjects, processes=args.jobs, seconds=args.seconds):
            outcomes[subject] = outcome
            advance()
    return {subject: outcomes[subject] for subject in subjects}
