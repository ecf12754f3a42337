"""Every sequence must read back bit for bit, by every route there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.divergence import describe_mismatch
from pytest_roseinfer.payload import same_bits

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.machine import Machine


def check_read_back(machine: Machine) -> None:
    routes = ["peek", "gather"] if "gather" in machine.can else ["peek"]
    for seq in machine.oracle.sequences:
        tokens = machine.oracle.tokens(seq)
        written = len(tokens) - _unwritten(machine, seq)
        expected = machine.payload.all_layers(tokens[:written])
        for layer in range(machine.spec.num_layers):
            for route in routes:
                found = _read(machine, route, seq, layer)
                if written < len(tokens):
                    found = (found[0][:written], found[1][:written])
                _compare(machine, seq, layer, route, [cache[layer] for cache in expected], found)


def _unwritten(machine: Machine, seq: int) -> int:
    """How many of a sequence's tokens have room but were not written yet."""
    rows = [row for due in machine.reserved for row in due.step.rows()]
    return sum(count for name, count in rows if name == seq)


def _read(machine: Machine, route: str, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        found: tuple[torch.Tensor, torch.Tensor] = getattr(machine.adapter, route)(seq, layer)
    except Exception as error:
        machine.fail(f"{route}({seq}, {layer}) raised {type(error).__name__}: {error}", error)
    return found


def _compare(
    machine: Machine,
    seq: int,
    layer: int,
    route: str,
    expected: list[torch.Tensor],
    found: tuple[torch.Tensor, torch.Tensor],
) -> None:
    for kind, want, got in zip("KV", expected, found, strict=True):
        if not same_bits(want, got.contiguous()):
            known = [*machine.oracle.tokens(seq), *machine.seen]
            what = describe_mismatch(machine.payload, want, got, layer, known)
            machine.fail(f"{route}: sequence {seq}, layer {layer}, {kind}: {what}")
