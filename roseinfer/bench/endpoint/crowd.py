"""Many clients at once, in threads of several processes, so that none holds up another."""

from __future__ import annotations

import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roseinfer.bench.endpoint.streamed_answer import Answer, Client

_COMING = 2.0
"""Seconds in which the processes start."""
_TOKENS = range(4, 256)
"""Ids that prompts are drawn from: all vocabularies have them, and most have others before."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What each client does: it asks for text after text, and reads the last one to its end."""

    client: Client
    prompt_tokens: int
    opens: float
    closes: float
    """Nobody asks later. Both are of ``time.monotonic``."""

    def answers(self, seed: int) -> list[Answer]:
        rng = random.Random(seed)
        time.sleep(max(0.0, self.opens - time.monotonic()))
        found = []
        while time.monotonic() < self.closes:
            found.append(self.client.ask(rng.choices(_TOKENS, k=self.prompt_tokens)))
        return found


def _some(visit: Visit, seeds: range) -> list[Answer]:
    """Have some clients visit, each in a thread of this process."""
    with ThreadPoolExecutor(len(seeds)) as threads:
        return [answer for found in threads.map(visit.answers, seeds) for answer in found]


def visiting(
    client: Client, *, clients: int, processes: int, prompt_tokens: int, seconds: float
) -> tuple[Visit, list[Answer]]:
    """Return when so many clients visited, and what all of them got."""
    opens = time.monotonic() + _COMING
    visit = Visit(client, prompt_tokens, opens, opens + seconds)
    groups = [range(first, clients, processes) for first in range(min(clients, processes))]
    # No fork: this process may have threads, and torch.
    with ProcessPoolExecutor(len(groups), multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(_some, visit, seeds) for seeds in groups]
        return visit, [answer for each in found for answer in each.result()]
