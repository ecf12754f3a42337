"""Tokenizers that cannot be sent to another process: an error that says what to do."""

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


class FailsToUnpickle:
    """Object that can be pickled and not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_tokenizer_that_cannot_be_pickled_is_reported() -> None:
    info = EngineInfo.of(LLM("tiny", device="cpu", kv_cache_tokens=64))
    assert child._frame_info(info)
    with pytest.raises(ConfigError, match=r"tokenizer: cannot be sent .*lambda.*AsyncLLM"):
        child._frame_info(replace(info, tokenizer=lambda: None))


def test_tokenizer_that_cannot_be_unpickled_is_reported() -> None:
    process: Any = None  # its exit status is not read
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame_message(FailsToUnpickle()))
        with pytest.raises(ConfigError, match=r"ValueError: .*no number.*AsyncLLM"):
            EngineProcess(process, ours).wait_until_loaded()
