"""``append --scaling``: steps planned without tensors, one quantity varied at a time."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass
from statistics import median

from roseinfer.bench.reporting import Table
from roseinfer.bench.timing import in_rounds, time_calls
from roseinfer.kv import plan as planning
from roseinfer.kv.pool import BlockPool

_SCALING = "Planning a step, without tensors: mean over a whole block, rollover included."
_POOL = "A pool filled by sequences. Wanted: 1,000,000 blocks in under 2 s, at most 200 bytes each."
_BLOCK_SIZE = 64
_SEQUENCES = 64
_TOKENS = 1024
"""These three stay as they are while another quantity varies."""
_POOL_BUILDS = 3


@dataclass(frozen=True, slots=True)
class ScalingRow:
    varied: str
    sequences: int
    tokens_each: int
    blocks_in_use: int
    plan_us: float
    us_per_sequence: float


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool filled by sequences, their block lists included."""

    blocks_in_use: int
    build_s: float
    bytes_per_block: float


class Metadata:
    """Sequences of equal length in a pool without tensors; the last few of them decode."""

    def __init__(self, sequences: int, tokens: int, decoding: int) -> None:
        blocks = -(-tokens // _BLOCK_SIZE)
        size = sequences * blocks + decoding + 1
        self.pool = BlockPool(layer=0, first_id=0, size=size, block_size=_BLOCK_SIZE)
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
        seen = planning.survey(self.pool, self.decoding, None)
        planning.commit(self.pool, seen)

    def plan_us(self) -> float:
        """Mean over the tokens of one block, in which every sequence rolls over once."""
        microseconds = time_calls(self.plan, _BLOCK_SIZE)
        for block_ids in self.decoding:  # as long as before, in blocks and in the last one
            self.pool.drop(block_ids.pop(0) - self.pool.first_id)
        return microseconds


def tables(*, quick: bool) -> tuple[Table, Table]:
    blocks = (1_024, 16_384) if quick else (1_024, 100_000, 1_000_000)
    pool = [_measure_pool(count) for count in blocks]
    return Table("scaling", _SCALING, _measure_scaling(blocks, quick)), Table("pool", _POOL, pool)


def _measure_scaling(blocks: tuple[int, ...], quick: bool) -> list[ScalingRow]:
    sequences = (64, 256) if quick else (64, 256, 1_024, 4_096)
    lengths = (16, 1_024) if quick else (16, 256, 1_024, 4_096, 16_384)
    few, tokens = _SEQUENCES, _TOKENS
    held = tokens // _BLOCK_SIZE
    cases = {("sequences", count): Metadata(count, tokens, count) for count in sequences}
    cases |= {("tokens each", length): Metadata(few, length, few) for length in lengths}
    cases |= {("blocks in use", count): Metadata(count // held, tokens, few) for count in blocks}
    samplers = {key: case.plan_us for key, case in cases.items()}
    times = in_rounds(samplers, 3 if quick else 15, "scaling")
    rows = []
    for (varied, at), case in cases.items():
        decoding, used, us = len(case.decoding), len(case.pool.infos) - 1, times[varied, at]
        each = us.median_us / decoding
        rows.append(ScalingRow(varied, decoding, case.tokens, used, us.median_us, each))
    return rows


def _measure_pool(blocks: int) -> PoolRow:
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
