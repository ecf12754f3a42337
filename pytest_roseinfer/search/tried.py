"""Keeps the example that is tried in a file, so that it is there even where the process ends."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.running.watchdog import WATCHED
from pytest_roseinfer.search import reproduce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.adapters.base import Adapter


@contextmanager
def kept(
    adapter: type[Adapter], check: Callable[[Any], object], name: str, folder: str
) -> Iterator[Callable[[Any], object]]:
    """Make a check that first saves its example, as a trace for the check called ``name``.

    The file is gone afterwards, unless the process was ended in between.
    """
    path = Path(folder) / f"{adapter.__name__}-tried-by-{os.getpid()}.json"
    try:
        trace = reproduce.trace_of(adapter, name, folder)
        beginning = json.dumps(trace)[:-1]
        reproduce.make_folder(path.parent)
        file = path.open("wb", buffering=0)
    except (OSError, TypeError):  # what cannot be saved can be searched for all the same
        yield check
        return
    longest = 0

    def save_and_check(example: Any) -> object:
        nonlocal longest
        text = f'{beginning}, "example": {json.dumps(example.to_json())}}}'
        longest = max(longest, len(text))
        # Blanks write over the longer example before: to cut a file takes milliseconds.
        os.pwrite(file.fileno(), text.ljust(longest).encode(), 0)
        return check(example)

    WATCHED.saved = reproduce.how_to_replay(path, trace["adapter"])
    try:
        yield save_and_check
    finally:
        WATCHED.saved = ""
        file.close()
        path.unlink(missing_ok=True)
