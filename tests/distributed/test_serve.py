"""``roseinfer serve --tensor-parallel-size 2`` answers as one process, and says that a rank died.

The command has started the engine's process, and that one has started rank 1.
"""

from __future__ import annotations

import os
import signal
import time

import openai
import pytest

from tests.engine.continuations import TEXTS, greedy, one, small_llm
from tests.replicas.replica_processes import below, runs
from tests.server.serve_process import PATIENCE, Serving, serving
from tests.server.served import MODEL
from tests.server.test_shutdown import LONG, await_status, client_of, status_of

_SECONDS = 10.0
"""Within so long all know of a rank that was killed, even if cores are shared with other tests."""
_STARTS_S = 150.0
"""Three processes import torch, two of them one behind the other."""


def rank_1_of(server: Serving) -> int:
    _engine, rank = below(server.process.pid)
    return rank


def test_it_answers_as_one_process_and_ends_a_stream_with_the_rank_that_was_killed() -> None:
    alone = one(small_llm("cpu"), TEXTS[0], greedy(40)).text
    options = "--model", MODEL, "--tensor-parallel-size", "2"
    with serving(*options, patience=_STARTS_S) as server, client_of(server) as client:
        rank = rank_1_of(server)
        answer = client.completions.create(
            model=MODEL, prompt=TEXTS[0], max_tokens=40, temperature=0
        )
        assert answer.choices[0].text == alone
        stream = client.completions.create(**LONG, max_tokens=900, stream=True)
        assert next(stream).choices[0].text
        assert status_of(f"{server.url}/health") == 200
        os.kill(rank, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(openai.APIError, match="rank 1 has ended"):
            list(stream)
        await_status(f"{server.url}/ready", 503)
        assert time.monotonic() - killed < _SECONDS
        assert status_of(f"{server.url}/health") == 200
        assert not runs(rank)
        with pytest.raises(openai.InternalServerError, match="rank 1 has ended") as refused:
            client.completions.create(model=MODEL, prompt="later")
        assert (refused.value.status_code, refused.value.code) == (503, "engine_restarting")
        assert server.process.poll() is None
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
