"""A failing history, saved so that it can be run again: as a trace, and as a script."""

from __future__ import annotations

import inspect
import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.history import History

if TYPE_CHECKING:
    from pytest_roseinfer.adapter import KVCacheAdapter

_SCRIPT = '''\
"""Replays a failing history on {name}. Needs neither pytest nor Hypothesis.

{what}
"""

import json
import os
import sys

{runtime}sys.path.insert(0, {folder!r})

from pytest_roseinfer.history import History
from pytest_roseinfer.machine import run_history
from {module} import {name} as Adapter

HISTORY = json.loads({history!r})

run_history(Adapter, History.from_json(HISTORY))
print("the history ran through: nothing differed")
'''


def save(
    adapter: type[KVCacheAdapter], history: History, what: str, folder: str
) -> tuple[Path, Path]:
    """Write the trace and the script; return where they are."""
    trace = {"adapter": f"{adapter.__module__}:{adapter.__qualname__}", **history.to_json()}
    text = json.dumps(trace, indent=1)
    stem = f"{adapter.__name__}-{sha256(text.encode()).hexdigest()[:10]}"
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    trace_file, script_file = place / f"{stem}.json", place / f"{stem}.py"
    trace_file.write_text(text)
    runtime = 'os.environ.setdefault("TRITON_INTERPRET", "1")\n' * (history.spec.device == "cpu")
    script_file.write_text(
        _SCRIPT.format(
            name=adapter.__qualname__,
            module=adapter.__module__,
            what=what.splitlines()[0].replace("\\", "/"),
            runtime=runtime,
            folder=_folder_on_path(adapter),
            history=json.dumps(history.to_json()),
        )
    )
    return trace_file, script_file


def load(file: str) -> tuple[str, History]:
    """The target's name and the history of a trace."""
    data = json.loads(Path(file).read_text())
    return data["adapter"], History.from_json(data)


def _folder_on_path(adapter: type[KVCacheAdapter]) -> str:
    """The folder from which ``adapter``'s module is imported."""
    depth = adapter.__module__.count(".") + 1
    return str(Path(inspect.getfile(adapter)).resolve().parents[depth - 1])
