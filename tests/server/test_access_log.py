"""Access log: the client of each line, and an output that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roseinfer import ConfigError
from roseinfer.config import ServerConfig
from tests.python_process import ROOT
from tests.server.served import running

LINES = "from roseinfer.server.access_log import write_line\nfor _ in range(3): write_line('{}')"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_once() -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-c", LINES],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    message = b"access log: stdout failed (No space left on device); requests are not logged\n"
    assert (process.returncode, process.stderr) == (0, message)


FORWARDED = {"x-forwarded-for": "203.0.113.7, 192.0.2.1", "x-forwarded-proto": "https"}


@pytest.mark.parametrize(
    ("proxies", "client"),
    [
        ((), "127.0.0.1"),
        (("10.0.0.0/8",), "127.0.0.1"),
        (("127.0.0.1",), "192.0.2.1"),
        (("127.0.0.0/8", "192.0.2.1"), "203.0.113.7"),
    ],
)
def test_client_address_is_taken_from_trusted_proxies_only(
    proxies: tuple[str, ...], client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with running(config={"trusted_proxies": proxies}) as server:
        answer = server.request("GET", "/health", headers=FORWARDED)
        assert server.line_of(answer)["client"] == client


@pytest.mark.parametrize(
    "proxies", [("*",), ("",), ("proxy.example",), ("10.0.0.1/8",), "10.0.0.1"]
)
def test_proxies_must_be_addresses(proxies: Any) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        ServerConfig(trusted_proxies=proxies)
