"""Python processes that begin with slow imports done.

Torch and transformers take seconds to import, and hundreds of tests need a process of their own.
A server imports them once, with pytest, Hypothesis and third-party plugins, and forks for each
process. It never imports the packages under test, so a fork imports them as a new interpreter does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import re
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from functools import cache
from importlib.metadata import entry_points
from struct import Struct
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from _pytest.assertion import install_importhook
from _pytest.config import get_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint
    from pathlib import Path

_SLOW_IMPORTS = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.continuous_batching.cache",
)
_UNDER_TEST = "pytest_roseinfer"
_HYPOTHESIS_DETECTOR = "_hypothesis_pytestplugin"
"""Module that detects at its import whether Hypothesis is in use."""
_READ_BY_HYPOTHESIS = re.compile("HYPOTHESIS_|CI$|GITHUB_ACTIONS$")
"""Names of variables that Hypothesis reads at its import."""
_NUMBER = Struct("q")


def run(
    arguments: list[str], *, cwd: Path, environment: Mapping[str, str], timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments``, where arguments begin with ``-c`` or ``-m``."""
    # Triton decides at its import whether its own functions are interpreted.
    server = _server(environment.get("TRITON_INTERPRET"))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        status = server.call(arguments, cwd, environment, (out, errors), timeout)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, status, *texts)


@cache
def _server(interpret: str | None) -> _Server:
    return _Server(interpret)


class _Server:
    """Handle of the server process."""

    def __init__(self, interpret: str | None) -> None:
        read, write = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        if interpret is not None:
            environment["TRITON_INTERPRET"] = interpret
        command = [sys.executable, "-P", __file__, str(write)]
        self._process = subprocess.Popen(
            command, cwd="/", env=environment, stdin=subprocess.PIPE, pass_fds=[write]
        )
        os.close(write)
        self._replies = read
        atexit.register(self._end)

    def _end(self) -> None:
        self._process.communicate()  # sends nothing: the server exits at the end of its input
        os.close(self._replies)

    def call(
        self,
        arguments: list[str],
        cwd: Path,
        environment: Mapping[str, str],
        files: tuple[Any, Any],
        timeout: float,
    ) -> int:
        """Run a process; return its exit status."""
        output = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
        request = {"arguments": arguments, "cwd": str(cwd), "environment": dict(environment)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**request, "output": output}).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._reply()
        if not select.select([self._replies], [], [], timeout)[0]:
            os.kill(pid, signal.SIGKILL)
            self._reply()
            raise subprocess.TimeoutExpired(arguments, timeout)
        return os.waitstatus_to_exitcode(self._reply())

    def _reply(self) -> int:
        (number,) = _NUMBER.unpack(os.read(self._replies, _NUMBER.size))
        return int(number)


# ------------------------------------------------------------------------------ in the server


def serve(replies: int) -> None:
    """Fork a process for every request; write its process id, and then its status."""
    gc.disable()  # imports leave hardly any garbage
    _import_plugins()  # before other imports, which load parts of them
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch has one for every operator, and a fork would call them all
    gc.collect()
    gc.freeze()
    gc.enable()
    read = _read_by_hypothesis(os.environ)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if not pid:
            os.close(replies)
            request = json.loads(line)
            if _read_by_hypothesis(request["environment"]) != read:
                _forget_hypothesis()
            _become(**request)
        os.write(replies, _NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        os.write(replies, _NUMBER.pack(status))


def _import_plugins() -> None:
    """Import pytest and the plugins that are not under test, with rewritten assertions.

    Pytest warns about plugins that are imported before it can rewrite them.
    """
    config = get_config()
    hook = install_importhook(config)
    plugins = [each for each in entry_points(group="pytest11") if not _is_under_test(each)]
    files = [file for each in plugins if each.dist for file in each.dist.files or ()]
    hook.mark_rewrite(*{file.parts[0].removesuffix(".py") for file in files})
    for name in {each.module for each in plugins} - {_HYPOTHESIS_DETECTOR}:
        importlib.import_module(name)
    importlib.import_module("hypothesis.strategies")
    sys.meta_path.remove(hook)


def _is_under_test(plugin: EntryPoint) -> bool:
    return plugin.module.partition(".")[0] == _UNDER_TEST


def _read_by_hypothesis(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if _READ_BY_HYPOTHESIS.match(name)}


def _forget_hypothesis() -> None:
    """Unload Hypothesis, so that its next import reads the environment."""
    for name in [name for name in sys.modules if re.match(r"_?hypothesis(_|\.|$)", name)]:
        del sys.modules[name]


def _become(
    arguments: list[str], cwd: str, environment: dict[str, str], output: list[str]
) -> NoReturn:
    """Turn this process into the requested one, and exit with its status."""
    descriptors = [os.open(os.devnull, os.O_RDONLY)]
    descriptors += [os.open(path, os.O_WRONLY | os.O_APPEND) for path in output]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if "hypothesis" in sys.modules:
        sys.modules["hypothesis.configuration"].set_hypothesis_home_dir(
            os.path.abspath(".hypothesis")
        )
    sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    random.seed()  # otherwise all forks would draw the same numbers
    status = _exit_status(arguments)
    # A regular exit spends half a second on deleting torch's objects.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _exit_status(arguments: list[str]) -> int:
    """Run the code or module, and return the exit status of a process that did so."""
    option, code, *rest = arguments
    sys.argv = [option, *rest]
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if option == "-m":
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        else:
            exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(int(sys.argv[1]))
