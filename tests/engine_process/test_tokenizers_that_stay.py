"""A tokenizer that cannot go to another process is an error that says what to do."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from roseinfer import LLM
from roseinfer.engine_client import child
from roseinfer.engine_client.protocol import Facts
from roseinfer.engine_client.subprocess_client import EngineChild, framed
from roseinfer.errors import ConfigError


class Breaks:
    """Goes on its way, and cannot be made again where it comes to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_one_that_cannot_be_sent() -> None:
    facts = Facts.of(LLM("tiny", device="cpu", kv_cache_tokens=64))
    assert child._as_sent(facts)
    with pytest.raises(ConfigError, match=r"tokenizer cannot go .*lambda.*AsyncLLM"):
        child._as_sent(replace(facts, tokenizer=lambda: None))


def test_one_that_cannot_be_made_again() -> None:
    process: Any = None  # nobody asks how it ended
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framed(Breaks()))
        with pytest.raises(ConfigError, match=r"ValueError: .*no number.*AsyncLLM"):
            EngineChild(process, ours).loaded()
