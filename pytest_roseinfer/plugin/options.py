"""Command-line options, their twins in the ini file, and the settings they add up to."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_roseinfer.settings import PROFILES, SHIPPED_TARGETS, Settings, Timing

_PROFILE_NAMES = ", ".join(PROFILES)
_REPORT_SUFFIXES = (".json", ".html")
_INI = {
    "targets": "linelist",
    "profile": "string",
    "examples": "string",
    "steps": "string",
    "seed": "string",
    "required_paths": "bool",
    "report": "linelist",
    "costs": "string",
}
"""Ini options and their types; each does what the command-line option of its name does."""


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("roseinfer", "conformance of KV caches")
    option = group.addoption
    option(
        "--roseinfer-gpu",
        action="store_true",
        help="run on the GPU with compiled kernels; an error when there is none",
    )
    option(
        "--roseinfer-target",
        action="append",
        metavar="MODULE:CLASS",
        help="adapter for pytest_roseinfer.suite to test; may be repeated (ini: roseinfer_targets)",
    )
    option(
        "--roseinfer-profile",
        choices=list(PROFILES),
        help="how hard to look; the default is dev",
    )
    option("--roseinfer-examples", type=int, metavar="N", help="histories for each search")
    option("--roseinfer-steps", type=int, metavar="N", help="most steps of one history")
    option("--roseinfer-seed", type=int, metavar="N", help="make the search repeatable; else drawn")
    option(
        "--roseinfer-required-paths",
        choices=["on", "off"],
        help="whether a declared path that was not reached fails the run; the default is on",
    )
    option(
        "--roseinfer-report",
        action="append",
        metavar="FILE",
        help="write what was reached to FILE.json or FILE.html; may be repeated",
    )
    option(
        "--roseinfer-replay", metavar="FILE", help="run the history in a trace file, and only it"
    )
    option(
        "--roseinfer-costs",
        metavar="FILE",
        help="baselines for the work of steps; without it each folder of tests has a "
        "roseinfer-costs.json",
    )
    option(
        "--roseinfer-update-costs",
        action="store_true",
        help="make what steps do now their baselines, for the versions of this run",
    )
    _add_timing(group)
    for name, kind in _INI.items():
        twin = "target" if name == "targets" else name.replace("_", "-")
        # No default, so that what the ini file says can be told from what it leaves open.
        parser.addini(f"roseinfer_{name}", f"see --roseinfer-{twin}", type=kind, default=None)  # type: ignore[arg-type]


def _add_timing(group: pytest.OptionGroup) -> None:
    option = group.addoption
    option(
        "--roseinfer-against",
        metavar="REF",
        help="fail where a decode step takes longer than at this git revision, in the project at "
        "this path, or in this NAME==VERSION; both are timed now, in turns",
    )
    option(
        "--roseinfer-noise-floor",
        action="store_true",
        help="time decode steps against themselves and say what this machine can tell apart",
    )
    option(
        "--roseinfer-report-slower",
        action="store_true",
        help="say where a step is SLOWER, and fail nothing for it",
    )
    option(
        "--roseinfer-timings",
        metavar="DIR",
        help="keep the results of each run there as JSON, with a plot of this one and all before",
    )
    option(
        "--roseinfer-tpot",
        metavar="FILE",
        help="fail where a decode step takes much longer than this file says for this GPU",
    )
    option(
        "--roseinfer-update-tpot",
        action="store_true",
        help="make the times of this run those of the file",
    )


def configured(config: pytest.Config) -> bool:
    """Whether this run was told anything about the harness."""
    options = ("target", "profile", "examples", "steps", "seed", "required-paths", "report")
    return (
        bool(config.getoption("--roseinfer-gpu"))
        or any(config.getoption(f"--roseinfer-{name}") is not None for name in options)
        or any(_ini(config, name) is not None for name in _INI)
    )


def read(config: pytest.Config) -> Settings:
    """The settings of a run; what makes no sense is a usage error."""
    gpu = bool(config.getoption("--roseinfer-gpu"))
    profile = _chosen(config, "profile", "dev")
    if profile not in PROFILES:
        raise pytest.UsageError(f"roseinfer_profile = {profile}: choose one of {_PROFILE_NAMES}")
    named = tuple(dict.fromkeys(config.getoption("--roseinfer-target") or ()))
    required = config.getoption("--roseinfer-required-paths")
    reports = tuple(_chosen(config, "report", ()))
    for file in reports:
        if Path(file).suffix not in _REPORT_SUFFIXES:
            raise pytest.UsageError(
                f"--roseinfer-report {file}: the name must end in {' or '.join(_REPORT_SUFFIXES)}"
            )
    return Settings(
        profile=profile,
        examples=_number(config, "examples", at_least=1) or PROFILES[profile].examples,
        steps=_number(config, "steps", at_least=1) or PROFILES[profile].steps,
        seed=_seed(config),
        gpu=gpu,
        gpu_index=_gpu_index(config) if gpu else None,
        require_paths=required == "on" if required else _ini(config, "required_paths") is not False,
        targets=named or tuple(_ini(config, "targets") or SHIPPED_TARGETS),
        named_targets=named,
        reports=reports,
        failures_dir=str(config.rootpath / ".roseinfer"),
        costs=_costs(config),
        costs_requested=config.getoption("--roseinfer-costs") is not None,
        update_costs=bool(config.getoption("--roseinfer-update-costs")),
        timing=_timing(config),
    )


def _timing(config: pytest.Config) -> Timing:
    asked = Timing(
        against=config.getoption("--roseinfer-against") or "",
        noise_floor=config.getoption("--roseinfer-noise-floor"),
        report_slower=config.getoption("--roseinfer-report-slower"),
        tpot=_from_here(config, "--roseinfer-tpot"),
        update_tpot=config.getoption("--roseinfer-update-tpot"),
        folder=_from_here(config, "--roseinfer-timings"),
    )
    if asked.against and asked.noise_floor:
        raise pytest.UsageError(
            "--roseinfer-noise-floor compares a step with itself, and --roseinfer-against with "
            "another: choose one"
        )
    if asked.update_tpot and asked.tpot is None:
        raise pytest.UsageError("--roseinfer-update-tpot: of which file? --roseinfer-tpot FILE")
    if asked.folder and not asked.paired:
        raise pytest.UsageError("--roseinfer-timings keeps comparisons: add --roseinfer-against")
    if asked.report_slower and not asked.against:
        raise pytest.UsageError("--roseinfer-report-slower: slower than what? --roseinfer-against")
    return asked


def _from_here(config: pytest.Config, option: str) -> str | None:
    said = config.getoption(option)
    return str(config.invocation_params.dir / said) if said else None


def check_targets(config: pytest.Config, asked: Settings) -> None:
    """Refuse targets that cannot be imported, if this run is to test them."""
    from_ini = () if asked.named_targets else asked.chosen_targets
    suite = any("pytest_roseinfer" in argument for argument in config.args)
    if not (asked.named_targets or (from_ini and suite)):
        return
    from pytest_roseinfer.adapters.finding import TargetError, load_target
    from pytest_roseinfer.settings import choose_kernel_runtime

    find_modules_here(config)
    choose_kernel_runtime()
    try:
        for name in asked.targets:
            load_target(name)
    except TargetError as error:
        said = "roseinfer_targets" if from_ini else "--roseinfer-target"
        raise pytest.UsageError(f"{said}: {error}") from error


def find_modules_here(config: pytest.Config) -> None:
    """Let targets be named from where pytest was started, as ``python -m pytest`` would."""
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getini(f"roseinfer_{name}")
    except (ValueError, pytest.UsageError) as error:  # which does not say what it is about
        raise pytest.UsageError(f"roseinfer_{name}: {error}") from None


def _chosen(config: pytest.Config, name: str, default: Any) -> Any:
    """What the command line says, or else the ini file."""
    said = config.getoption(f"--roseinfer-{name}")
    said = _ini(config, name) if said is None else said
    return default if said is None else said


def _number(config: pytest.Config, name: str, *, at_least: int) -> int | None:
    said = _chosen(config, name, None)
    if said is None:
        return None
    try:
        number = int(said)
    except ValueError:
        raise pytest.UsageError(f"roseinfer_{name} = {said}: not a whole number") from None
    if number < at_least:
        raise pytest.UsageError(f"roseinfer {name} = {number}: must be at least {at_least}")
    return number


def _seed(config: pytest.Config) -> int:
    """As asked; else that of the controller, in a worker of pytest-xdist; else any."""
    said = _number(config, "seed", at_least=0)
    if said is not None:
        return said
    given = getattr(config, "workerinput", {}).get("roseinfer_seed")
    if given is None:  # Hypothesis's own option, which may also say "random"
        given = config.getoption("--hypothesis-seed", default=None)
    return int(given) if str(given).isdigit() else int.from_bytes(os.urandom(4), "big")


def _costs(config: pytest.Config) -> str | None:
    """A path that the command line says is one from here; the ini file says one from its own."""
    if said := config.getoption("--roseinfer-costs"):
        return str(config.invocation_params.dir / said)
    said = _ini(config, "costs")
    return str(config.rootpath / said) if said else None


def _gpu_index(config: pytest.Config) -> int | None:
    """The GPU of this worker of pytest-xdist; None without workers."""
    if importlib.util.find_spec("torch") is None:
        raise pytest.UsageError("--roseinfer-gpu: torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--roseinfer-gpu: torch finds no CUDA device on this machine")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise pytest.UsageError(
            "--roseinfer-gpu: TRITON_INTERPRET is set, and kernels would not be compiled: unset it"
        )
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    number = worker.removeprefix("gw")
    return int(number) % torch.cuda.device_count() if number.isdigit() else None
