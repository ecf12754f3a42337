"""Bugs planted in ``paged_kv``, one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_name("paged_kv.py").read_text(encoding="utf-8")


def load(source: str) -> Any:
    """Return a module with this source."""
    library = ModuleType("paged_kv")
    exec(source, vars(library))
    return library


@dataclass(frozen=True, slots=True)
class PlantedBug:
    name: str
    find: str
    replacement: str

    def source(self) -> str:
        """Return the source of the cache with this bug."""
        assert SOURCE.count(self.find) == 1, self.name
        return SOURCE.replace(self.find, self.replacement)


PLANTED = (
    PlantedBug(
        "fork increments no refcount",
        "            self.refs[block] += 1\n",
        "            pass\n",
    ),
    PlantedBug(
        "fork returns its parent's list of blocks, not a copy", "list(seq.blocks)", "seq.blocks"
    ),
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
        "shared blocks are written in place",
        "                self._own_last(seq)\n",
        "                pass\n",
    ),
    PlantedBug(
        "copy-on-write leaks a reference on the old block",
        "        self._drop(old)\n",
        "",
    ),
    PlantedBug("a block with one holder is copied", "self.refs[old] == 1:", "self.refs[old] == 0:"),
    PlantedBug(
        "a shared block is freed with its first holder",
        "if self.refs[block] == 0:",
        "if True:",
    ),
    PlantedBug(
        "the last position of a block is never written",
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
        "keys are assumed to be contiguous",
        "= k[:, row]",
        "= k.view(-1).view(k.shape)[:, row]",
    ),
    PlantedBug("truncation leaves the table unchanged", "        del seq.blocks[keep:]\n", ""),
    PlantedBug(
        "truncation at a block boundary keeps a block too many",
        "keep = -(-length // self.size)",
        "keep = length // self.size + 1",
    ),
    PlantedBug(
        "truncation frees a block that still has tokens",
        "keep = -(-length // self.size)",
        "keep = length // self.size",
    ),
    PlantedBug("copies are not counted as needed blocks", "if held > 1:", "if held > 99:"),
    PlantedBug(
        "the last holder of a block is counted as needing a copy",
        "                refs[last] = held - 1\n",
        "",
    ),
    PlantedBug(
        "a batch that does not fit is stored in part",
        "if self._needs(seqs) > len(self.spare):",
        "if self._needs(seqs[:1]) > len(self.spare):",
    ),
    PlantedBug(
        "a freed sequence keeps its table",
        "        seq.blocks = []\n        seq.length = 0\n\n    def cut",
        "\n    def cut",
    ),
)
