"""The options about a server, and which servers are asked at all."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import urlsplit

import pytest

from pytest_roseinfer.settings import POLITE_RATE, RATE, Endpoint


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
    parts = urlsplit(url)
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
    return Endpoint(url, model or "", os.environ.get("ROSEINFER_API_KEY", ""), rate, anywhere)


def require_server(endpoint: Endpoint) -> Endpoint:
    """Return it with the model that it is asked for; refuse one that cannot be asked at all."""
    from pytest_roseinfer.endpoint.server import Server, ServerError

    try:
        return replace(endpoint, model=Server(endpoint).model)
    except ServerError as error:
        raise pytest.UsageError(f"--roseinfer-endpoint {endpoint.url}: {error}") from None


_ROOTS = ("", "/", "/v1", "/v1/")


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
