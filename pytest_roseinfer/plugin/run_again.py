"""Runs a saved failure again, with what the command line says of it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.load_target import TargetError
from pytest_roseinfer.endpoint.server import ServerError
from pytest_roseinfer.plugin import options
from pytest_roseinfer.plugin.options import require_server
from pytest_roseinfer.run.watchdog import watching
from pytest_roseinfer.search import trace as traces
from pytest_roseinfer.search.trace import TraceError, replay
from pytest_roseinfer.settings import ENDPOINT_TARGET, Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def run_again(config: pytest.Config, file: str) -> int:
    """Return 1 where it still fails and 0 where it runs through; the rest is a usage error."""
    options.find_modules_here(config)
    seconds, before = options.step_seconds(config), settings.current()
    try:
        server = _server(traces.read(file), file, options.endpoint(config))
        # No run is configured for this, so nobody else has read the options.
        settings.set_current(replace(before, endpoint=server, step_seconds=seconds))
        with watching(seconds):
            return replay(file, options.allowed_of_traces(config))
    except (TargetError, TraceError) as error:
        raise pytest.UsageError(f"--roseinfer-replay {error}") from error
    except ServerError as error:  # it was there before, and our own frames say nothing of it
        print(f"FAILED: the server cannot be asked any more: {error}")
        return 1
    finally:
        settings.set_current(before)


def _server(trace: Mapping[str, Any], file: str, told: Endpoint | None) -> Endpoint | None:
    """Return the server to ask, which the trace itself must not choose."""
    if trace["adapter"] != ENDPOINT_TARGET:
        if told is not None:
            raise TraceError(f"{file} is no failure of a server: leave out --roseinfer-endpoint")
        return None
    if told is None:
        saved = trace.get(traces.SERVER, {"url": "http://127.0.0.1:8000", "model": ""})
        example = shlex.join(Endpoint(saved["url"], saved["model"]).options)
        raise TraceError(f"{file} is a failure of a server: say which, as {example}")
    return require_server(told)
