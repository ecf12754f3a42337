"""Print the list of docs/explanation/by-hand.md: bugs that the harness and the test by hand find.

Run it by ``python -m tests.tutorials``. Both search with their defaults; the test by hand does
not shrink its failures, which would take longer than all else.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from textwrap import fill

from tests.tutorials.planted_bugs import PLANTED, SOURCE
from tests.tutorials.row import row_of


def main() -> None:
    caches = {"nothing": SOURCE} | {bug.name: bug.source() for bug in PLANTED}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        for words, row in zip(caches, processes.map(row_of, caches.values()), strict=True):
            entry = f"- **{words}** {row}"
            print(fill(entry, 110, subsequent_indent="  ", break_on_hyphens=False), flush=True)


if __name__ == "__main__":
    main()
