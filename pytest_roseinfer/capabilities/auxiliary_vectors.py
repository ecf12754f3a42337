"""Auxiliary vectors: what a layer stores of a token in addition to its keys and values.

Examples are the indexer keys of sparse attention, and their scales.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pytest_roseinfer.capabilities.cache_data import (
    MAX_RELATIVE_ERROR,
    AuxiliaryVector,
    Tolerance,
)
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    RankPolicy,
    Run,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    describe_error,
    invariant,
)
from pytest_roseinfer.capabilities.operation import call_or_error
from pytest_roseinfer.capabilities.payload import (
    Payload,
    as_bits,
    describe_token,
    kind_of_bits,
    same_bits,
)
from pytest_roseinfer.capabilities.return_values import raise_invalid
from pytest_roseinfer.oracle.pages import padding_token
from pytest_roseinfer.oracle.texts import explain_equal_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.capabilities.observation import Snapshot
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import TextSlice
else:
    from pytest_roseinfer.capabilities import torch

Payloads = Mapping[str, Payload]
"""Encoders of tokens as auxiliary vectors, by name."""


class AuxiliaryVectorMethods:
    """Adapter methods and attribute for auxiliary vectors."""

    auxiliary_vectors: ClassVar[Mapping[str, AuxiliaryVector]] = {}
    """Vectors that each layer stores of a token in addition to its keys and values, by name, such
    as ``{"indexer key": AuxiliaryVector(128)}``."""

    @optional
    def use_auxiliary_vectors(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """Receive the auxiliary vectors of the next write, before ``append`` and the like.

        They are named as in ``auxiliary_vectors``; each tensor is ``[layers, tokens, width]``, in
        the order of the keys of that write, with padding rows. The tensors are overwritten after
        the write.
        """

    @optional
    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        """Return the auxiliary vectors of the tokens that ``peek`` returns, by name.

        Each tensor is ``[tokens, width]``.
        """


def _payloads(run: Run) -> Payloads:
    """Return the encoders of a cache's auxiliary vectors, whose bits all differ."""
    payloads = {}
    for stream, (name, vector) in enumerate(run.declared.auxiliary_vectors.items(), 1):
        dtype = vector.dtype or str(run.payload.dtype).removeprefix("torch.")
        spec = replace(run.spec, num_heads=1, head_dim=vector.width, dtype=dtype)
        tolerance = Tolerance(vector.of_greatest, tensors=dtype) if vector.of_greatest else None
        payloads[name] = Payload(spec, run.payload.finite, tolerance, stream)
    return payloads


class AuxiliaryVectors(Observer):
    """Feeder of auxiliary vectors, right before a write."""

    any_of = ("use_auxiliary_vectors",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.payloads = _payloads(run)
        self._next: Sequence[int] = []
        """Tokens of the present step, with padding."""

    def before(self, step: Operation) -> Mapping[str, int]:
        written = step.written(self.run.oracle)
        self._next = step.inputs(written.tokens) if written else []
        return {}

    def before_call(self, step: Operation, text_slices: Sequence[TextSlice]) -> None:  # noqa: ARG002
        if not self._next:
            return
        vectors = {name: _encode(each, self._next) for name, each in self.payloads.items()}
        use, driven = self.run.adapter.use_auxiliary_vectors, self.run.cache_under_test

        def use_part(part: slice) -> None:
            use({name: tensor[:, part] for name, tensor in vectors.items()})

        driven.pass_input([*vectors.values()], use_part)

    def notes(self, after: Snapshot) -> Payloads:  # noqa: ARG002
        return self.payloads


def _encode(payload: Payload, tokens: Sequence[int]) -> torch.Tensor:
    """Encode tokens as the vectors of one name, ``[layers, tokens, width]``."""
    vectors, _ = payload.all_layers(tokens)
    return vectors[:, :, 0]


class _Place(NamedTuple):
    """Vectors of one name of a sequence, in a layer of a rank."""

    rank: int
    seq: int
    layer: int
    name: str


@invariant(rank=15, needs=("use_auxiliary_vectors",))
def auxiliary_vectors(observation: Observation) -> Finding | None:
    """Each auxiliary vector must read back bit for bit, or within its tolerance."""
    payloads: Payloads = observation.notes[AuxiliaryVectors]
    for (rank, seq, layer), result in observation.after.auxiliary_vectors.items():
        if isinstance(result, Exception):
            problem = f"peek_auxiliary_vectors({seq}, {layer}) raised {describe_error(result)}"
            kind = f"raised {type(result).__name__}"
            return Finding(problem, Location(layer, {seq: None}), result, kind=kind)
        oracle = observation.oracle
        tokens = oracle.tokens(seq)
        tokens = tokens[: len(tokens) - oracle.unwritten(seq)][oracle.first_live(seq, layer) :]
        for name, payload in payloads.items():
            expected, actual = _encode(payload, tokens)[layer], result[name]
            if oracle.unwritten(seq):  # reserved room may hold anything until it is filled
                actual = actual[: len(expected)]
            if not same_bits(expected, actual):
                place = _Place(rank, seq, layer, name)
                if finding := _difference(observation, place, expected, actual):
                    return finding
    return None


def _difference(
    observation: Observation, place: _Place, expected: torch.Tensor, actual: torch.Tensor
) -> Finding | None:
    """Find the first vector that differs; within the tolerance, None."""
    rank, seq, layer, name = place
    whole = Location(layer, {seq: None})
    location = f"peek_auxiliary_vectors: sequence {seq}, layer {layer}, {name}"
    location = f"rank {rank}: {location}" if rank else location
    for kind in ("shape", "dtype", "device"):
        right, found = getattr(expected, kind), getattr(actual, kind)
        if right != found:
            right, found = (list(each) if kind == "shape" else each for each in (right, found))
            return Finding(f"{location}: expected {kind} {right}, found {found}", whole, kind=kind)
    payload: Payload = observation.notes[AuxiliaryVectors][name]
    wrong = (as_bits(expected) != as_bits(actual.contiguous())).any(1)
    if payload.tolerance:
        limits = expected.double().abs().amax(1, keepdim=True) * payload.tolerance.of_greatest
        wrong = ~((actual.double() - expected.double()).abs() <= limits).all(1)
        if not wrong.any():
            return None
    row = int(wrong.nonzero()[0])
    at = observation.oracle.first_live(seq, layer) + row
    token = observation.oracle.tokens(seq)[at]
    found, kind = _describe(observation, place, token, expected[row], actual[row])
    page, slot = divmod(at, observation.spec.block_size)
    return Finding(
        f"{location}: position {at} ({int(wrong.sum())} of {len(wrong)} wrong): expected that of "
        f"{describe_token(token)}, found {found}",
        Location(layer, {seq: page}, slot=slot),
        kind=f"{name} {kind}",
    )


def _describe(
    observation: Observation,
    place: _Place,
    token: int,
    expected: torch.Tensor,
    actual: torch.Tensor,
) -> tuple[str, str]:
    """Describe the vector that a token has in place of its own, and name the kind of it."""
    payloads: Payloads = observation.notes[AuxiliaryVectors]
    oracle, layer, name = observation.oracle, place.layer, place.name
    known = list(dict.fromkeys([*oracle.tokens(place.seq), *observation.first_writers]))
    if (step := observation.operation) and step.padding():
        known += map(padding_token, range(len(step.rows()) + step.padding()))
    for other in (name, *(each for each in payloads if each != name)):
        position = None
        if payloads[other].spec.head_dim == len(actual):
            position = payloads[other].find_position(actual, layer, 0, known)
        if position is None:
            continue
        found = f"that of {describe_token(position.token)}"
        if other != name:
            return f"its {other}" if position.token == token else f"the {other}, {found}", other
        if position.layer != layer:
            return f"{found}, layer {position.layer}: another layer's", "another layer's"
        if abs(position.token - token) == 1:
            return f"{found}: one position off", "one position off"
        same = oracle.texts and explain_equal_token(
            oracle.texts, token, position.token, observation.first_writers
        )
        return f"{found}{same or ''}", "token"
    return payloads[name].describe_unknown_row(actual, expected), kind_of_bits(actual)


def _show_vectors(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    if not (look.reads and run.cache_under_test.device.idle):
        return {}
    ranks = run.adapter.shards() if "shards" in run.features else [run.adapter]
    return {
        "auxiliary_vectors": {
            (at, seq, layer): call_or_error(partial(_read, run, rank), seq, layer)
            for at, rank in enumerate(ranks)
            for seq in run.oracle.readable
            for layer in range(run.spec.num_layers)
        }
    }


def _read(run: Run, rank: Any, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
    """Read the vectors of a sequence; copy, since the next read may reuse the memory."""
    names = run.declared.auxiliary_vectors.keys()
    vectors: Any = rank.peek_auxiliary_vectors(seq, layer)
    valid = isinstance(vectors, Mapping) and vectors.keys() == names
    if not (valid and all(isinstance(each, torch.Tensor) for each in vectors.values())):
        right = f"a dict of tensors [tokens, width] for {', '.join(map(repr, names))}"
        raise_invalid(f"peek_auxiliary_vectors({seq}, {layer})", vectors, right)
    return {name: each.clone() for name, each in vectors.items()}


def refuse_vectors(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for auxiliary vectors that are not declared, or invalid ones."""
    vectors, name = adapter.auxiliary_vectors, adapter.__name__
    defined = "use_auxiliary_vectors" in adapter.abilities
    if defined and not vectors:
        raise TypeError(
            f"{name} defines use_auxiliary_vectors: name the vectors in auxiliary_vectors"
        )
    if vectors and not defined:
        raise TypeError(f"{name}.auxiliary_vectors needs use_auxiliary_vectors()")
    for key, vector in vectors.items():
        if not isinstance(vector, AuxiliaryVector):
            raise TypeError(
                f"{name}.auxiliary_vectors[{key!r}] is {vector!r}: write AuxiliaryVector(128)"
            )
        if not (
            type(vector.width) is int
            and 0 < vector.width < MAX_WIDTH
            and 0 <= vector.of_greatest < MAX_RELATIVE_ERROR
            and isinstance(getattr(torch, vector.dtype or "float32", None), torch.dtype)
        ):
            raise TypeError(
                f"{name}.auxiliary_vectors[{key!r}] is {vector}: width lies between 1 and "
                f"{MAX_WIDTH - 1}, of_greatest between 0 and {MAX_RELATIVE_ERROR}, and dtype is "
                "the name of a torch dtype"
            )


MAX_WIDTH = 1 << 15

AUXILIARY_VECTORS = Capability(
    methods=AuxiliaryVectorMethods,
    needs={
        "use_auxiliary_vectors": ("peek_auxiliary_vectors",),
        "peek_auxiliary_vectors": ("use_auxiliary_vectors",),
    },
    refuse=(refuse_vectors,),
    observers=(AuxiliaryVectors,),
    views=(View(("use_auxiliary_vectors",), _show_vectors),),
    invariants=(auxiliary_vectors,),
    sharded={
        "use_auxiliary_vectors": RankPolicy.SAME,
        "peek_auxiliary_vectors": RankPolicy.FIRST,
    },
)
