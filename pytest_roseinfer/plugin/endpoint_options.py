"""The options about a server, and which servers are asked at all."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

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
