"""``roseinfer verify``: run the suite on every fast path of roseinfer, on this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.load_target import TargetError, require_module
from pytest_roseinfer.mistakes import (
    Mistake,
    profile_named,
    require_at_least,
    require_report,
)
from pytest_roseinfer.settings import PROFILES, SHIPPED_TARGETS

if TYPE_CHECKING:
    import argparse

HELP = "check every fast path against its slow twin on this machine"
DESCRIPTION = (
    "Check every fast path of the KV cache and the engine against its slow twin: compiled kernels "
    "on a GPU when there is one, else Triton's interpreter on the CPU. Needs no network. Exit "
    "status 0 only when all paths were reached and all were equal."
)
_LEAST = {"examples": 1, "seed": 0}
_SHARED = ("target", "profile", "examples", "seed", "report")
"""The plugin has each of these too, as ``--roseinfer-NAME``."""
_USAGE_ERROR = 4
"""As pytest ends where its options make no sense."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cpu", action="store_true", help="leave a GPU alone")
    adapter = "check this adapter instead of roseinfer's own; may be repeated"
    add("--target", action="append", metavar="MODULE:CLASS", help=adapter)
    add("--profile", default="dev", help=f"how hard to look: {', '.join(PROFILES)} (default: dev)")
    add("--examples", type=int, metavar="N", help="histories for each search")
    add("--seed", type=int, metavar="N", help="make the search repeatable")
    reports = "write what was reached to FILE.json or FILE.html; may be repeated"
    add("--report", action="append", metavar="FILE", help=reports)
    add(
        "--exhaustive",
        nargs="*",
        metavar="TARGET",
        help="run every short history of these caches, package.module:Class, or of roseinfer's own",
    )


def run(args: argparse.Namespace) -> int:
    if os.getcwd() not in sys.path:  # as for --roseinfer-target
        sys.path.insert(0, os.getcwd())
    if args.exhaustive is not None:
        from pytest_roseinfer.suite import exhaustive

        return exhaustive.run(args.exhaustive)
    try:
        _refuse_mistakes(args)
    except (Mistake, TargetError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return _search(args)


def _refuse_mistakes(args: argparse.Namespace) -> None:
    """Refuse what pytest would refuse too, but after seconds."""
    profile_named("--profile", args.profile)
    for name, least in _LEAST.items():
        if (number := getattr(args, name)) is not None:
            require_at_least(f"--{name}", number, least)
    for file in args.report or ():
        require_report("--report", file)
    for name in args.target or ():
        require_module(name)


def _search(args: argparse.Namespace) -> int:
    names = ", ".join(name.rpartition(":")[2] for name in args.target or SHIPPED_TARGETS)
    print(f"roseinfer verify: checking {names}", flush=True)  # the imports below take seconds

    import pytest
    import torch

    from pytest_roseinfer.report.strength import Searched
    from pytest_roseinfer.suite.workers import WORKERS, Workers, usable_cores

    gpu = torch.cuda.is_available() and not args.cpu
    arguments = ["--pyargs", "pytest_roseinfer.suite", "-p", "no:cacheprovider", "-v", "-rfEs"]
    # The configuration of the folder it is called from is meant for other tests.
    arguments += ["-c", os.devnull, "--rootdir", "."]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # roseinfer is running
    arguments += ["--roseinfer-gpu"] if gpu else []
    for name in _SHARED:
        said = getattr(args, name)
        values = said if isinstance(said, list) else [said]
        arguments += [f"--roseinfer-{name}={value}" for value in values if value is not None]
    # Tests that share one GPU would wait for each other.
    workers = 1 if gpu else min(WORKERS, usable_cores())
    searched = Searched(args.profile)
    status = int(pytest.main(arguments, plugins=[Workers(workers), searched]))
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(searched)
    return status
