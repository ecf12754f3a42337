"""What every benchmark's command does: understand, measure, print, keep, draw."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, NoReturn

from roseinfer.bench import charts
from roseinfer.errors import BadArgument, ConfigError, UnsupportedModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """``args.run(args, command)`` measures and returns the report, or None without one."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    kept: Path | None = getattr(args, "json", None)
    drawn: Path | None = getattr(args, "plot", None)
    chart: Path | None = getattr(args, "chart", None)
    for option, path in (("--json", kept), ("--plot", drawn), ("chart", chart)):
        if path and not path.parent.is_dir():
            _refuse(parser, f"{option} {path}: make the directory {path.parent} first")
        if path and path.is_dir():
            _refuse(parser, f"{option} {path}: this is a directory, and a file is to be written")
        if path and (why := _unwritable(path)):
            _refuse(parser, f"{option} {path} cannot be written: {why}")
    try:
        if drawn:
            charts.check(drawn)  # before an hour of measuring, not after it
        report = args.run(args, f"{parser.prog} {shlex.join(words)}")
    except (ConfigError, UnsupportedModel, BadArgument) as error:
        _refuse(parser, str(error))
    if report is None:
        return 0
    print(report.text())
    if kept:
        report.write_json(kept)
    if drawn:
        charts.draw(report.document(), drawn)
    return 0


def _unwritable(path: Path) -> str:
    """Why a file cannot be written, in words; empty if it can. What is there stays."""
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        return error.strerror or str(error)
    if not there:
        path.unlink()
    return ""


def _refuse(parser: argparse.ArgumentParser, why: str) -> NoReturn:
    """As argparse does, less all the options: what was wrong is no matter of spelling."""
    parser.exit(2, f"{parser.prog}: error: {why}\n")
