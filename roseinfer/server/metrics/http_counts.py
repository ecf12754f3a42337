"""How many HTTP requests there were below ``/v1/``, how they were answered and how long it took."""

from __future__ import annotations

from collections import Counter, defaultdict

from roseinfer.histogram import Histogram

_KNOWN = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"}
_METHODS = {"GET", "POST"}
_OTHER = "none"
"""Clients can make up any number of paths and methods, and each would have numbers of its own."""
_SECONDS = (0.1, 0.5, 1.0)


class HttpCounts:
    """Counts requests when they have been answered, for metrics that vLLM has as well."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """By path, method and class of the status, such as ``2xx``."""
        self.seconds: defaultdict[tuple[str, str], Histogram]
        self.seconds = defaultdict(lambda: Histogram(_SECONDS))
        """By path and method."""

    def add(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request, unless it was one of those by which servers are watched."""
        if not path.startswith("/v1/"):
            return
        known = path if path in _KNOWN else _OTHER
        asked = (known, method if method in _METHODS else _OTHER)
        self.requests[*asked, f"{status // 100}xx"] += 1
        self.seconds[asked].add(seconds)
