"""What went wrong, said so that a person can see it: words, a picture of the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.difference import Difference
from pytest_roseinfer.history import History
from pytest_roseinfer.model import token_label
from pytest_roseinfer.payload import as_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.machine import Machine
    from pytest_roseinfer.model import Page
    from pytest_roseinfer.payload import Payload


class Divergence(Difference):
    """Cache and oracle differ. Carries the history up to the step that showed it."""

    def __init__(self, machine: Machine, what: str) -> None:
        self.history = History(machine.spec, tuple(machine.done), finite=machine.payload.finite)
        super().__init__(
            what,
            f"after step {len(machine.done)} of\n{self.history.words()}\n\n{picture(machine)}",
        )


def describe_mismatch(
    payload: Payload, want: torch.Tensor, got: torch.Tensor, layer: int, known: Sequence[int]
) -> str:
    """Where two ``[tokens, heads, head_dim]`` first differ, and what each holds there."""
    if want.shape != got.shape:
        return f"expected shape {list(want.shape)}, found {list(got.shape)}"
    if want.dtype != got.dtype:
        return f"expected {want.dtype}, found {got.dtype}"
    wrong = (as_bits(want) != as_bits(got.contiguous())).any(-1)
    at, head = wrong.nonzero()[0].tolist()
    return (
        f"position {at}, head {head} ({int(wrong.sum())} of {wrong.numel()} wrong): expected "
        f"{payload.decode(want[at, head], layer, head, known)}, found "
        f"{payload.decode(got[at, head], layer, head, known)}"
    )


def picture(machine: Machine) -> str:
    """The tables the cache keeps beside the tokens the oracle expects, layer by layer."""
    lines = ["what should be stored, page by page (sequence.token, x holders where shared):"]
    for seq, pages in machine.oracle.sequences.items():
        shown = " ".join(_page(page) for page in pages)
        lines.append(f"  sequence {seq}: {shown}")
    if "table" not in machine.can:
        return "\n".join(lines)
    for layer in range(machine.spec.num_layers):
        lines.append(f"tables of layer {layer} (block, x its refcount):")
        refcounts = machine.adapter.ledger(layer).refcounts if "ledger" in machine.can else {}
        for seq in machine.oracle.sequences:
            try:
                table = machine.adapter.table(seq, layer)
            except Exception as error:  # the cache is broken; the picture must not be
                lines.append(f"  sequence {seq}: unreadable, {type(error).__name__}: {error}")
                continue
            shown = " ".join(f"{block}x{refcounts.get(block, '?')}" for block in table)
            lines.append(f"  sequence {seq}: {shown}")
    return "\n".join(lines)


def _page(page: Page) -> str:
    tokens = [token_label(token) for token in page.tokens]
    if len(tokens) > 8:
        tokens[4:-3] = ["..."]
    return f"[{' '.join(tokens)}]" + (f"x{page.holders}" if page.holders > 1 else "")
