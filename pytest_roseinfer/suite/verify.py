"""``roseinfer verify``: run the suite on every fast path of roseinfer, on this machine."""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.load_target import TargetError, require_target
from pytest_roseinfer.settings import PROFILES, SHIPPED_TARGETS, Settings
from pytest_roseinfer.words import Mistake, profile_named, require_at_least, require_report
from roseinfer import interrupts_kill

if TYPE_CHECKING:
    import argparse

HELP = "check every fast path against its slow twin on this machine"
DESCRIPTION = (
    "Check every fast path of the KV cache and the engine against its slow twin: compiled kernels "
    "on a GPU when there is one, else Triton's interpreter on the CPU. Needs no network. Exit "
    "status 0 only when all paths were equal and none is never reached."
)
_LEAST = {"examples": 1, "seed": 0, "search_seconds": 0}
_OF_SEARCHES = ("examples", "search_seconds", "seed", "report")
"""These mean nothing where every history is run."""
_SHARED = ("target", "profile", "examples", "search_seconds", "seed", "report")
"""The plugin has each of these too, as ``--roseinfer-NAME``."""
_USAGE_ERROR = 4
"""As pytest ends where its options make no sense."""
_INTERRUPTED = 2
"""As pytest ends by Ctrl-C."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cpu", action="store_true", help="leave a GPU alone")
    adapter = "check this adapter instead of roseinfer's own; may be repeated"
    add("--target", action="append", metavar="MODULE:CLASS", help=adapter)
    add("--profile", default="dev", help=f"how hard to look: {', '.join(PROFILES)} (default: dev)")
    add("--examples", type=int, metavar="N", help="histories for each search")
    add("--search-seconds", type=float, metavar="N", help="no test searches longer; 0 is no limit")
    add("--seed", type=int, metavar="N", help="make the search repeatable")
    reports = "write what was reached to FILE.json or FILE.html; may be repeated"
    add("--report", action="append", metavar="FILE", help=reports)
    add(
        "--exhaustive",
        nargs="*",
        metavar="TARGET",
        help="run every short history of these caches and of --target, or of roseinfer's own",
    )


def run(args: argparse.Namespace) -> int:
    if os.getcwd() not in sys.path:  # as for --roseinfer-target
        sys.path.insert(0, os.getcwd())
    try:
        _refuse_mistakes(args)
        return (
            _search(args)
            if args.exhaustive is None
            else _walk([*args.exhaustive, *(args.target or ())])
        )
    except (Mistake, TargetError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED


def _refuse_mistakes(args: argparse.Namespace) -> None:
    """Refuse what pytest would refuse too, but after seconds."""
    profile_named("--profile", args.profile)
    if args.exhaustive is not None:
        for name in _OF_SEARCHES:
            if getattr(args, name) is not None:
                raise Mistake(f"{_dashed(f'--{name}')} is for searches, and --exhaustive runs all")
    for name, least in _LEAST.items():
        if (number := getattr(args, name)) is not None:
            require_at_least(_dashed(f"--{name}"), number, least)
    for file in args.report or ():
        require_report("--report", file)
    for name in (*(args.target or ()), *(args.exhaustive or ())):
        require_target(name)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _walk(names: list[str]) -> int:
    print("roseinfer verify: running every short history", flush=True)  # the import takes seconds
    with interrupts_kill():
        from pytest_roseinfer.suite import exhaustive

    return exhaustive.run(names)


def _search(args: argparse.Namespace) -> int:
    names = ", ".join(name.rpartition(":")[2] for name in args.target or SHIPPED_TARGETS)
    print(f"roseinfer verify: checking {names}", flush=True)  # the imports below take seconds

    import pytest

    with interrupts_kill():
        import torch

    from pytest_roseinfer.report.verdict import Searched
    from pytest_roseinfer.suite.workers import Workers, workers_for

    gpu = torch.cuda.is_available() and not args.cpu
    arguments = ["--pyargs", "pytest_roseinfer.suite", "-p", "no:cacheprovider", "-v", "-rfEs"]
    # The configuration of the folder it is called from is meant for other tests.
    arguments += ["-c", os.devnull, "--rootdir", ".", "--noconftest"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # roseinfer is running
    arguments += ["--roseinfer-gpu"] if gpu else []
    for name in _SHARED:
        said = getattr(args, name)
        values = said if isinstance(said, list) else [said]
        option = _dashed(f"--roseinfer-{name}")
        arguments += [f"{option}={value}" for value in values if value is not None]
    usual = PROFILES[args.profile]
    examples = args.examples or usual.examples
    searched = Searched(Settings(args.profile, examples, usual.steps))
    began = monotonic()
    status = int(pytest.main(arguments, plugins=[Workers(workers_for(gpu=gpu)), searched]))
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(searched.in_words(monotonic() - began))
    return status
