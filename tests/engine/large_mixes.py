"""Many large mixes of requests, in parts: ``python -m tests.engine.large_mixes --parts 60``.

A file notes the parts that are done, and a run that was ended continues after them.
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

OF_A_PART = 5
Done = dict[str, Any]
"""One line of the file: a part's seed, its number, its mixes' seconds, and those that failed."""


def run_part(number: int, *, seed: int) -> Done:
    """Run the mixes of a part, which are the same every time."""
    settings.set_current(replace(settings.current(), seed=seed, gpu=torch.cuda.is_available()))
    settings.choose_kernel_runtime()
    torch.set_num_threads(1)
    seconds: list[float] = []
    wrong: list[Any] = []

    def check(mix: RequestMix) -> None:
        began = time.monotonic()
        try:
            run_mix(RoseinferEngine, mix)
        except Exception as failure:  # noted, and the next mix is tried
            wrong.append({"failure": str(failure), "mix": mix.to_json()})
        seconds.append(round(time.monotonic() - began, 2))

    drawn = large_mixes(RoseinferEngine, device=settings.current().device)
    salt = f"part {number}"
    search = Search(RoseinferEngine, check, drawn, OF_A_PART, "large", salt)
    search.try_examples()
    return {"seed": seed, "part": number, "seconds": seconds, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=60, help=f"of {OF_A_PART} mixes each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--done", type=Path, default=Path("large-mixes.jsonl"))
    asked = parser.parse_args()
    lines = asked.done.read_text().splitlines() if asked.done.exists() else []
    done = [line for line in map(json.loads, lines) if line["seed"] == asked.seed]
    due = sorted(set(range(asked.parts)) - {line["part"] for line in done})
    pool = multiprocessing.get_context("spawn").Pool(asked.workers)
    with pool, asked.done.open("a") as out:
        for line in pool.imap_unordered(partial(run_part, seed=asked.seed), due):
            print(json.dumps(line), file=out, flush=True)
            done.append(line)
    wrong = [failed for line in done for failed in line["wrong"]]
    mixes = sum(len(line["seconds"]) for line in done)
    for failed in wrong:
        print(failed["failure"], end="\n\n")
    print(f"{mixes} mixes of {len(done)} parts were run; {len(wrong)} of them failed")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
