"""Bugs of layers with windows, caps and sinks: what they attend to, and what they give back."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, WINDOWED, WINDOWED_PREFIXES, Mutant

_GROUPS = "roseinfer.kv.groups"
_MANAGER = "roseinfer.kv.manager"
_TRUNCATION = "roseinfer.kv.truncation"
_PREFIXES = "roseinfer.engine.prefix_cache"
_SLOTS = "roseinfer.decode.slots"
_REFERENCE = "roseinfer.attention.reference"
_DECODE = "roseinfer.kernels.attend_decode"
_CHUNK = "roseinfer.kernels.attend_chunks"
_SCORES = "roseinfer.kernels.scores"

_BLOCKS = (WINDOWED, WINDOWED_PREFIXES)


def _mutant(
    name: str,
    wrong: str,
    module: str,
    find: str,
    replace: str,
    rows: tuple[str, ...] = (),
    targets: tuple[str, ...] = (ENGINE,),
) -> Mutant:
    return Mutant(name, wrong, module, find, replace, rows, targets)


MUTANTS = (
    _mutant(
        "window-one-token-too-wide",
        "In decode, a token sees one more than its window has.",
        _DECODE,
        "tl.maximum(at_query - WINDOW + 1, 0)",
        "tl.maximum(at_query - WINDOW, 0)",
        ("21",),
    ),
    _mutant(
        "window-of-a-chunk-one-token-too-wide",
        "In a prompt's chunks, a token sees one more than its window has.",
        _CHUNK,
        "seen = seen & (distance < WINDOW)",
        "seen = seen & (distance <= WINDOW)",
        ("21",),
    ),
    _mutant(
        "window-one-token-too-narrow",
        "In attention without kernels, a token sees one less than its window has.",
        _REFERENCE,
        "(distance >= traits.window)",
        "(distance >= traits.window - 1)",
        ("21",),
    ),
    _mutant(
        "cap-without-its-scale",
        "Scores are capped before they are divided by the cap.",
        _SCORES,
        "traits.scale / cap,",
        "traits.scale,",
    ),
    _mutant(
        "sinks-left-out-of-chunks",
        "In a prompt's chunks, sinks take no part of the weights.",
        _CHUNK,
        "    if SINKING:\n",
        "    if SINKING and LIMIT < 0:\n",
    ),
    _mutant(
        "one-table-for-all-windows",
        "In resident decode without kernels, all layers read the blocks of the first window's.",
        _REFERENCE,
        "own = tables[kv.group_of(layer)]",
        "own = tables[0]",
        ("S13",),
    ),
    _mutant(
        "tables-of-windows-overlap",
        "New blocks of a second window are written over the end of the first one's row.",
        _SLOTS,
        "                begin += self._width\n",
        "                begin += self._width - 1\n",
    ),
    _mutant(
        "given-back-too-early",
        "A block is given back while the next token still sees its last one.",
        _GROUPS,
        "max(0, stored - self.window + 1)",
        "max(0, stored - self.window + 2)",
        ("S13",),
        (*_BLOCKS, ENGINE),
    ),
    _mutant(
        "given-back-and-still-held",
        "A block that left the window leaves the list too, and its holder is still counted.",
        _MANAGER,
        "        for block_id in leaving:\n            pool.drop(block_id)\n",
        "",
        ("S13",),
        _BLOCKS,
    ),
    _mutant(
        "groups-planned-one-by-one",
        "A step is planned in the first groups of layers though the last one finds no room.",
        _MANAGER,
        "            self._pools[0].require(sum(seen.blocks_needed for seen in surveys))\n",
        "            pass\n",
        ("26",),
        (WINDOWED,),
    ),
    _mutant(
        "cut-into-what-was-given-back",
        "A sequence is cut to where its window is gone, and goes on.",
        _TRUNCATION,
        "if length and group.first_seen(length) // pool.block_size < gone:",
        "if length and group.first_seen(length) // pool.block_size < 0:",
        ("S12",),
        (WINDOWED,),
    ),
    _mutant(
        "found-with-a-hole-in-its-window",
        "A prefix is found though a block that its next token sees was evicted.",
        _PREFIXES,
        "if all(gap <= begin for gap, begin",
        "if all(gap <= begin + 1 for gap, begin",
        ("S13", "2"),
        (WINDOWED_PREFIXES, ENGINE),
    ),
    _mutant(
        "evicted-under-a-window",
        "A block that was found again can be evicted as if it had left all windows still.",
        _PREFIXES,
        "            if group in groups:\n                self._drop_loose(_Loose(entry, group))\n",
        "            if group in groups:\n                pass\n",
        ("13", "S13"),
        (WINDOWED_PREFIXES, ENGINE),
    ),
    _mutant(
        "lent-block-counted-as-free",
        "A block that a prefix has of a running sequence counts as one that evicting frees.",
        _PREFIXES,
        "each != SCRATCH and each not in self._lent for each",
        "each != SCRATCH for each",
        ("3", "S13"),
        (WINDOWED_PREFIXES,),
    ),
)
