"""The plugin's command line options, those about servers among them."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import pytest

from pytest_roseinfer import words as mistakes
from pytest_roseinfer.settings import (
    ENDPOINT_TARGET,
    POLITE_RATE,
    PROFILES,
    RATE,
    SHIPPED_TARGETS,
    STEP_SECONDS,
    Endpoint,
    Settings,
    Timing,
    choose_kernel_runtime,
    set_current,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_roseinfer.search.trace import Allowed

# The options about a server, and which servers are asked at all.


def endpoint_of(
    url: str | None, model: str | None, rate: float | None, *, anywhere: bool
) -> Endpoint | None:
    """Return the server that is to be tested; what makes no sense is a usage error."""
    if url is None:
        for name, given in {"model": model, "rate": rate, "endpoint-anywhere": anywhere}.items():
            if given:
                raise pytest.UsageError(
                    f"--roseinfer-{name} is about a server: add --roseinfer-endpoint URL"
                )
        return None
    if rate is not None and not 0 < rate < math.inf:
        raise pytest.UsageError(f"--roseinfer-rate {rate:g}: it must be above 0")
    parts = _parts(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise pytest.UsageError(
            "--roseinfer-endpoint is shown to whoever reads of this run: put no key into it, but "
            "into ROSEINFER_API_KEY"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in _ROOTS:
        raise pytest.UsageError(
            f"--roseinfer-endpoint {url}: give an address such as http://127.0.0.1:8000"
        )
    here = _is_this_machine(parts.hostname)
    if not (anywhere or here):
        raise pytest.UsageError(
            f"--roseinfer-endpoint {url} is another machine, which would get thousands of "
            "requests: add --roseinfer-endpoint-anywhere if it is yours"
        )
    if rate is None:
        rate = RATE if here else POLITE_RATE
    return Endpoint(url, model or "", _key(), rate, anywhere)


def require_server(endpoint: Endpoint) -> Endpoint:
    """Return it with the model that it is asked for; refuse one that cannot be asked at all."""
    from pytest_roseinfer.endpoint.server import Server, ServerError

    try:
        return replace(endpoint, model=Server(endpoint).model)
    except ServerError as error:
        raise pytest.UsageError(f"--roseinfer-endpoint {endpoint.url}: {error}") from None


def _parts(url: str) -> SplitResult:
    """Take an address apart. One that is none is not repeated: there may be a key in it."""
    try:
        parts = urlsplit(url)
        _ = parts.port, (parts.hostname or "").encode("idna")  # which are looked at when asked for
    except ValueError:
        raise pytest.UsageError(
            "--roseinfer-endpoint is no address: give one such as http://127.0.0.1:8000, whose "
            "port is a number up to 65535"
        ) from None
    return parts


def _key() -> str:
    key = os.environ.get("ROSEINFER_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise pytest.UsageError(
            "ROSEINFER_API_KEY holds a character that no key has, as a line break: leave it out"
        )
    return key


_ROOTS = ("", "/", "/v1", "/v1/")


def _is_this_machine(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified  # which leads to the loopback one


_FLAG = {"action": "store_true"}
_FILE = {"metavar": "FILE"}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "gpu": (
        _FLAG,
        "caches live on the GPU, and kernels are compiled; an error where there is no GPU",
    ),
    "target": (
        {"action": "append", "metavar": "MODULE:CLASS"},
        "adapter for pytest_roseinfer.suite to test, by default those of this project's engine and "
        "caches; may be repeated",
    ),
    "endpoint": (
        {"metavar": "URL"},
        "a server with an API like OpenAI's for pytest_roseinfer.suite to test, or for "
        "--roseinfer-replay to run a mix on, such as http://127.0.0.1:8000; a key for it is read "
        "from ROSEINFER_API_KEY",
    ),
    "model": (
        {"metavar": "NAME"},
        "the model that requests to the server name; the default is the first that it lists",
    ),
    "rate": (
        {"type": float, "metavar": "N"},
        "requests per second to the server, at most; the default is 1000 on this machine, and 50 "
        "on another; completions are short, so at a low rate few requests overlap",
    ),
    "endpoint-anywhere": (_FLAG, "allow a server on another machine than this one"),
    "profile": (
        {"metavar": "NAME"},
        f"how hard to search: {', '.join(PROFILES)}; the default is dev",
    ),
    "examples": (_NUMBER, "histories per search; the default is the profile's"),
    "steps": (_NUMBER, "steps of one history, at most; the default is the profile's"),
    "step-seconds": (
        {"type": float, "metavar": "S"},
        "a step that takes more processor time, or sleeps ten times as long, hangs, which is a "
        f"failure; the default is {STEP_SECONDS:g}, and 0 is no limit, as for a debugger",
    ),
    "search-seconds": (
        {"type": float, "metavar": "S"},
        "a test searches no longer, reports what it tried by then, and claims no strength; the "
        "default is the profile's, and 0 is no limit",
    ),
    "seed": (
        _NUMBER,
        "makes the search repeatable; the default is a number in --hypothesis-seed, else drawn",
    ),
    "required-paths": (
        {"choices": ["on", "off"]},
        "a declared path or condition that is never reached fails the run; the default is on",
    ),
    "report": (
        {"action": "append", "metavar": "FILE"},
        "write what was reached to FILE.json or FILE.html; may be repeated",
    ),
    "fast-interpreter": (
        _FLAG,
        "replace parts of Triton's interpreter by faster ones while shipped tests and checks of "
        "work run, as adapters with fast_interpreter do",
    ),
    "replay": (_FILE, "run the history or the mix of requests in a trace file, and nothing else"),
    "replay-trust": (
        _FLAG,
        "with --roseinfer-replay, import whatever the file names; without it, the adapter must be "
        "a target of this run or a shipped one, and nothing outside of the project is imported",
    ),
    "costs": (
        _FILE,
        "baselines for the work of steps; the default is roseinfer-costs.json in the folder of "
        "each test; on the command line, a run that compares no step fails",
    ),
    "update-costs": (_FLAG, "make what steps do now their baselines, for the versions of this run"),
    "against": (
        {"metavar": "REF"},
        "fail where a decode step takes longer than at this git revision, in the project at "
        "this path, or in this NAME==VERSION; both are timed now, in turns",
    ),
    "noise-floor": (
        _FLAG,
        "time decode steps against themselves, and report what this machine can tell apart",
    ),
    "report-slower": (
        _FLAG,
        "with --roseinfer-against, report where a step is SLOWER, and fail nothing for it",
    ),
    "tpot-seconds": (
        {"type": float, "metavar": "N"},
        "end each comparison of steps by then, or after its first series, whatever the marker "
        "says; UNDECIDED if that is too short",
    ),
    "timings": (
        {"metavar": "DIR"},
        "keep the times and the work of steps there, a line for each run, with a plot; `roseinfer "
        "gates` shows them",
    ),
    "tpot": (
        _FILE,
        "fail where a decode step takes much longer than this file has for this GPU",
    ),
    "update-tpot": (_FLAG, "write the times of this run to the file of --roseinfer-tpot"),
}
"""The options, without ``--roseinfer-``, their arguments to argparse and their help."""
_INI = dict.fromkeys(
    ("profile", "examples", "steps", "step_seconds", "search_seconds", "seed", "costs"), "string"
)
_INI |= {"targets": "linelist", "report": "linelist", "required_paths": "bool"}
"""Ini options and their types; each does what the command-line option of its name does."""


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("roseinfer", "conformance of KV caches")
    for name, (arguments, words) in _OPTIONS.items():
        group.addoption(f"--roseinfer-{name}", help=words, **arguments)
    for name, kind in _INI.items():
        # Without a default, an ini file that leaves the option open can be told apart.
        parser.addini(f"roseinfer_{name}", f"see {_twin(name)}", type=kind, default=None)  # type: ignore[arg-type]


def _twin(name: str) -> str:
    """Return the command-line option of an ini option."""
    return f"--roseinfer-{'target' if name == 'targets' else name.replace('_', '-')}"


class OptionEntry(NamedTuple):
    """An option in a list for readers."""

    usage: str
    """The option and its argument, as in "--roseinfer-replay FILE"."""
    ini: str
    """The ini option of the same meaning; empty if there is none."""
    description: str


def entries() -> Iterator[OptionEntry]:
    """Yield all options in their order."""
    inis = {_twin(name): f"roseinfer_{name}" for name in _INI}
    for name, (arguments, words) in _OPTIONS.items():
        option = f"--roseinfer-{name}"
        argument = arguments.get("metavar") or "|".join(arguments.get("choices", ()))
        yield OptionEntry(f"{option} {argument}".strip(), inis.get(option, ""), words)


def configured(config: pytest.Config) -> bool:
    """Return True if this run was told anything about the search."""
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
    """Return the settings of a run; options that make no sense are a usage error."""
    with mistakes_are_usage_errors():
        return _read(config)


@contextmanager
def mistakes_are_usage_errors() -> Iterator[None]:
    try:
        yield
    except mistakes.Mistake as mistake:
        raise pytest.UsageError(str(mistake)) from None


def _read(config: pytest.Config) -> Settings:
    gpu = _option(config, "gpu")
    profile = _chosen(config, "profile", "dev")
    usual = mistakes.profile_named(_said_as(config, "profile"), profile)
    named = tuple(dict.fromkeys(_option(config, "target") or ()))
    server = endpoint(config)
    if server is not None:
        if named:
            raise pytest.UsageError("--roseinfer-endpoint names the target: --roseinfer-target not")
        named = (ENDPOINT_TARGET,)
    required = _option(config, "required-paths")
    reports = tuple(_chosen(config, "report", ()))
    for file in reports:
        mistakes.require_report(_said_as(config, "report"), file)
    costs = _ini(config, "costs")
    return Settings(
        profile=profile,
        examples=_number(config, "examples", at_least=1) or usual.examples,
        steps=_number(config, "steps", at_least=1) or usual.steps,
        step_seconds=step_seconds(config),
        search_seconds=_seconds(config, "search-seconds", usual.search_seconds),
        seed=_seed(config),
        gpu=gpu,
        gpu_index=_gpu_index(config) if gpu else None,
        require_paths=required == "on" if required else _ini(config, "required_paths") is not False,
        fast_interpreter=_option(config, "fast-interpreter"),
        targets=named or tuple(_ini(config, "targets") or SHIPPED_TARGETS),
        endpoint=server,
        named_targets=named,
        reports=reports,
        failures_dir=str(config.rootpath / ".roseinfer"),
        # A path on the command line starts here; one in the ini file starts at that file.
        costs=_from_here(config, "costs") or (str(config.rootpath / costs) if costs else None),
        costs_requested=_option(config, "costs") is not None,
        update_costs=_option(config, "update-costs"),
        timing=_timing(config),
    )


def endpoint(config: pytest.Config) -> Endpoint | None:
    """Return the server that the command line names, which has not been asked anything yet."""
    told = {name: _option(config, name) for name in ("endpoint", "model", "rate")}
    anywhere = _option(config, "endpoint-anywhere")
    if not (anywhere or any(value is not None for value in told.values())):
        return None
    # merged

    return endpoint_of(*told.values(), anywhere=anywhere)


def _timing(config: pytest.Config) -> Timing:
    asked = Timing(
        against=_option(config, "against") or "",
        noise_floor=_option(config, "noise-floor"),
        report_slower=_option(config, "report-slower"),
        seconds=_option(config, "tpot-seconds"),
        tpot=_from_here(config, "tpot"),
        update_tpot=_option(config, "update-tpot"),
        folder=_from_here(config, "timings"),
    )
    if asked.against and asked.noise_floor:
        raise pytest.UsageError(
            "--roseinfer-noise-floor compares a step with itself, and --roseinfer-against with "
            "another: choose one"
        )
    if asked.update_tpot and asked.tpot is None:
        raise pytest.UsageError("--roseinfer-update-tpot needs a file: add --roseinfer-tpot FILE")
    if asked.seconds is not None and not 0 < asked.seconds < math.inf:
        raise pytest.UsageError(f"--roseinfer-tpot-seconds {asked.seconds:g}: must be above 0")
    if asked.seconds is not None and not asked.paired:
        raise pytest.UsageError(
            "--roseinfer-tpot-seconds ends a comparison: add --roseinfer-against"
        )
    if asked.report_slower and not asked.against:
        raise pytest.UsageError(
            "--roseinfer-report-slower needs a comparison: add --roseinfer-against"
        )
    return asked


def check_baselines(asked: Settings) -> None:
    """Refuse files of baselines that are none, if the command line or the ini file names them."""
    files = [file for file in (asked.costs, asked.timing.tpot) if file]
    if not files:
        return
    from pytest_roseinfer.gates.gate import CannotCompare, read_steps

    for file in files:
        try:
            read_steps(Path(file))
        except CannotCompare as error:
            raise pytest.UsageError(str(error)) from None


def refuse_unknown(words: Iterable[str]) -> None:
    """Refuse an option that is nearly one of ours, and say which."""
    known = [f"--roseinfer-{name}" for name in _OPTIONS]
    for word in words:
        said = word.partition("=")[0]
        if said == "--":
            return
        ours = said.startswith("--roseinfer-") and said not in known
        if ours and (alike := mistakes.did_you_mean(said, known)):
            raise pytest.UsageError(f"unrecognized arguments: {word}{alike}")


def check_targets(config: pytest.Config, asked: Settings) -> None:
    """Refuse targets that cannot be imported, if this run is to test them.

    The model of a server that was asked for none is known from here on.
    """
    if not (asked.named_targets or (asked.chosen_targets and tests_targets(config))):
        return
    from pytest_roseinfer.adapters.load_target import TargetError, load_target, require_target

    find_modules_here(config)
    choose_kernel_runtime()
    try:
        for name in asked.targets:  # all of them before any, which takes seconds, is imported
            require_target(name)
        for name in asked.targets:
            load_target(name)
        if asked.endpoint is not None:
            # merged

            set_current(replace(asked, endpoint=require_server(asked.endpoint)))
    except TargetError as error:
        said = "--roseinfer-target" if asked.named_targets else "roseinfer_targets"
        raise pytest.UsageError(f"{said}: {error}") from error


def tests_targets(config: pytest.Config) -> bool:
    """Return True if the tests of every target are among those of this run."""
    return any("pytest_roseinfer" in argument for argument in config.args)


def allowed_of_traces(config: pytest.Config) -> Allowed:
    """Return what a trace may have imported in this run."""
    from pytest_roseinfer.search.trace import Allowed

    return Allowed(
        targets={
            *(_option(config, "target") or ()),
            *(_ini(config, "targets") or ()),
        },
        project=config.rootpath,
        trusted=_option(config, "replay-trust"),
    )


def find_modules_here(config: pytest.Config) -> None:
    """Let targets be named from where pytest was started, as ``python -m pytest`` would."""
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(f"--roseinfer-{name}")


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getini(f"roseinfer_{name.replace('-', '_')}")
    except (ValueError, pytest.UsageError) as error:  # which does not say what it is about
        raise pytest.UsageError(f"roseinfer_{name}: {error}") from None


def _chosen(config: pytest.Config, name: str, default: Any) -> Any:
    """Return what the command line says, else what the ini file says."""
    said = _option(config, name)
    said = _ini(config, name) if said is None else said
    return default if said is None else said


def _said_as(config: pytest.Config, name: str) -> str:
    """Return how an option was said, to complain about it."""
    in_ini = _option(config, name) is None
    return f"roseinfer_{name.replace('-', '_')} =" if in_ini else f"--roseinfer-{name}"


def _from_here(config: pytest.Config, name: str) -> str | None:
    said = _option(config, name)
    return str(config.invocation_params.dir / said) if said else None


def _number(config: pytest.Config, name: str, *, at_least: int) -> int | None:
    said = _chosen(config, name, None)
    if said is None:
        return None
    try:
        number = int(said)
    except ValueError:
        raise pytest.UsageError(f"roseinfer_{name} = {said}: not a whole number") from None
    mistakes.require_at_least(_said_as(config, name), number, at_least)
    return number


def step_seconds(config: pytest.Config) -> float:
    return _seconds(config, "step-seconds", STEP_SECONDS)


def _seconds(config: pytest.Config, name: str, usual: float) -> float:
    said = _chosen(config, name, usual)
    try:
        seconds = float(said)
    except ValueError:
        raise pytest.UsageError(f"{_said_as(config, name)} {said}: not a number") from None
    if not 0 <= seconds < math.inf:
        raise pytest.UsageError(f"roseinfer {name} = {seconds:g}: must be 0 or more")
    return seconds


def _seed(config: pytest.Config) -> int:
    """Return the seed that was asked for, else that of a worker's controller, else a new one."""
    said = _number(config, "seed", at_least=0)
    if said is not None:
        return said
    given = getattr(config, "workerinput", {}).get("roseinfer_seed")
    if given is None:  # Hypothesis's own option, which may also say "random"
        given = config.getoption("--hypothesis-seed", default=None)
    return int(given) if str(given).isdigit() else int.from_bytes(os.urandom(4), "big")


def _gpu_index(config: pytest.Config) -> int | None:
    """Return the GPU of this worker of pytest-xdist; None if there are no workers."""
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
