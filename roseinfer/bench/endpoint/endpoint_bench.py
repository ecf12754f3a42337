"""``endpoint``: what a server streams to many clients, and how long they wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.bench.endpoint.crowd import Visit, visiting
from roseinfer.bench.endpoint.streamed_answer import Answer, Client
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.serving.figures import LatencyRow
from roseinfer.config import ServerConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_TEXTS = """\
What came in the measured time. As many clients had come and gone before. A part is what a server
sends at once: one token or several."""
_WAITS = """\
Of the texts asked for in that time. TTFT: from asking to the first part. TPOT: (last part - first
part) / (tokens - 1). ITL: between one part and the next. latency: from asking to the last part."""
_ASKED = ("url", "model", "in_flight", "prompt_tokens", "max_new_tokens", "seconds", "processes")


@dataclass(frozen=True, slots=True)
class StreamedRow:
    texts: int
    tok_per_s: float
    parts_per_s: float
    tokens_per_part: float


def run(args: argparse.Namespace) -> Report:
    client = Client(args.url, args.model, ServerConfig().api_key, args.max_new_tokens)
    sizes = {"processes": args.processes, "prompt_tokens": args.prompt_tokens}
    visiting(client, clients=args.in_flight, seconds=args.warmup_seconds, **sizes)
    visit, answers = visiting(client, clients=args.in_flight, seconds=args.seconds, **sizes)
    tables = [
        Table("streamed", _TEXTS, [_streamed(visit, answers)]),
        Table("latencies", _WAITS, _waits(answers)),
    ]
    asked = {name: getattr(args, name) for name in _ASKED}
    return Report("endpoint", args.command, torch.device("cpu"), asked, tables)


def _streamed(visit: Visit, answers: Sequence[Answer]) -> StreamedRow:
    seconds = visit.closes - visit.opens
    tokens = sum(answer.tokens_within(visit.opens, visit.closes) for answer in answers)
    parts = sum(visit.opens <= part < visit.closes for each in answers for part in each.parts)
    return StreamedRow(len(answers), tokens / seconds, parts / seconds, tokens / max(1, parts))


def _waits(answers: Sequence[Answer]) -> list[LatencyRow]:
    whole = [each for each in answers if each.tokens > 1]
    waits: dict[str, list[float]] = {
        "TTFT": [each.parts[0] - each.asked for each in answers],
        "TPOT": [(each.parts[-1] - each.parts[0]) / (each.tokens - 1) for each in whole],
        "ITL": [gap for each in answers for gap in each.gaps],
        "latency": [each.parts[-1] - each.asked for each in answers],
    }
    return [LatencyRow.of("streamed", what, seconds) for what, seconds in waits.items()]
