"""Replay of a saved failure, for ``--roseinfer-replay``."""

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
from pytest_roseinfer.run.watchdog import limit_steps
from pytest_roseinfer.search import trace as traces
from pytest_roseinfer.search.trace import TraceError, replay
from pytest_roseinfer.settings import ENDPOINT_TARGET, Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def replay_trace(config: pytest.Config, file: str) -> int:
    """Replay a trace: return 1 if it still fails, 0 if it passes; all else is a usage error."""
    options.find_modules_here(config)
    seconds, before = options.step_seconds(config), settings.current()
    try:
        server = _server(traces.read(file), file, options.endpoint(config))
        # Replay happens before ``pytest_configure``, so the options are not read yet.
        known = options.known_findings(config)
        settings.set_current(
            replace(before, endpoint=server, step_seconds=seconds, known_findings=known)
        )
        with limit_steps(seconds):
            return replay(file, options.trace_import_policy(config))
    except (TargetError, TraceError) as error:
        raise pytest.UsageError(f"--roseinfer-replay {error}") from error
    except ServerError as error:  # it answered before; a traceback would only show the harness
        print(f"FAILED: the server no longer answers: {error}")
        return 1
    finally:
        settings.set_current(before)


def _server(trace: Mapping[str, Any], file: str, endpoint: Endpoint | None) -> Endpoint | None:
    """Return the server of the command line: the trace must not choose where requests go."""
    if trace["adapter"] != ENDPOINT_TARGET:
        if endpoint is not None:
            raise TraceError(f"{file}: not a failure of a server; leave out --roseinfer-endpoint")
        return None
    if endpoint is None:
        saved = trace.get(traces.SERVER, {"url": "http://127.0.0.1:8000", "model": ""})
        example = shlex.join(Endpoint(saved["url"], saved["model"]).options)
        raise TraceError(f"{file}: a failure of a server; name the server, as in {example}")
    return require_server(endpoint)
