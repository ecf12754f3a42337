"""Print the table of docs/by-hand.md: what the harness and the test by hand find.

``python -m tests.plugin.first_minutes``. Both look as hard as they do by themselves; the test by
hand does not make what it finds smaller, which would take longer than all the rest.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.plugin.first_minutes.planted_bugs import PLANTED, SOURCE
from tests.plugin.first_minutes.row import row_of


def main() -> None:
    print("| planted | harness | by hand | the harness says |\n|---|---|---|---|")
    caches = {"nothing": SOURCE} | {bug.words: bug.source() for bug in PLANTED}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        for words, row in zip(caches, processes.map(row_of, caches.values()), strict=True):
            print(f"| {words} | {row} |", flush=True)


if __name__ == "__main__":
    main()
