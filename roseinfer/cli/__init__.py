"""The ``roseinfer`` command."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from roseinfer.cli import generate

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="roseinfer", description="A small LLM inference engine, and proof that it is right."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generation = commands.add_parser(
        "generate",
        help="continue prompts with a language model",
        description=generate.DESCRIPTION,
    )
    generate.add_options(generation)
    generation.set_defaults(run=generate.run_command)
    verify = commands.add_parser(
        "verify",
        help="check every fast path against its slow twin on this machine",
        description="Check every fast path of the KV cache and the engine against its slow "
        "twin: compiled kernels on a GPU when there is one, else Triton's interpreter on the CPU. "
        "Needs no network. Exit status 0 only when all paths were reached and all were equal.",
    )
    verify.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    verify.add_argument("--seed", type=int, help="make the search repeatable")
    verify.set_defaults(run=_verify)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


def _verify(args: argparse.Namespace) -> int:
    import pytest
    import torch

    gpu = torch.cuda.is_available() and not args.cpu
    arguments = ["--pyargs", "pytest_roseinfer.suite", "-p", "no:cacheprovider", "-v"]
    # Whatever the folder it is called from says about its own tests is not meant for these.
    arguments += ["-c", os.devnull, "--rootdir", "."]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # roseinfer is running
    arguments += ["--roseinfer-profile", "dev"]
    arguments += ["--roseinfer-gpu"] if gpu else []
    arguments += ["--roseinfer-seed", str(args.seed)] if args.seed is not None else []
    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
