"""Saved failures: a history or mix of requests as a trace and as a script, for replay."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
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
from pytest_roseinfer.run.watchdog import CURRENT_EXAMPLE
from pytest_roseinfer.search.named_checks import CHECKS, kind_of_example
from pytest_roseinfer.search.trace import DIGEST, FAILED, FORMAT, SERVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.findings.timeline import FindingRecord
    from pytest_roseinfer.search.named_checks import Example

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
print("it passed: nothing differed")\
"""
_RUN_OFTEN = """\
from pytest_roseinfer.search.named_checks import repeat

repetition = repeat(lambda: {check}(Adapter, {kind.__name__}.from_json(EXAMPLE)), Adapter.replays)
repetition.require_none()
print(repetition.describe())\
"""


_SERVER = """\
from dataclasses import replace

from pytest_roseinfer import settings

KEY = os.environ.get("ROSEINFER_API_KEY", "")
SERVER = settings.Endpoint({url!r}, {model!r}, KEY, {rate!r})
settings.set_current(replace(settings.current(), endpoint=SERVER))
"""


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """Files of a saved failure, relative to the project's root."""

    trace: str = ""
    script: str = ""
    drawing: str = ""
    description: str = ""
    """Instructions to replay the failure, or why no files were saved."""


def save(
    adapter: type[Adapter],
    example: Example,
    check: str,
    finding: FindingRecord,
    folder: str,
    drawing: str,
) -> SavedFiles:
    """Write the trace, the script and the ``drawing``, unless it is empty."""
    try:
        trace = {**_trace_of(adapter, check, folder), "example": example.to_json()}
        run = _RUN if adapter.replays == 1 else _RUN_OFTEN
        return _write(trace, finding, Path(folder), drawing, run)
    except (OSError, TypeError) as error:
        # Failing to save must not hide the failure itself.
        return SavedFiles(description=f"no replay was saved: {error}")


def _trace_of(adapter: type[Adapter], check: str, folder: str) -> dict[str, Any]:
    """Return a trace without its example; raise ``TypeError`` if the adapter cannot be imported.

    The parent of ``folder`` is the project's root. Paths are relative to it, so that the trace
    works in another checkout.
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


def keep(saved: SavedFiles) -> str:
    """Copy a saved trace to the folder of kept failures; return a line that says so."""
    folder = settings.current().kept_dir
    if not (folder and saved.trace):
        return ""
    kept = Path(folder) / Path(saved.trace).name
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept.parent.parent / saved.trace, kept)
    except OSError as error:
        return f"not kept: {error}"
    return f"kept as {kept.parent.name}/{kept.name}: every run replays it before it searches"


@dataclass(slots=True)
class ExampleFile:
    """Trace file of the running example, which survives if the process dies."""

    _file: FileIO
    _beginning: str
    """JSON text of the trace, up to its example."""
    _longest: int = 0

    @classmethod
    @contextmanager
    def of(cls, adapter: type[Adapter], check: str) -> Iterator[ExampleFile | None]:
        """Open a file for examples of ``check`` in the folder of failures; None if impossible."""
        folder = settings.current().failures_dir or ""
        path = Path(folder) / f"{adapter.__name__}-tried-by-{os.getpid()}.json"
        try:
            trace = _trace_of(adapter, check, folder)
            beginning = json.dumps(trace)[:-1]
            _make_folder(path.parent)
            file = path.open("wb", buffering=0)
        except (OSError, TypeError):  # search without saving
            yield None
            return
        CURRENT_EXAMPLE.saved = _replay_command(path, trace["adapter"])
        try:
            yield cls(file, beginning)
        finally:
            CURRENT_EXAMPLE.saved = ""
            file.close()
            path.unlink(missing_ok=True)

    def write(self, example: Example) -> None:
        text = f'{self._beginning}, "example": {json.dumps(example.to_json())}}}'
        self._longest = max(self._longest, len(text))
        # Blanks overwrite the rest of a longer previous example: truncating takes milliseconds.
        os.pwrite(self._file.fileno(), text.ljust(self._longest).encode(), 0)


def _make_folder(folder: Path) -> None:
    """Create the folder of failures, with a .gitignore for all of it."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")


def _write(
    trace: dict[str, Any], finding: FindingRecord, folder: Path, drawing: str, run: str
) -> SavedFiles:
    _make_folder(folder)
    class_name, kind = trace["adapter"].partition(":")[2], kind_of_example(trace["check"])
    # The file's name depends on the example only, not on its failure.
    content = json.dumps(trace, indent=1).encode()
    stem = f"{class_name}-{sha256(content).hexdigest()[:10]}"
    trace_file, script_file = folder / f"{stem}.json", folder / f"{stem}.py"
    failure = {FAILED: finding["summary"], DIGEST: finding["digest"]}
    text = json.dumps({**trace, **failure}, indent=1)
    trace_file.write_text(text, encoding="utf-8")
    script = _SCRIPT.format(
        **{name: trace[name] for name in ("adapter", "check", "environment", "folders")},
        file=f", str(ROOT / {trace['file']!r})" if trace["file"] else "",
        server=_server(trace["adapter"]),
        run=run.format(check=trace["check"], kind=kind),
        kind=kind,
        module=CHECKS[trace["check"]].__module__,
        message="\n".join(f"# {line}".rstrip() for line in finding["message"].splitlines()),
        example=pformat(trace["example"], width=96, sort_dicts=False),
    )
    script_file.write_text(script, encoding="utf-8")
    words = [
        _replay_command(trace_file, trace["adapter"]),
        f"         or: python {_relative_path(script_file)}",
    ]
    if drawing:
        drawing_file = folder / f"{stem}.svg"
        drawing_file.write_text(drawing, encoding="utf-8")
        words.append(f"      drawn: {_relative_path(drawing_file)}")
    return SavedFiles(
        trace=f"{folder.name}/{trace_file.name}",
        script=f"{folder.name}/{script_file.name}",
        drawing=f"{folder.name}/{stem}.svg" if drawing else "",
        description="\n".join(words),
    )


def _server_of(adapter: str) -> settings.Endpoint | None:
    """Return the tested server if the adapter is that of servers, else None."""
    return settings.current().endpoint if adapter == settings.ENDPOINT_TARGET else None


def _server(adapter: str) -> str:
    """Return the lines of a script that select the tested server, without its key; or ""."""
    server = _server_of(adapter)
    if server is None:
        return ""
    return _SERVER.format(url=server.url, model=server.model, rate=server.rate)


def _replay_command(file: Path, adapter: str) -> str:
    """Return the command that replays a trace, with the target if it is not a shipped one.

    It names the project's root if the current folder is another one.
    """
    named = "" if adapter in settings.SHIPPED_TARGETS else f" --roseinfer-target {adapter}"
    root = file.resolve().parents[1]
    root_option = (
        "" if root == Path.cwd() else f" --rootdir {shlex.quote(str(_relative_path(root)))}"
    )
    if server := _server_of(adapter):
        named = f" {shlex.join(server.options)}"
        # The replay must wait as long for a silent stream.
        seconds = settings.current().step_seconds
        named += f" --roseinfer-step-seconds {seconds}" if seconds != settings.STEP_SECONDS else ""
    quoted = shlex.quote(str(_relative_path(file)))
    return f"replay with: pytest --roseinfer-replay {quoted}{named}{root_option}"


def _relative_path(file: Path) -> Path:
    """Return a path relative to the current folder, if the file is inside it."""
    file, here = file.resolve(), Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _within(root: Path, paths: Iterable[Path]) -> list[str]:
    """List the paths inside ``root``, relative to it."""
    resolved = [path.resolve() for path in paths]
    return [path.relative_to(root).as_posix() for path in resolved if path.is_relative_to(root)]


def _folders() -> list[Path]:
    """List the entries of ``sys.path`` outside of the installation, such as those pytest adds."""
    installed = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    folders = [Path(entry).resolve() for entry in sys.path]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder.is_dir() and not any(folder.is_relative_to(root) for root in installed)
    ]
