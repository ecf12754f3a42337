"""Saves a failing history or mix of requests to be run again: as a trace, and as a script."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
import sysconfig
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.environment import variables, version
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.watchdog import WATCHED
from pytest_roseinfer.search.checks import CHECKS, kind_of_example
from pytest_roseinfer.search.trace import FAILED, FORMAT, SERVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.findings.timeline import Found
    from pytest_roseinfer.search.checks import Example

_SCRIPT = '''\
"""Replays a failure of {adapter}. Needs neither pytest nor Hypothesis."""

{message}

import os
import sys
from pathlib import Path

os.environ.update({environment})
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in {folders}]

from {kind.__module__} import {kind.__name__}
from pytest_roseinfer.adapters.load_target import load_target
from {module} import {check}

EXAMPLE = {example}

Adapter = load_target({adapter!r}{file})
{server}{run}
'''
_RUN = """\
{check}(Adapter, {kind.__name__}.from_json(EXAMPLE))
print("it ran through: nothing differed")\
"""
_RUN_OFTEN = """\
from pytest_roseinfer.search.checks import repeat

repetition = repeat(lambda: {check}(Adapter, {kind.__name__}.from_json(EXAMPLE)), Adapter.replays)
repetition.require_none()
print(repetition.words())\
"""


_SERVER = """\
from dataclasses import replace

from pytest_roseinfer import settings

KEY = os.environ.get("ROSEINFER_API_KEY", "")
SERVER = settings.Endpoint({url!r}, {model!r}, KEY, {rate!r})
settings.set_current(replace(settings.current(), endpoint=SERVER))
"""


@dataclass(frozen=True, slots=True)
class Saved:
    """The files that were written of a failure, from the root of the project."""

    trace: str = ""
    script: str = ""
    drawing: str = ""
    words: str = ""
    """How to run it again, or why there are none."""


def save(
    adapter: type[Adapter], example: Example, check: str, found: Found, folder: str, drawing: str
) -> Saved:
    """Write the trace, the script and the ``drawing``, if there is one."""
    try:
        trace = {**_trace_of(adapter, check, folder), "example": example.to_json()}
        run = _RUN if adapter.replays == 1 else _RUN_OFTEN
        return _write(trace, found, Path(folder), drawing, run)
    except (OSError, TypeError) as error:
        # Failing to save must not hide what was found.
        return Saved(words=f"no replay was saved: {error}")


def _trace_of(adapter: type[Adapter], check: str, folder: str) -> dict[str, Any]:
    """Return a trace without an example; raise ``TypeError`` where none can be replayed.

    It goes to a ``folder`` of the project's root. Its paths begin there, so that it means the same
    in another checkout.
    """
    name = coverage.name_of(adapter)
    if "<locals>" in name:
        raise TypeError(f"{name} is defined in a function and cannot be imported")
    root = Path(folder).resolve().parent
    server = _server_of(name)
    return {
        "format": FORMAT,
        "version": version(),
        "adapter": name,
        **({SERVER: {"url": server.url, "model": server.model}} if server else {}),
        "file": "".join(_within(root, [Path(inspect.getfile(adapter))])),
        "folders": _within(root, _folders()),
        "environment": {
            name: text for name, text in variables().items() if not Path(text).is_absolute()
        },
        "check": check,
    }


@dataclass(slots=True)
class ExampleFile:
    """A trace of the example that is tried now, which stays if the process ends meanwhile."""

    _file: FileIO
    _beginning: str
    """The trace up to its example."""
    _longest: int = 0

    @classmethod
    @contextmanager
    def of(cls, adapter: type[Adapter], check: str) -> Iterator[ExampleFile | None]:
        """Keep a file for examples of ``check`` in the folder of failures; None if none can be."""
        folder = settings.current().failures_dir or ""
        path = Path(folder) / f"{adapter.__name__}-tried-by-{os.getpid()}.json"
        try:
            trace = _trace_of(adapter, check, folder)
            beginning = json.dumps(trace)[:-1]
            _make_folder(path.parent)
            file = path.open("wb", buffering=0)
        except (OSError, TypeError):  # what cannot be saved can be searched for all the same
            yield None
            return
        WATCHED.saved = _how_to_replay(path, trace["adapter"])
        try:
            yield cls(file, beginning)
        finally:
            WATCHED.saved = ""
            file.close()
            path.unlink(missing_ok=True)

    def write(self, example: Example) -> None:
        text = f'{self._beginning}, "example": {json.dumps(example.to_json())}}}'
        self._longest = max(self._longest, len(text))
        # Blanks write over the longer example before: to cut a file takes milliseconds.
        os.pwrite(self._file.fileno(), text.ljust(self._longest).encode(), 0)


def _make_folder(folder: Path) -> None:
    """Make the folder of failures, which version control is to ignore."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")


def _write(trace: dict[str, Any], found: Found, folder: Path, drawing: str, run: str) -> Saved:
    _make_folder(folder)
    class_name, kind = trace["adapter"].partition(":")[2], kind_of_example(trace["check"])
    # What it does names the file, and not what came of it.
    does = json.dumps(trace, indent=1).encode()
    stem = f"{class_name}-{sha256(does).hexdigest()[:10]}"
    trace_file, script_file = folder / f"{stem}.json", folder / f"{stem}.py"
    text = json.dumps({**trace, FAILED: found["what"]}, indent=1)
    trace_file.write_text(text, encoding="utf-8")
    script = _SCRIPT.format(
        **{name: trace[name] for name in ("adapter", "check", "environment", "folders")},
        file=f", str(ROOT / {trace['file']!r})" if trace["file"] else "",
        server=_server(trace["adapter"]),
        run=run.format(check=trace["check"], kind=kind),
        kind=kind,
        module=CHECKS[trace["check"]].__module__,
        message="\n".join(f"# {line}".rstrip() for line in found["message"].splitlines()),
        example=pformat(trace["example"], width=96, sort_dicts=False),
    )
    script_file.write_text(script, encoding="utf-8")
    words = [
        _how_to_replay(trace_file, trace["adapter"]),
        f"         or: python {_from_here(script_file)}",
    ]
    if drawing:
        drawing_file = folder / f"{stem}.svg"
        drawing_file.write_text(drawing, encoding="utf-8")
        words.append(f"      drawn: {_from_here(drawing_file)}")
    return Saved(
        trace=f"{folder.name}/{trace_file.name}",
        script=f"{folder.name}/{script_file.name}",
        drawing=f"{folder.name}/{stem}.svg" if drawing else "",
        words="\n".join(words),
    )


def _server_of(adapter: str) -> settings.Endpoint | None:
    """Return the server that was tested, if the adapter is that of servers."""
    return settings.current().endpoint if adapter == settings.ENDPOINT_TARGET else None


def _server(adapter: str) -> str:
    """Return how a script names the server that was tested, if one was. It has no key of it."""
    server = _server_of(adapter)
    if server is None:
        return ""
    return _SERVER.format(url=server.url, model=server.model, rate=server.rate)


def _how_to_replay(file: Path, adapter: str) -> str:
    """Return the command that runs a trace again, which must name an adapter that is not ours."""
    named = "" if adapter in settings.SHIPPED_TARGETS else f" --roseinfer-target {adapter}"
    if server := _server_of(adapter):
        named = f" {shlex.join(server.options)}"
        # A stream that brings nothing is given up after as long again.
        seconds = settings.current().step_seconds
        named += f" --roseinfer-step-seconds {seconds}" if seconds != settings.STEP_SECONDS else ""
    return f"replay with: pytest --roseinfer-replay {_from_here(file)}{named}"


def _from_here(file: Path) -> Path:
    """Name a file from the folder that the tests were started in, where it lies in there."""
    file, here = file.resolve(), Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _within(root: Path, paths: Iterable[Path]) -> list[str]:
    """List the paths that lie within ``root``, as they are called from there."""
    resolved = [path.resolve() for path in paths]
    return [path.relative_to(root).as_posix() for path in resolved if path.is_relative_to(root)]


def _folders() -> list[Path]:
    """List the entries of ``sys.path`` that no installation made, such as those pytest adds."""
    installed = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    folders = [Path(entry).resolve() for entry in sys.path]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder.is_dir() and not any(folder.is_relative_to(root) for root in installed)
    ]
