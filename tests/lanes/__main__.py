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
    "Run every kernel under a sanitizer: first see that it finds what is planted, then judge the "
    "launches of the shipped searches and of the tests of kernels, interpreted on the CPU. Exit "
    "status 0 only when every kernel was launched and none left its tensors."
)
_LAUNCHING = (
    "pytest_roseinfer/suite",
    *(f"tests/{folder}" for folder in ("attention", "decode", "fused", "kv")),
)
_IMPOSSIBLE = 4
"""As pytest ends where its options make no sense."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.lanes", description=_DESCRIPTION)
    parser.add_argument("--profile", default="dev", help="how hard to search (default: dev)")
    parser.add_argument("--seed", help="make the searches repeatable")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="instead run the compiled kernels under NVIDIA's compute-sanitizer",
    )
    asked = parser.parse_args(argv)
    if asked.gpu:
        return _on_a_gpu()
    planted = _pytest("tests/lanes")
    if planted:
        return planted
    options = ["--roseinfer-profile", asked.profile]
    if asked.seed is not None:
        options += ["--roseinfer-seed", asked.seed]
    plugin = ["-p", "tests.lanes.plugin", "--require-every-kernel"]
    return _pytest(*plugin, *options, *_LAUNCHING)


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _on_a_gpu() -> int:
    if reason := memcheck.why_impossible():
        print(f"ERROR: {reason}", file=sys.stderr)
        return _IMPOSSIBLE
    wrong = memcheck.check()
    print(*(wrong or ["every call stays within its tensors"]), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
