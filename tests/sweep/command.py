"""``python -m tests.sweep``: hold the engine to every causal model of transformers."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.plugin.reference import PageError
from roseinfer.bench.cases import int_at_least
from roseinfer.cli.model_options import Parser
from roseinfer.progress import track_progress
from tests.sweep import table
from tests.sweep.outcome import Kind
from tests.sweep.run import run
from tests.sweep.subject import every_class
from tests.sweep.variants import every_variant

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tests.sweep.subject import Subject
    from tests.sweep.table import Found

_COMMAND = "python -m tests.sweep"
_DESCRIPTION = (
    "Build a tiny model of every class that transformers has for causal language models, and of "
    "variants of some, and have the engine serve it: it must agree with transformers or refuse the "
    "model with an error that says why. Exit status 0 only when there was nothing else."
)
_MOST_NOT_BUILT = 0.25
"""Of those that were looked at; were none built, nothing could be wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(argv)
    subjects = _chosen([*every_class(), *every_variant()], asked)
    if not subjects:
        parser.error(f"nothing is named like {' or '.join(asked.names)}")
    if asked.write_docs and (asked.names or asked.tenth is not None):
        parser.error("--write-docs: a page is written with everything, not with a part")
    try:
        for page in filter(None, (asked.write_docs, asked.against_docs)):
            table.require(page)
    except PageError as error:
        parser.error(str(error))
    found = _find(subjects, asked)
    wrong = [f"{subject}: {out}" for subject, out in found.items() if out.kind is Kind.WRONG]
    if sum(out.kind is Kind.NOT_BUILT for out in found.values()) > len(found) * _MOST_NOT_BUILT:
        wrong.append("so many could not be built: tests/sweep/tiny_configs.py knows too little")
    if asked.against_docs and table.is_of_these_versions(asked.against_docs):
        wrong += table.differences(asked.against_docs, found)
    if asked.write_docs:
        table.write(asked.write_docs, found, f"{_COMMAND} --write-docs {asked.write_docs}")
    print(table.tables(found), *wrong, sep="\n")
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=_COMMAND, description=_DESCRIPTION)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only what has this in its name (default: all)"
    )
    parser.add_argument(
        "--tenth", type=int_at_least(0), metavar="SEED", help="only a tenth, drawn with this seed"
    )
    parser.add_argument(
        "--jobs",
        type=int_at_least(1),
        default=os.cpu_count() or 1,
        help="processes at a time (default: one for each CPU)",
    )
    parser.add_argument(
        "--seconds", type=int_at_least(1), default=120, help="for each at most (default: 120)"
    )
    parser.add_argument(
        "--write-docs",
        type=Path,
        metavar="FILE",
        help="put the outcomes of everything into this page",
    )
    parser.add_argument(
        "--against-docs",
        type=Path,
        metavar="FILE",
        help="fail too where this page, if it is of these versions, has another outcome",
    )
    return parser


def _chosen(everything: list[Subject], asked: argparse.Namespace) -> list[Subject]:
    """Return what was asked for, in the order of the tables."""
    names = [name.lower() for name in asked.names]
    named = [each for each in everything if not names or any(n in str(each).lower() for n in names)]
    if asked.tenth is None:
        return named
    drawn = random.Random(asked.tenth).sample(range(len(named)), -(-len(named) // 10))
    return [named[at] for at in sorted(drawn)]


def _find(subjects: list[Subject], asked: argparse.Namespace) -> Found:
    """Return the outcomes in the order of the subjects."""
    found = {}
    with track_progress(len(subjects), "models", "classes and variants") as done:
        for subject, outcome in run(subjects, processes=asked.jobs, seconds=asked.seconds):
            found[subject] = outcome
            done()
    return {subject: found[subject] for subject in subjects}
