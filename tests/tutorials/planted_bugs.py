"""The bugs that are planted in ``paged_kv``, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_name("paged_kv.py").read_text(encoding="utf-8")


def load(source: str) -> Any:
    """Return a module that has this source."""
    library = ModuleType("paged_kv")
    exec(source, vars(library))
    return library


@dataclass(frozen=True, slots=True)
class PlantedBug:
    words: str
    find: str
    becomes: str

    def source(self) -> str:
        """Return the cache with this bug in it."""
        assert SOURCE.count(self.find) == 1, self.words
        return SOURCE.replace(self.find, self.becomes)


PLANTED = (
    PlantedBug(
        "fork raises no refcount",
        "            self.refs[block] += 1\n",
        "            pass\n",
    ),
    PlantedBug("fork hands out its parent's own list of blocks", "list(seq.blocks)", "seq.blocks"),
    PlantedBug(
        "copy-on-write copies one slot too few",
        "used = seq.length % self.size\n",
        "used = seq.length % self.size - 1\n",
    ),
    PlantedBug(
        "copy-on-write copies keys alone",
        "        self.v[:, new, :used] = self.v[:, old, :used]\n",
        "",
    ),
    PlantedBug(
        "shared blocks are written to",
        "                self._own_last(seq)\n",
        "                pass\n",
    ),
    PlantedBug(
        "copy-on-write leaks a reference on the old block",
        "        self._drop(old)\n",
        "",
    ),
    PlantedBug(
        "a block is copied that nobody shares", "self.refs[old] == 1:", "self.refs[old] == 0:"
    ),
    PlantedBug(
        "a block is free as soon as one of its holders leaves",
        "if self.refs[block] == 0:",
        "if True:",
    ),
    PlantedBug(
        "the last position of a block is one too low",
        "            block = seq.blocks[-1]\n",
        "            block = seq.blocks[-1]\n            at = max(0, min(at, self.size - 2))\n",
    ),
    PlantedBug("keys are stored as values", "= v[:, row]", "= k[:, row]"),
    PlantedBug("all rows get the values of the first", "= v[:, row]", "= v[:, 0]"),
    PlantedBug(
        "values are stored in the first layer alone",
        "self.v[:, block, at] = v[:, row]",
        "self.v[0, block, at] = v[0, row]",
    ),
    PlantedBug("keys are rounded to 16 bits", "= k[:, row]", "= k[:, row].half()"),
    PlantedBug(
        "keys of heads over 64 elements are cut off",
        "self.k[:, block, at] = k[:, row]",
        "self.k[:, block, at, :, :64] = k[:, row, :, :64]",
    ),
    PlantedBug(
        "keys are taken to lie in a row in memory",
        "= k[:, row]",
        "= k.view(-1).view(k.shape)[:, row]",
    ),
    PlantedBug("a cut leaves the table as it was", "        del seq.blocks[keep:]\n", ""),
    PlantedBug(
        "a cut at a block's edge keeps a block too many",
        "keep = -(-length // self.size)",
        "keep = length // self.size + 1",
    ),
    PlantedBug(
        "a cut gives up a block that is partly kept",
        "keep = -(-length // self.size)",
        "keep = length // self.size",
    ),
    PlantedBug("copies are not counted when room is", "if held > 1:", "if held > 99:"),
    PlantedBug(
        "the last holder of a block is counted as copying it",
        "                refs[last] = held - 1\n",
        "",
    ),
    PlantedBug(
        "a batch with too little room is stored in part",
        "if self._needs(seqs) > len(self.spare):",
        "if self._needs(seqs[:1]) > len(self.spare):",
    ),
    PlantedBug(
        "a sequence that was dropped keeps its table",
        "        seq.blocks = []\n        seq.length = 0\n\n    def cut",
        "\n    def cut",
    ),
)
