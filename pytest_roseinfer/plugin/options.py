"""Command-line and ini options of the plugin."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import pytest

from pytest_roseinfer import words as mistakes
from pytest_roseinfer.settings import (
    ENDPOINT_TARGET,
    KEPT_FAILURES,
    KNOWN_FINDINGS,
    POLITE_RATE,
    PROFILES,
    RATE,
    SHIPPED_TARGETS,
    STEP_SECONDS,
    Endpoint,
    KnownFinding,
    Settings,
    Timing,
    choose_kernel_runtime,
    set_current,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_roseinfer.search.trace import ImportPolicy

# Options for a server under test.


def endpoint_of(
    url: str | None, model: str | None, rate: float | None, *, allow_remote: bool
) -> Endpoint | None:
    """Return the server to test; invalid combinations of options are a usage error."""
    if url is None:
        for name, value in {
            "model": model,
            "rate": rate,
            "allow-remote": allow_remote,
        }.items():
            if value:
                raise pytest.UsageError(
                    f"--roseinfer-{name}: no server to apply it to; add --roseinfer-endpoint URL"
                )
        return None
    if rate is not None and not 0 < rate < math.inf:
        raise pytest.UsageError(f"--roseinfer-rate {rate:g}: must be above 0")
    parts = _parts(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise pytest.UsageError(
            "--roseinfer-endpoint: the URL has credentials, a query or a fragment, and is printed "
            "in reports; pass a key in ROSEINFER_API_KEY"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in _ROOTS:
        raise pytest.UsageError(
            f"--roseinfer-endpoint {url}: not a server's base URL; use one such as "
            "http://127.0.0.1:8000"
        )
    here = _is_this_machine(parts.hostname)
    if not (allow_remote or here):
        raise pytest.UsageError(
            f"--roseinfer-endpoint {url}: another machine, which would get thousands of "
            "requests; add --roseinfer-allow-remote if it is yours"
        )
    if rate is None:
        rate = RATE if here else POLITE_RATE
    return Endpoint(url, model or "", _key(), rate, allow_remote)


def require_server(endpoint: Endpoint) -> Endpoint:
    """Connect to a server and fill in its model; an unusable server is a usage error."""
    from pytest_roseinfer.endpoint.server import Server, ServerError

    try:
        return replace(endpoint, model=Server(endpoint).model)
    except ServerError as error:
        raise pytest.UsageError(f"--roseinfer-endpoint {endpoint.url}: {error}") from None


def _parts(url: str) -> SplitResult:
    """Split a URL. Do not repeat an invalid one in the error: it may contain a key."""
    try:
        parts = urlsplit(url)
        _ = parts.port, (parts.hostname or "").encode("idna")  # validated only when accessed
    except ValueError:
        raise pytest.UsageError(
            "--roseinfer-endpoint: not a URL; use one such as http://127.0.0.1:8000, with a port "
            "of at most 65535"
        ) from None
    return parts


def _key() -> str:
    key = os.environ.get("ROSEINFER_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise pytest.UsageError(
            "ROSEINFER_API_KEY: holds a character that keys cannot have, such as a line break; "
            "remove it"
        )
    return key


_ROOTS = ("", "/", "/v1", "/v1/")


def _is_this_machine(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified  # 0.0.0.0 connects to loopback


_FLAG = {"action": "store_true"}
_FILE = {"metavar": "FILE"}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "gpu": (
        _FLAG,
        "put caches on the GPU, with compiled kernels; an error without a GPU",
    ),
    "target": (
        {"action": "append", "metavar": "MODULE:CLASS"},
        "adapter for pytest_roseinfer.suite to test; may be repeated; the default is roseinfer's "
        "own engine and caches",
    ),
    "endpoint": (
        {"metavar": "URL"},
        "OpenAI-compatible server for pytest_roseinfer.suite to test, or for --roseinfer-replay "
        "to run a mix on, such as http://127.0.0.1:8000; its key is read from ROSEINFER_API_KEY",
    ),
    "model": (
        {"metavar": "NAME"},
        "model name in requests to the server; the default is the first that the server lists",
    ),
    "rate": (
        {"type": float, "metavar": "N"},
        "maximum requests per second to the server; the default is 1000 on this machine and 50 on "
        "another; completions are short, so at a low rate few requests overlap",
    ),
    "allow-remote": (_FLAG, "allow --roseinfer-endpoint to be on another machine"),
    "profile": (
        {"metavar": "NAME"},
        f"search effort: {', '.join(PROFILES)}; the default is dev",
    ),
    "examples": (_NUMBER, "histories per search; the default is the profile's"),
    "steps": (_NUMBER, "maximum steps of one history; the default is the profile's"),
    "step-seconds": (
        {"type": float, "metavar": "S"},
        "seconds of processor time after which a step counts as hung and fails, as does one that "
        f"sleeps ten times as long; the default is {STEP_SECONDS:g}; 0 is unlimited, as for a "
        "debugger",
    ),
    "search-seconds": (
        {"type": float, "metavar": "S"},
        "seconds after which a test stops searching, reports what it tried, and claims no "
        "strength; 0, the default, is unlimited",
    ),
    "seed": (
        _NUMBER,
        "seed of the search, which makes it repeatable; the default is the number in "
        "--hypothesis-seed, else random",
    ),
    "required-paths": (
        {"choices": ["on", "off"]},
        "fail the run if a declared path or condition is never reached; the default is on",
    ),
    "report": (
        {"action": "append", "metavar": "FILE"},
        "write the coverage report to FILE.json or FILE.html; may be repeated",
    ),
    "known-findings": (
        _FILE,
        "TOML file of known findings, whose tests are reported as xfailed; the default is "
        f"{KNOWN_FINDINGS} at the project's root, if it exists",
    ),
    "fast-interpreter": (
        _FLAG,
        "use faster replacements for parts of Triton's interpreter in shipped tests and in checks "
        "of work, as adapters with fast_interpreter do",
    ),
    "keep": (
        _FLAG,
        f"write each failure to the folder {KEPT_FAILURES} at the project's root, whose histories "
        "and mixes every later run replays before it searches",
    ),
    "replay": (_FILE, "run only the history or the mix of requests in a trace file"),
    "replay-trust": (
        _FLAG,
        "with --roseinfer-replay, import any module that the file names; without it, the adapter "
        "must be a target of this run or a shipped one, and only the project's modules are "
        "imported",
    ),
    "costs": (
        _FILE,
        "baselines for the work of steps; the default is roseinfer-costs.json in the folder of "
        "each test; if given on the command line, a run that compares no step fails",
    ),
    "update-costs": (_FLAG, "write this run's work counts as the baselines for its versions"),
    "against": (
        {"metavar": "REF"},
        "fail if a decode step takes longer than in REF: a git revision, the path of a project, "
        "or NAME==VERSION; both are timed now, in turns",
    ),
    "noise-floor": (
        _FLAG,
        "time decode steps against themselves, and report the smallest difference that this "
        "machine can measure",
    ),
    "report-slower": (
        _FLAG,
        "with --roseinfer-against, report SLOWER steps without failing",
    ),
    "tpot-seconds": (
        {"type": float, "metavar": "N"},
        "seconds after which each comparison of steps ends, after its first series at the "
        "earliest; overrides the marker; UNDECIDED if too short",
    ),
    "timings": (
        {"metavar": "DIR"},
        "record times and work of steps in this folder, a line per run, with a plot; `roseinfer "
        "gates` shows them",
    ),
    "tpot": (
        _FILE,
        "fail if a decode step takes much longer than this file's baseline for this GPU",
    ),
    "update-tpot": (_FLAG, "write this run's times to the file of --roseinfer-tpot"),
}
"""Options by their names without ``--roseinfer-``: arguments for argparse, and help."""
_INI = dict.fromkeys(
    (
        *("profile", "examples", "steps", "step_seconds", "search_seconds", "seed", "costs"),
        "known_findings",
    ),
    "string",
)
_INI |= {"targets": "linelist", "report": "linelist", "required_paths": "bool"}
"""Ini options and their types; each is equivalent to the command-line option of its name."""


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("roseinfer", "conformance of KV caches")
    for name, (arguments, words) in _OPTIONS.items():
        group.addoption(f"--roseinfer-{name}", help=words, **arguments)
    for name, kind in _INI.items():
        # None distinguishes an ini file that does not set the option.
        parser.addini(f"roseinfer_{name}", f"see {_twin(name)}", type=kind, default=None)  # type: ignore[arg-type]


def _twin(name: str) -> str:
    """Return the command-line option of an ini option."""
    return f"--roseinfer-{'target' if name == 'targets' else name.replace('_', '-')}"


class OptionEntry(NamedTuple):
    """An option, as the reference page lists it."""

    usage: str
    """Option and argument, as in "--roseinfer-replay FILE"."""
    ini: str
    """Equivalent ini option; empty without one."""
    description: str


def entries() -> Iterator[OptionEntry]:
    """Yield all options in order."""
    inis = {_twin(name): f"roseinfer_{name}" for name in _INI}
    for name, (arguments, words) in _OPTIONS.items():
        option = f"--roseinfer-{name}"
        argument = arguments.get("metavar") or "|".join(arguments.get("choices", ()))
        yield OptionEntry(f"{option} {argument}".strip(), inis.get(option, ""), words)


def configured(config: pytest.Config) -> bool:
    """Return True if the command line or the ini file sets any option of the search."""
    options = (
        "target",
        "endpoint",
        "profile",
        "examples",
        "steps",
        "step-seconds",
        "search-seconds",
        "seed",
        "required-paths",
        "report",
    )
    return (
        _option(config, "gpu")
        or any(_option(config, name) is not None for name in options)
        or any(_ini(config, name) is not None for name in _INI)
    )


def read(config: pytest.Config) -> Settings:
    """Return the settings of a run; invalid options are a usage error."""
    with raising_usage_errors():
        return _read(config)


@contextmanager
def raising_usage_errors() -> Iterator[None]:
    try:
        yield
    except mistakes.OptionError as mistake:
        raise pytest.UsageError(str(mistake)) from None


def _read(config: pytest.Config) -> Settings:
    gpu = _option(config, "gpu")
    profile = _option_or_ini(config, "profile", "dev")
    usual = mistakes.profile_named(_option_label(config, "profile"), profile)
    named = tuple(dict.fromkeys(_option(config, "target") or ()))
    server = endpoint(config)
    if server is not None:
        if named:
            raise pytest.UsageError(
                "--roseinfer-target: --roseinfer-endpoint already selects the target; use one"
            )
        named = (ENDPOINT_TARGET,)
    required = _option(config, "required-paths")
    reports = tuple(_option_or_ini(config, "report", ()))
    for file in reports:
        mistakes.require_report(_option_label(config, "report"), file)
    costs = _ini(config, "costs")
    return Settings(
        profile=profile,
        examples=_number(config, "examples", at_least=1) or usual.examples,
        steps=_number(config, "steps", at_least=1) or usual.steps,
        step_seconds=step_seconds(config),
        search_seconds=_seconds(config, "search-seconds", 0.0),
        further_seconds=usual.further_seconds,
        seed=_seed(config),
        reuses_examples=_given_seed(config) is None,
        gpu=gpu,
        gpu_index=_gpu_index(config) if gpu else None,
        require_paths=required == "on" if required else _ini(config, "required_paths") is not False,
        fast_interpreter=_option(config, "fast-interpreter"),
        targets=named or tuple(_ini(config, "targets") or SHIPPED_TARGETS),
        endpoint=server,
        named_targets=named,
        reports=reports,
        known_findings=_known_findings(config),
        known_file=_option_or_ini(config, "known-findings", KNOWN_FINDINGS),
        failures_dir=str(config.rootpath / ".roseinfer"),
        kept_dir=str(config.rootpath / KEPT_FAILURES),
        keeps_failures=_option(config, "keep"),
        # A command-line path is relative to the current folder, an ini path to the ini file.
        costs=_relative_path(config, "costs") or (str(config.rootpath / costs) if costs else None),
        costs_requested=_option(config, "costs") is not None,
        update_costs=_option(config, "update-costs"),
        timing=_timing(config),
    )


def known_findings(config: pytest.Config) -> Mapping[str, KnownFinding]:
    """Return the known findings of a run; an invalid file is a usage error."""
    with raising_usage_errors():
        return _known_findings(config)


def _known_findings(config: pytest.Config) -> Mapping[str, KnownFinding]:
    """Return the known findings of a run by digest; none where xfail has no effect."""
    named = _relative_path(config, "known-findings")
    in_ini = _ini(config, "known_findings")
    file = Path(named) if named else config.rootpath / (in_ini or KNOWN_FINDINGS)
    if not (named or in_ini or file.exists()):
        return {}
    from pytest_roseinfer.findings.known import read_known

    known = read_known(file)
    is_off = config.getoption("runxfail", False) or not config.pluginmanager.hasplugin("skipping")
    return {} if is_off else known


def endpoint(config: pytest.Config) -> Endpoint | None:
    """Return the server that the command line names, without connecting to it."""
    values = {name: _option(config, name) for name in ("endpoint", "model", "rate")}
    allow_remote = _option(config, "allow-remote")
    if not (allow_remote or any(value is not None for value in values.values())):
        return None
    return endpoint_of(*values.values(), allow_remote=allow_remote)


def _timing(config: pytest.Config) -> Timing:
    timing = Timing(
        against=_option(config, "against") or "",
        noise_floor=_option(config, "noise-floor"),
        report_slower=_option(config, "report-slower"),
        seconds=_option(config, "tpot-seconds"),
        tpot=_relative_path(config, "tpot"),
        update_tpot=_option(config, "update-tpot"),
        folder=_relative_path(config, "timings"),
    )
    if timing.against and timing.noise_floor:
        raise pytest.UsageError(
            "--roseinfer-noise-floor: compares a step with itself, --roseinfer-against with "
            "another; choose one"
        )
    if timing.update_tpot and timing.tpot is None:
        raise pytest.UsageError(
            "--roseinfer-update-tpot: no file to write; add --roseinfer-tpot FILE"
        )
    if timing.seconds is not None and not 0 < timing.seconds < math.inf:
        raise pytest.UsageError(f"--roseinfer-tpot-seconds {timing.seconds:g}: must be above 0")
    if timing.seconds is not None and not timing.paired:
        raise pytest.UsageError(
            "--roseinfer-tpot-seconds: no comparison to end; add --roseinfer-against"
        )
    if timing.report_slower and not timing.against:
        raise pytest.UsageError(
            "--roseinfer-report-slower: no comparison to report; add --roseinfer-against"
        )
    return timing


def check_baselines(settings: Settings) -> None:
    """Refuse unreadable baseline files that the command line or the ini file names."""
    files = [file for file in (settings.costs, settings.timing.tpot) if file]
    if not files:
        return
    from pytest_roseinfer.gates.gate import CannotCompare, read_steps

    for file in files:
        try:
            read_steps(Path(file))
        except CannotCompare as error:
            raise pytest.UsageError(str(error)) from None


def refuse_unknown(words: Iterable[str]) -> None:
    """Refuse a misspelt ``--roseinfer-`` option, and suggest the right one."""
    option_names = [f"--roseinfer-{name}" for name in _OPTIONS]
    for word in words:
        option = word.partition("=")[0]
        if option == "--":
            return
        misspelt = option.startswith("--roseinfer-") and option not in option_names
        if misspelt and (suggestion := mistakes.did_you_mean(option, option_names)):
            raise pytest.UsageError(f"unrecognized arguments: {word}{suggestion}")


def check_targets(config: pytest.Config, settings: Settings) -> None:
    """Refuse targets that cannot be imported, if this run tests them.

    Also fill in the model of a server if no model was named.
    """
    if not (settings.named_targets or (settings.chosen_targets and tests_targets(config))):
        return
    from pytest_roseinfer.adapters.load_target import TargetError, load_target, require_target

    find_modules_here(config)
    choose_kernel_runtime()
    try:
        for name in settings.targets:  # check all names first: an import takes seconds
            require_target(name)
        for name in settings.targets:
            load_target(name)
        if settings.endpoint is not None:
            set_current(replace(settings, endpoint=require_server(settings.endpoint)))
    except TargetError as error:
        option = "--roseinfer-target" if settings.named_targets else "roseinfer_targets"
        raise pytest.UsageError(f"{option}: {error}") from error


def tests_targets(config: pytest.Config) -> bool:
    """Return True if this run includes the suite that tests every target."""
    return any("pytest_roseinfer" in argument for argument in config.args)


def trace_import_policy(config: pytest.Config) -> ImportPolicy:
    """Return the imports that a trace may cause in this run."""
    from pytest_roseinfer.search.trace import ImportPolicy

    return ImportPolicy(
        targets={
            *(_option(config, "target") or ()),
            *(_ini(config, "targets") or ()),
        },
        project=config.rootpath,
        trusted=_option(config, "replay-trust"),
    )


def find_modules_here(config: pytest.Config) -> None:
    """Make modules of the current folder importable, as ``python -m pytest`` does."""
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(f"--roseinfer-{name}")


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getini(f"roseinfer_{name.replace('-', '_')}")
    except (ValueError, pytest.UsageError) as error:  # its message does not name the option
        raise pytest.UsageError(f"roseinfer_{name}: {error}") from None


def _option_or_ini(config: pytest.Config, name: str, default: Any) -> Any:
    """Return the value from the command line, else from the ini file, else the default."""
    value = _option(config, name)
    value = _ini(config, name) if value is None else value
    return default if value is None else value


def _option_label(config: pytest.Config, name: str) -> str:
    """Return the option as the user wrote it, for error messages."""
    in_ini = _option(config, name) is None
    return f"roseinfer_{name.replace('-', '_')} =" if in_ini else f"--roseinfer-{name}"


def _relative_path(config: pytest.Config, name: str) -> str | None:
    path = _option(config, name)
    return str(config.invocation_params.dir / path) if path else None


def _number(config: pytest.Config, name: str, *, at_least: int) -> int | None:
    value = _option_or_ini(config, name, None)
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        raise pytest.UsageError(f"roseinfer_{name} = {value}: not a whole number") from None
    mistakes.require_at_least(_option_label(config, name), number, at_least)
    return number


def step_seconds(config: pytest.Config) -> float:
    return _seconds(config, "step-seconds", STEP_SECONDS)


def _seconds(config: pytest.Config, name: str, default: float) -> float:
    value = _option_or_ini(config, name, default)
    try:
        seconds = float(value)
    except ValueError:
        raise pytest.UsageError(f"{_option_label(config, name)} {value}: not a number") from None
    if not 0 <= seconds < math.inf:
        raise pytest.UsageError(f"roseinfer {name} = {seconds:g}: must be 0 or more")
    return seconds


def _seed(config: pytest.Config) -> int:
    """Return the seed of the options, else of the xdist controller, else a random one."""
    seed = _given_seed(config)
    if seed is None:
        seed = getattr(config, "workerinput", {}).get("roseinfer_seed")
    return int.from_bytes(os.urandom(4), "big") if seed is None else seed


def _given_seed(config: pytest.Config) -> int | None:
    """Return the seed of the options or of a derandomized profile; None to draw one."""
    seed = _number(config, "seed", at_least=0)
    if seed is not None:
        return seed
    of_hypothesis = str(config.getoption("--hypothesis-seed", default=None))  # or "random"
    if of_hypothesis.isdigit():
        return int(of_hypothesis)
    return 0 if _derandomized(config) else None


def _derandomized(config: pytest.Config) -> bool:
    """Return True if the user chose a Hypothesis profile with ``derandomize``.

    On a CI, Hypothesis itself chooses such a profile, which is no reason to search less.
    """
    named = config.getoption("--hypothesis-profile", default=None)
    if not (named or "hypothesis" in sys.modules):  # a profile would be loaded in a conftest.py
        return False
    from hypothesis import settings as profiles
    from hypothesis.errors import InvalidArgument

    with suppress(InvalidArgument):  # Hypothesis refuses an unknown name itself
        if named:
            return profiles.get_profile(named).derandomize
    chosen, automatic = profiles.default, []
    for name in ("default", "ci"):
        with suppress(InvalidArgument):  # older versions have no profile for a CI
            automatic.append(profiles.get_profile(name))
    return (
        chosen is not None and chosen.derandomize and all(chosen is not each for each in automatic)
    )


def _gpu_index(config: pytest.Config) -> int | None:
    """Return the GPU of this pytest-xdist worker; None without workers."""
    if importlib.util.find_spec("torch") is None:
        raise pytest.UsageError("--roseinfer-gpu: torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--roseinfer-gpu: torch finds no CUDA device on this machine")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise pytest.UsageError(
            "--roseinfer-gpu: TRITON_INTERPRET is set, so kernels would not be compiled; unset it"
        )
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    number = worker.removeprefix("gw")
    return int(number) % torch.cuda.device_count() if number.isdigit() else None
