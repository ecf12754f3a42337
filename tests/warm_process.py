"""Python processes that begin with the slow imports done.

Torch and transformers take seconds to import, and hundreds of tests want a process of their own.
A server imports them once; a process is a fork of it. So it does with pytest, Hypothesis and the
plugins of others. Of the packages under test it has nothing, so these come in as they do in a new
interpreter.
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
_LOOKS_FOR_HYPOTHESIS = "_hypothesis_pytestplugin"
"""When it is imported it counts from when on Hypothesis is in use."""
_READ_BY_HYPOTHESIS = re.compile("HYPOTHESIS_|CI$|GITHUB_ACTIONS$")
"""The variables that it reads when it is imported."""
_NUMBER = Struct("q")


def run(
    arguments: list[str], *, cwd: Path, environment: Mapping[str, str], timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Do what ``python *arguments`` does, for arguments that begin with ``-c`` or ``-m``."""
    # Triton's own functions are made for its interpreter, or not, when it is imported.
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
    """The process that is forked, as the tests see it."""

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
        self._process.communicate()  # nothing: it ends with its input
        os.close(self._replies)

    def call(
        self,
        arguments: list[str],
        cwd: Path,
        environment: Mapping[str, str],
        files: tuple[Any, Any],
        timeout: float,
    ) -> int:
        """Have a process run; return its exit status."""
        output = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
        asked = {"arguments": arguments, "cwd": str(cwd), "environment": dict(environment)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asked, "output": output}).encode() + b"\n")
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
    """Fork a process for every request, and tell its number and then its status."""
    _import_plugins()  # ahead of whatever would import parts of them
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch has one for every operator, and a fork would call them all
    gc.collect()
    gc.freeze()
    read = _read_by_hypothesis(os.environ)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if not pid:
            os.close(replies)
            asked = json.loads(line)
            if _read_by_hypothesis(asked["environment"]) != read:
                _forget_hypothesis()
            _become(**asked)
        os.write(replies, _NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        os.write(replies, _NUMBER.pack(status))


def _import_plugins() -> None:
    """Import pytest and the plugins that are not under test, with their assertions rewritten.

    Pytest warns of what it finds imported before it could do that.
    """
    config = get_config()
    hook = install_importhook(config)
    others = [found for found in entry_points(group="pytest11") if not _is_under_test(found)]
    files = [file for found in others if found.dist for file in found.dist.files or ()]
    hook.mark_rewrite(*{file.parts[0].removesuffix(".py") for file in files})
    for name in {found.module for found in others} - {_LOOKS_FOR_HYPOTHESIS}:
        importlib.import_module(name)
    importlib.import_module("hypothesis.strategies")
    sys.meta_path.remove(hook)


def _is_under_test(plugin: EntryPoint) -> bool:
    return plugin.module.partition(".")[0] == _UNDER_TEST


def _read_by_hypothesis(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if _READ_BY_HYPOTHESIS.match(name)}


def _forget_hypothesis() -> None:
    """Have it imported again, where it would read something else in the environment."""
    for name in [name for name in sys.modules if re.match(r"_?hypothesis(_|\.|$)", name)]:
        del sys.modules[name]


def _become(
    arguments: list[str], cwd: str, environment: dict[str, str], output: list[str]
) -> NoReturn:
    """Be the process that was asked for, from its beginning to its end."""
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
    random.seed()  # or all forks would draw the same
    status = _exit_status(arguments)
    # Python's own way out takes torch apart, object by object, for half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _exit_status(arguments: list[str]) -> int:
    """Run the code or the module, and say how a process ends that did so."""
    kind, what, *rest = arguments
    sys.argv = [kind, *rest]
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), vars(main))
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
