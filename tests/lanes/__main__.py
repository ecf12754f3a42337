"""``python -m tests.lanes`` runs every kernel under a sanitizer."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from roseinfer.cli.model_options import Parser
from tests.lanes import memcheck

if TYPE_CHECKING:
    from collections.abc import Sequence

_DESCRIPTION = (
    "Run every kernel under a sanitizer: first check that it finds planted accesses, then the "
    "launches of the shipped searches and of the tests of kernels, interpreted on the CPU. Exit "
    "status 0 only when every kernel was launched and none accessed memory out of bounds."
)
_LAUNCHING = (
    "pytest_roseinfer/suite",
    *(f"tests/{folder}" for folder in ("attention", "decode", "models/fused", "kv")),
)
_USAGE_ERROR = 4
"""Exit status of pytest for invalid options."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.lanes", description=_DESCRIPTION)
    parser.add_argument("--profile", default="dev", help="how hard to search (default: dev)")
    parser.add_argument("--seed", help="make the searches repeatable")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="instead run the compiled kernels under NVIDIA's compute-sanitizer",
    )
    args = parser.parse_args(argv)
    if args.gpu:
        return _on_a_gpu()
    status = _pytest("tests/lanes")
    if status:
        return status
    options = ["--roseinfer-profile", args.profile]
    if args.seed is not None:
        options += ["--roseinfer-seed", args.seed]
    plugin = ["-p", "tests.lanes.plugin", "--require-every-kernel"]
    return _pytest(*plugin, *options, *_LAUNCHING)


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _on_a_gpu() -> int:
    if reason := memcheck.unavailable_reason():
        print(f"ERROR: {reason}", file=sys.stderr)
        return _USAGE_ERROR
    errors = memcheck.check()
    print(*(errors or ["all accesses are in bounds"]), sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
