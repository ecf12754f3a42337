"""Launching the kernel of a whole decode step, on a model's weights and a cache where they lie."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.context_parts import num_parts
from roseinfer.kernels.cuda.tensor_maps import tensor_maps
from roseinfer.kernels.moves import announced
from roseinfer.kernels.persistent.moved import Launched, moved
from roseinfer.kernels.persistent.sizes import ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kernels.cuda.gpu_program import Program
    from roseinfer.kernels.persistent.sizes import StepSizes
    from roseinfer.kernels.persistent.step_weights import StepLayer, StepWeights

KERNEL = "decode_step"
"""Its name in the source."""
_LAYER_POINTERS = 9
_COUNTERS = 64
"""Numbers that count launches, and programs that are done."""


_POINTERS = (
    "layers", "maps", "words", "norm_end", "token", "length", "table", "residual", "qkv_new",
    "attended", "hidden", "logits", "sums", "seen", "sync", "error",
)  # fmt: skip


class StepParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("block_pitch", ctypes.c_longlong),
        ("num_layers", ctypes.c_int),
        ("most_parts", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("head_epsilon", ctypes.c_float),
        ("embedding_times", ctypes.c_float),
        ("added_times", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class WholeStep:
    """Computes the logits of one sequence's next token in one launch, on one cache."""

    def __init__(
        self,
        sizes: StepSizes,
        weights: StepWeights,
        caches: Sequence[tuple[Tensor, Tensor]],
        max_length: int,
        program: Program,
    ) -> None:
        """``caches`` are the keys and values of each layer; they must stay where they are."""
        self._sizes, self._weights, self._program = sizes, weights, program
        self._caches = caches
        device = weights.words.device
        most_parts = num_parts(max_length)
        parts = sizes.heads, most_parts + 1
        with torch.inference_mode(False):
            self._pointers = torch.tensor(
                [_pointers(each, *own) for each, own in zip(weights.layers, caches, strict=True)],
                dtype=torch.int64,
                device=device,
            )
            self._maps = tensor_maps(program.encode, _matrices(sizes, weights), ROWS)
            counts = (2 * sizes.width, sizes.qkv, sizes.heads * sizes.dim, sizes.mlp)
            self._handed = [
                torch.zeros(count, dtype=torch.int32, device=device) for count in counts
            ]
            self._sums = torch.zeros((*parts, sizes.dim), dtype=torch.int64, device=device)
            self._seen = torch.zeros((*parts, 2), dtype=torch.int64, device=device)
            self._sync = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
            self.given_up = torch.zeros(2, dtype=torch.int32, device=device)
            """Behind the first number, how many launches gave up waiting for other programs."""
        self._most_parts = most_parts

    def logits(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Store the key and value of a row's token in every layer; return ``[1, vocab]`` logits.

        ``lengths`` counts what is stored before, and ``table`` lists the row's blocks. All three
        are read on the device alone. A launch that gives up waiting makes logits of NaN.
        """
        assert tokens.dtype == lengths.dtype == table.dtype == torch.int64
        weights = self._weights
        logits = weights.words.new_empty((1, self._sizes.vocab))
        params = StepParams(
            *self._fixed(tokens, lengths, table),
            logits.data_ptr(),
            *(each.data_ptr() for each in (self._sums, self._seen, self._sync, self.given_up)),
            self._caches[0][0].stride(0),
            len(weights.layers),
            self._most_parts,
            weights.epsilon,
            weights.head_epsilon(),
            weights.embedding_times,
            weights.added_times,
            weights.scale,
        )
        launched = Launched(tokens, lengths, table, logits)
        parts = self._sums, self._seen
        given = self._sizes, weights, self._caches, self._handed, parts, launched
        with announced(KERNEL, partial(moved, *given)):
            self._program.launch(params, self._sizes.programs)
        return logits

    def _fixed(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> list[int]:
        """Return the pointers in front of the logits."""
        weights = self._weights
        made = (self._pointers, self._maps)
        read = (weights.words, weights.norm, tokens, lengths, table)
        return [each.data_ptr() for each in (*made, *read, *self._handed)]


def _matrices(sizes: StepSizes, weights: StepWeights) -> list[tuple[Tensor, int]]:
    """Return what the kernel fetches, in its order, and how many inputs a tile of each has."""
    of_width, of_attended, of_mlp = sizes.chunks
    found = []
    for layer in weights.layers:
        found += [(layer.qkv, of_width), (layer.out, of_attended)]
        found += [(layer.gates_and_ups, of_width), (layer.down, of_mlp)]
    return [*found, (weights.head, of_width)]


def _pointers(layer: StepLayer, keys: Tensor, values: Tensor) -> list[int]:
    """Return a layer's pointers, ``Layer`` in the source."""
    rotation = layer.rotation
    turned: tuple[Tensor | None, ...] = (None,) * 4
    if rotation is not None:
        turned = rotation.cosines, rotation.sines, rotation.query_gain, rotation.key_gain
    given = (
        layer.norm, layer.qkv_bias, layer.norm_of_mlp, *turned, keys, values,
    )  # fmt: skip
    assert len(given) == _LAYER_POINTERS
    return [0 if each is None else each.data_ptr() for each in given]
