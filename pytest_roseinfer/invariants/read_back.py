"""Every sequence must read back bit for bit, by every route there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.cases.payload import as_bits, same_bits
from pytest_roseinfer.findings.location import Place, contents_of, place_of_token

if TYPE_CHECKING:
    from typing import NoReturn

    import torch

    from pytest_roseinfer.running.machine import Machine


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
        what = f"{route}({seq}, {layer}) raised {type(error).__name__}: {error}"
        machine.fail(what, error, place=Place(layer, {seq: None}))
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
            _fail(machine, seq, layer, f"{route}: sequence {seq}, layer {layer}", kind, want, got)


def _fail(
    machine: Machine,
    seq: int,
    layer: int,
    where: str,
    kind: str,
    want: torch.Tensor,
    got: torch.Tensor,
) -> NoReturn:
    """Say where two ``[tokens, heads, head_dim]`` first differ, and what each holds there."""
    where, whole = f"{where}, {kind}", Place(layer, {seq: None})
    if want.shape != got.shape:
        shapes = f"expected shape {list(want.shape)}, found {list(got.shape)}"
        machine.fail(f"{where}: {shapes}", place=whole)
    if want.dtype != got.dtype:
        machine.fail(f"{where}: expected {want.dtype}, found {got.dtype}", place=whole)
    wrong = (as_bits(want) != as_bits(got.contiguous())).any(-1)
    at, head = wrong.nonzero()[0].tolist()
    known = [*machine.oracle.tokens(seq), *machine.seen]
    contents = contents_of(machine, want[at, head], got[at, head], layer, head, kind, known)
    machine.fail(
        f"{where}: position {at}, head {head} ({int(wrong.sum())} of {wrong.numel()} wrong): "
        f"{contents.words()}",
        place=place_of_token(machine, layer, seq, at, contents),
    )
