"""Serves a mix of requests once more, and notes what becomes of each."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_roseinfer.engines.run import MixRun, room_for_forks, served_forks

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.adapters.mix import RequestMix
    from pytest_roseinfer.engines.run import Served
    from pytest_roseinfer.findings.drawn.timeline import Line, Timeline


def timeline_of(adapter: type[EngineAdapter], mix: RequestMix) -> Timeline:
    """Return the timeline of a mix, up to where a request is served wrongly."""
    run = MixRun(adapter, mix)
    lines: list[Line] = [_line(at) for at in range(mix.size)]
    step, ended = -1, False
    with suppress(Exception):  # what is wrong was said by the run that found it
        for step in run.steps():
            _note(run, lines, step)
        ended = True
    if not ended:
        step += 1
        _note(run, lines, step)
        if run.comparing:
            lines[run.comparing.number]["wrong"] = True
    for line, asked in zip(lines, run.settled().requests, strict=True):
        line["words"] = adapter.request_in_words(asked)
    return {"steps": step + 1, "requests": lines}


def timeline_of_forks(adapter: type[EngineAdapter], mix: RequestMix) -> Timeline:
    """Return how the forks of a mix's first prompt ended; its engine serves them in one call."""
    lines: list[Line] = [
        _line(at, f"fork {at} of request 0's prompt") for at in range(len(mix.requests))
    ]
    for line, fork in zip(lines, served_forks(adapter(), room_for_forks(mix)), strict=True):
        line["stages"], line["tokens"] = ["arrived", "ended"], [0, len(fork.found)]
        line["expected"], line["found"] = list(fork.expected), list(fork.found)
        if fork.parted is not None:
            line["parted"], line["parted_step"], line["wrong"] = fork.parted, 1, True
    return {"steps": 2, "requests": lines}


def _line(number: int, words: str = "") -> Line:
    return {
        "number": number,
        "words": words,
        "stages": [],
        "tokens": [],
        "expected": [],
        "found": [],
        "parted": None,
        "parted_step": None,
        "wrong": False,
    }


def _note(run: MixRun, lines: list[Line], step: int) -> None:
    for line in lines:
        line["stages"].append("")
        line["tokens"].append(0)
    for each in run.served:
        line = lines[each.number]
        found = list(run.adapter.tokens(each.request))
        over = line["stages"][-2:-1]
        line["stages"][-1] = _stage(run, each, first=not any(line["stages"]), had=len(found))
        if over and over[0] in ("ended", "cancelled", "") and any(line["stages"][:-1]):
            line["stages"][-1] = ""
        line["tokens"][-1] = len(found)
        line["expected"], line["found"] = list(each.expected), found
        parted = _parted(each, found, ended=run.adapter.ended(each.request))
        if parted is not None and line["parted"] is None:
            line["parted"], line["parted_step"], line["wrong"] = parted, step, True


def _stage(run: MixRun, each: Served, *, first: bool, had: int) -> str:
    if run.adapter.ended(each.request):
        return "cancelled" if each.cancelled else "ended"
    if first:
        return "arrived"
    if run.adapter.defines("stage"):
        return run.adapter.stage(each.request)
    return "decoding" if had else "arrived"


def _parted(each: Served, found: list[int], *, ended: bool) -> int | None:
    """Return the first token that is not as alone; None while all are."""
    if each.tied is not None:
        return None
    pairs = enumerate(zip(each.expected, found, strict=False))
    if (at := next((at for at, (right, got) in pairs if right != got), None)) is not None:
        return at
    short = ended and not each.cancelled and len(found) < len(each.expected)
    return min(len(found), len(each.expected)) if short or len(found) > len(each.expected) else None
