"""A tokenizer that cannot go to another process is an error that says what to do."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from roseinfer import LLM
from roseinfer.engine_client import child
from roseinfer.engine_client.protocol import EngineInfo
from roseinfer.engine_client.subprocess_client import EngineProcess, frame_message
from roseinfer.errors import ConfigError


class Breaks:
    """Goes on its way, and cannot be made again where it comes to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_one_that_cannot_be_sent() -> None:
    info = EngineInfo.of(LLM("tiny", device="cpu", kv_cache_tokens=64))
    assert child._as_sent(info)
    with pytest.raises(ConfigError, match=r"tokenizer: cannot be sent .*lambda.*AsyncLLM"):
        child._as_sent(replace(info, tokenizer=lambda: None))


def test_one_that_cannot_be_made_again() -> None:
    process: Any = None  # nobody asks how it ended
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame_message(Breaks()))
        with pytest.raises(ConfigError, match=r"ValueError: .*no number.*AsyncLLM"):
            EngineProcess(process, ours).wait_until_loaded()
