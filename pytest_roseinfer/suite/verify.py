"""``roseinfer verify``: run the suite on every fast path of roseinfer, on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

HELP = "check every fast path against its slow twin on this machine"
DESCRIPTION = (
    "Check every fast path of the KV cache and the engine against its slow twin: compiled kernels "
    "on a GPU when there is one, else Triton's interpreter on the CPU. Needs no network. Exit "
    "status 0 only when all paths were reached and all were equal."
)
_PROFILE = "dev"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    parser.add_argument("--seed", type=int, help="make the search repeatable")
    parser.add_argument(
        "--exhaustive",
        nargs="*",
        metavar="TARGET",
        help="run every short history of these caches, package.module:Class, or of roseinfer's own",
    )


def run(args: argparse.Namespace) -> int:
    import pytest
    import torch

    from pytest_roseinfer.report.strength import Strength
    from pytest_roseinfer.suite import exhaustive

    if args.exhaustive is not None:
        return exhaustive.run(args.exhaustive)
    gpu = torch.cuda.is_available() and not args.cpu
    arguments = ["--pyargs", "pytest_roseinfer.suite", "-p", "no:cacheprovider", "-v"]
    # The configuration of the folder it is called from is meant for other tests.
    arguments += ["-c", os.devnull, "--rootdir", "."]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # roseinfer is running
    arguments += ["--roseinfer-profile", _PROFILE]
    arguments += ["--roseinfer-gpu"] if gpu else []
    arguments += ["--roseinfer-seed", str(args.seed)] if args.seed is not None else []
    status = int(pytest.main(arguments))
    print(f"Searched with the profile {_PROFILE}. How much a search finds: {Strength.read()}.")
    return status
