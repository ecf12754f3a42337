"""Functions of torch that wait for a device, or hand it a graph: no operation tells of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import CodeType


def functions_to_count() -> dict[CodeType, tuple[str, str]]:
    """For the code of each, the group it counts in and its name there.

    Their code, since whoever calls them may have taken hold of them long before.
    """
    waiting = (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.cpu)
    found = {
        owner.synchronize.__code__: ("synchronisations", f"{owner.__name__}.synchronize")
        for owner in waiting
    }
    return found | {torch.cuda.CUDAGraph.replay.__code__: ("graph_replays", "replays")}
