"""What planning an append depends on: steps planned without tensors, one quantity varied."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass
from statistics import median

from roseinfer.bench.reporting import PoolRow, ScalingRow
from roseinfer.bench.timing import in_rounds, time_calls
from roseinfer.kv import plan as planning
from roseinfer.kv.pool import BlockPool

_BLOCK_SIZE = 64
_SEQUENCES = 64
_TOKENS = 1024
"""These three stay as they are while another quantity varies."""
_POOL_BUILDS = 3


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    sequences: tuple[int, ...]
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: int


class Metadata:
    """Sequences of equal length in a pool without tensors; the last few of them decode."""

    def __init__(self, sequences: int, tokens: int, decoding: int) -> None:
        blocks = -(-tokens // _BLOCK_SIZE)
        self.pool = BlockPool(layer=0, first_id=0, size=sequences * blocks + decoding + 1)
        self._lists = [self._sequence(tokens) for _ in range(sequences)]
        self.decoding = self._lists[-decoding:]
        self.tokens = tokens

    def _sequence(self, tokens: int) -> list[int]:
        pool, size = self.pool, _BLOCK_SIZE
        return [
            pool.first_id + pool.take(start=at, length=min(size, tokens - at)).block_index
            for at in range(0, tokens, size)
        ]

    def plan(self) -> None:
        seen = planning.survey(self.pool, _BLOCK_SIZE, self.decoding, None)
        self.pool.require(seen.blocks_needed)
        planning.commit(self.pool, _BLOCK_SIZE, seen)

    def plan_us(self) -> float:
        """Mean over the tokens of one block, in which every sequence rolls over once."""
        microseconds = time_calls(self.plan, _BLOCK_SIZE, lambda: None)
        for block_ids in self.decoding:  # as long as before, in blocks and in the last one
            self.pool.drop(block_ids.pop(0) - self.pool.first_id)
        return microseconds


def measure_scaling(config: ScalingConfig) -> list[ScalingRow]:
    few, tokens = _SEQUENCES, _TOKENS
    blocks_each = tokens // _BLOCK_SIZE
    cases = {("sequences", count): Metadata(count, tokens, count) for count in config.sequences}
    cases |= {("tokens each", length): Metadata(few, length, few) for length in config.tokens}
    cases |= {
        ("blocks in use", count): Metadata(count // blocks_each, tokens, few)
        for count in config.blocks
    }
    times = in_rounds({key: cases[key].plan_us for key in cases}, config.rounds, "scaling")
    return [
        ScalingRow(
            varied=varied,
            sequences=len(case.decoding),
            tokens_each=case.tokens,
            blocks_in_use=len(case.pool.infos) - 1,
            plan_us=times[varied, at].median_us,
            us_per_sequence=times[varied, at].median_us / len(case.decoding),
        )
        for (varied, at), case in cases.items()
    ]


def measure_pool(blocks: int) -> PoolRow:
    sequences = blocks * _BLOCK_SIZE // _TOKENS
    seconds = []
    for _ in range(_POOL_BUILDS):
        begin = time.perf_counter()
        built = Metadata(sequences, _TOKENS, 1)
        seconds.append(time.perf_counter() - begin)
        del built  # outside the time of the next
    tracemalloc.start()
    built = Metadata(sequences, _TOKENS, 1)
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    used = len(built.pool.infos) - 1
    return PoolRow(used, median(seconds), traced / used)
