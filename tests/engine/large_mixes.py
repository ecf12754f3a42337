"""Many large mixes of requests, in parts: ``python -m tests.engine.large_mixes --parts 60``.

What is done is noted in a file, and a run that was ended goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer import settings
from pytest_roseinfer.engines.run import run_mix
from pytest_roseinfer.engines.strategies import large_mixes
from pytest_roseinfer.search import try_examples
from pytest_roseinfer.targets.roseinfer_engine import RoseinferEngine

if TYPE_CHECKING:
    from pytest_roseinfer.engines.mix import RequestMix

OF_A_PART = 5


def run_part(number: int, device: str) -> str:
    """Run the mixes of a part, which are the same every time; return what went wrong."""
    tried: list[RequestMix] = []

    def check(mix: RequestMix) -> None:
        run_mix(RoseinferEngine, mix)

    drawn = large_mixes(RoseinferEngine, device=device)
    try:
        try_examples(
            RoseinferEngine,
            check,
            drawn,
            OF_A_PART,
            name="large",
            salt=f"part {number}",
            tried=tried,
        )
    except Exception as failure:
        return f"{failure}\non {tried[-1].to_json() if tried else 'nothing'}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=60, help=f"of {OF_A_PART} mixes each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500, help="begin no part later")
    parser.add_argument("--done", type=Path, default=Path("large-mixes.jsonl"))
    asked = parser.parse_args()
    settings.set_current(
        replace(settings.current(), seed=asked.seed, gpu=torch.cuda.is_available())
    )
    settings.choose_kernel_runtime()
    began = time.monotonic()
    lines = asked.done.read_text().splitlines() if asked.done.exists() else []
    known = {(line["seed"], line["part"]): line["wrong"] for line in map(json.loads, lines)}
    with asked.done.open("a") as out:
        for part in range(asked.parts):
            if (asked.seed, part) in known or time.monotonic() - began > asked.seconds:
                continue
            wrong = known[asked.seed, part] = run_part(part, settings.current().device)
            print(
                json.dumps({"seed": asked.seed, "part": part, "wrong": wrong}), file=out, flush=True
            )
    mine = [wrong for (seed, _), wrong in known.items() if seed == asked.seed]
    print(*(wrong for wrong in mine if wrong), sep="\n\n")
    bad = sum(map(bool, mine))
    print(f"{len(mine)} of {asked.parts} parts of {OF_A_PART} mixes done, {bad} of them went wrong")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
