"""What every benchmark's command does: check its files, measure, print, write and draw."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from roseinfer.bench import charts
from roseinfer.errors import BadArgument, ConfigError, UnsupportedModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse the arguments and call ``args.run(args)``, which returns the report if there is one."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    args.command = f"{parser.prog} {shlex.join(words)}"
    files = {name: getattr(args, name, None) for name in ("json", "plot", "chart")}
    try:
        for name, path in files.items():
            if path:
                _require_writable("chart" if name == "chart" else f"--{name}", path)
        if files["plot"]:
            charts.check(files["plot"])  # before an hour of measuring, not after it
        report = args.run(args)
    except (ConfigError, UnsupportedModel, BadArgument) as error:
        # As argparse says it, but without the usage: the spelling of the options is right.
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if report is None:
        return 0
    print(report.text())
    if files["json"]:
        report.write_json(files["json"])
    if files["plot"]:
        charts.draw(report.document, files["plot"])
    return 0


def _require_writable(option: str, path: Path) -> None:
    """Raise where no file could be written; one that is there already keeps its content."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: make the directory {path.parent} first")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a directory, and a file is to be written")
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from error
    if not there:
        path.unlink()
