"""Running a search as fast as it can go, in spite of what CPython and torch do by themselves."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_OBJECTS = 20_000
"""New objects between two collections of garbage, in place of CPython's 700: Triton's
interpreter makes thousands in every operation and leaves hardly a cycle behind."""
_FRAME_WORDS = 1 << 17
"""The size of ``undisturbed``'s own frame.

CPython lays frames into chunks of 16 KiB and gives a chunk back to the system as soon as its
last frame is gone. A loop whose calls happen to begin at the end of a chunk maps and unmaps
memory in every round; that can cost a quarter of a run, and comes and goes with the number of
frames outside. A frame of a megabyte is given a chunk of two, and the other half of that is
more than all the frames inside can fill.
"""


def undisturbed(search: Callable[[], object]) -> None:
    """Call ``search`` with room for its frames, little garbage collection and one thread.

    Tensors as small as these only wait for further threads.
    """
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(_OBJECTS, *thresholds[1:])
    try:
        search()
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)


undisturbed.__code__ = undisturbed.__code__.replace(co_stacksize=_FRAME_WORDS)
