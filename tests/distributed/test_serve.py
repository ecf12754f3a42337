"""``roseinfer serve --tensor-parallel-size 2``: completions, and the death of a rank.

The command starts the engine's process, which starts rank 1.
"""

from __future__ import annotations

import os
import signal
import time

import openai
import pytest

from tests.engine.continuations import TEXTS, greedy, one, small_llm
from tests.replicas.replica_processes import descendants_of, is_running
from tests.server.serve_process import PATIENCE, Serving, serving
from tests.server.served import MODEL
from tests.server.test_shutdown import LONG, await_status, client_of, status_of

_SECONDS = 10.0
"""Seconds until all processes have noticed a killed rank, even if cores are shared."""
_STARTS_S = 150.0
"""Seconds to start: three processes import torch, two of them one after the other."""


def rank_1_of(server: Serving) -> int:
    _engine, rank = descendants_of(server.process.pid)
    return rank


@pytest.mark.slow
def test_sharded_server_matches_one_process_and_ends_streams_with_a_killed_rank() -> None:
    alone = one(small_llm("cpu"), TEXTS[0], greedy(40)).text
    options = "--model", MODEL, "--tensor-parallel-size", "2"
    with serving(*options, timeout=_STARTS_S) as server, client_of(server) as client:
        rank = rank_1_of(server)
        answer = client.completions.create(
            model=MODEL, prompt=TEXTS[0], max_tokens=40, temperature=0
        )
        assert answer.choices[0].text == alone
        stream = client.completions.create(**LONG, max_tokens=900, stream=True)
        assert next(stream).choices[0].text
        assert status_of(f"{server.url}/health") == 200
        os.kill(rank, signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(openai.APIError, match="rank 1 has ended"):
            list(stream)
        await_status(f"{server.url}/ready", 503)
        assert time.monotonic() - killed_at < _SECONDS
        assert status_of(f"{server.url}/health") == 200
        assert not is_running(rank)
        with pytest.raises(openai.InternalServerError, match="rank 1 has ended") as rejected:
            client.completions.create(model=MODEL, prompt="later")
        assert (rejected.value.status_code, rejected.value.code) == (503, "engine_restarting")
        assert server.process.poll() is None
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
