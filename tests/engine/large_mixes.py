"""Many large mixes of requests, in parts: ``python -m tests.engine.large_mixes --parts 60``.

The output file records finished parts, and an interrupted run continues after them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer import settings
from pytest_roseinfer.engines.run import run_mix
from pytest_roseinfer.engines.strategies import large_mixes
from pytest_roseinfer.search.search import Search
from pytest_roseinfer.targets.roseinfer_engine import RoseinferEngine

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import RequestMix

MIXES_PER_PART = 5
PartResult = dict[str, Any]
"""One line of the file: a part's seed, its number, the seconds of its mixes, and its failures."""


def run_part(number: int, *, seed: int) -> PartResult:
    """Run the mixes of a part, which are the same each time."""
    settings.set_current(replace(settings.current(), seed=seed, gpu=torch.cuda.is_available()))
    settings.choose_kernel_runtime()
    torch.set_num_threads(1)
    seconds: list[float] = []
    failures: list[Any] = []

    def check(mix: RequestMix) -> None:
        began = time.monotonic()
        try:
            run_mix(RoseinferEngine, mix)
        except Exception as failure:  # recorded; the next mix is tried
            failures.append({"failure": str(failure), "mix": mix.to_json()})
        seconds.append(round(time.monotonic() - began, 2))

    drawn = large_mixes(RoseinferEngine, device=settings.current().device)
    salt = f"part {number}"
    search = Search(RoseinferEngine, check, drawn, MIXES_PER_PART, "large", salt)
    search.try_examples()
    return {"seed": seed, "part": number, "seconds": seconds, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=60, help=f"of {MIXES_PER_PART} mixes each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--done", type=Path, default=Path("large-mixes.jsonl"))
    options = parser.parse_args()
    lines = options.done.read_text().splitlines() if options.done.exists() else []
    done = [line for line in map(json.loads, lines) if line["seed"] == options.seed]
    pending = sorted(set(range(options.parts)) - {line["part"] for line in done})
    pool = multiprocessing.get_context("spawn").Pool(options.workers)
    with pool, options.done.open("a") as out:
        for line in pool.imap_unordered(partial(run_part, seed=options.seed), pending):
            print(json.dumps(line), file=out, flush=True)
            done.append(line)
    failures = [failed for line in done for failed in line["failures"]]
    mixes = sum(len(line["seconds"]) for line in done)
    for failed in failures:
        print(failed["failure"], end="\n\n")
    print(f"{mixes} mixes of {len(done)} parts were run; {len(failures)} of them failed")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
