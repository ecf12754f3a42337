"""Command ``roseinfer verify``: run the suite on all fast paths of roseinfer, on this machine."""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.load_target import TargetError, require_target
from pytest_roseinfer.settings import PROFILES, SHIPPED_TARGETS, Settings
from pytest_roseinfer.words import OptionError, profile_named, require_at_least, require_report
from roseinfer._plugin import interrupts_kill

if TYPE_CHECKING:
    import argparse

HELP = "check every fast path against its slow twin on this machine"
DESCRIPTION = (
    "Check every fast path of the KV cache and the engine against its slow twin: compiled kernels "
    "on a GPU if this machine has one, else Triton's interpreter on the CPU. Needs no network. The "
    "exit status is 0 only if all paths were reached and equal to their twins."
)
_LEAST = {"examples": 1, "seed": 0, "search_seconds": 0}
_OF_SEARCHES = ("examples", "search_seconds", "seed", "report")
"""Options that make no sense with --exhaustive."""
_SHARED = ("target", "profile", "examples", "search_seconds", "seed", "report")
"""Options that are passed to the plugin as ``--roseinfer-NAME``."""
_USAGE_ERROR = 4
"""Exit code of pytest for a usage error."""
_INTERRUPTED = 2
"""Exit code of pytest for Ctrl-C."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cpu", action="store_true", help="do not use the GPU")
    adapter = "check this adapter instead of roseinfer's own; may be repeated"
    add("--target", action="append", metavar="MODULE:CLASS", help=adapter)
    add("--profile", default="dev", help=f"search effort: {', '.join(PROFILES)} (default: dev)")
    add("--examples", type=int, metavar="N", help="histories per search")
    add("--search-seconds", type=float, metavar="N", help="maximum per test; 0 is unlimited")
    add("--seed", type=int, metavar="N", help="make the search repeatable")
    reports = "write the coverage report to FILE.json or FILE.html; may be repeated"
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
    except (OptionError, TargetError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED


def _refuse_mistakes(args: argparse.Namespace) -> None:
    """Refuse invalid arguments at once, which pytest would refuse seconds later."""
    profile_named("--profile", args.profile)
    if args.exhaustive is not None:
        for name in _OF_SEARCHES:
            if getattr(args, name) is not None:
                raise OptionError(
                    f"{_with_dashes(f'--{name}')}: is for searches, and --exhaustive runs all "
                    "histories"
                )
    for name, minimum in _LEAST.items():
        if (number := getattr(args, name)) is not None:
            require_at_least(_with_dashes(f"--{name}"), number, minimum)
    for file in args.report or ():
        require_report("--report", file)
    for name in (*(args.target or ()), *(args.exhaustive or ())):
        require_target(name)


def _with_dashes(name: str) -> str:
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

    from pytest_roseinfer.report.verdict import SearchReporter
    from pytest_roseinfer.suite.workers import Workers, workers_for

    gpu = torch.cuda.is_available() and not args.cpu
    arguments = ["--pyargs", "pytest_roseinfer.suite", "-p", "no:cacheprovider", "-v", "-rfEs"]
    # Ignore the configuration of the current folder, which is for other tests.
    arguments += ["-c", os.devnull, "--rootdir", ".", "--noconftest"]
    arguments += [
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]  # roseinfer is imported already
    arguments += ["--roseinfer-gpu"] if gpu else []
    for name in _SHARED:
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        option = _with_dashes(f"--roseinfer-{name}")
        arguments += [f"{option}={value}" for value in values if value is not None]
    profile = PROFILES[args.profile]
    examples = args.examples or profile.examples
    searched = SearchReporter(Settings(args.profile, examples, profile.steps))
    began = monotonic()
    status = int(pytest.main(arguments, plugins=[Workers(workers_for(gpu=gpu)), searched]))
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(searched.in_words(monotonic() - began))
    return status
