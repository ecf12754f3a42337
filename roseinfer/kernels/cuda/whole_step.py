"""Launching the kernel of a whole decode step, on a model's weights and a cache where they lie."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import SIDE, tensor_maps
from roseinfer.kernels.cuda.toolchain import CannotCompile, GpuProgram, compiled, together
from roseinfer.kernels.runtime import power_of_two
from roseinfer.kernels.traffic import announced, taken
from roseinfer.kernels.triton import streamed
from roseinfer.kernels.triton.norm import warps_of_row
from roseinfer.kernels.triton.softmax import num_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program
    from roseinfer.layer_traits import LayerTraits, Rotation

# The sizes that the kernel of a whole step is compiled for, and its source with them.


_FILES = ("sizes", "producer", "words", "consumer", "attention", "phases", "step")
"""The source's parts, which follow on each other."""
ROWS = 8
"""Outputs of a tile of weights."""
_LEAST_CHUNK = 128
"""Inputs of a tile. With fewer, tiles would be too small to be asked for as fast as they come."""
_TILE_T = 64
_WARPS = 8


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What the compiler is told, under these names in capitals."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    """Of a head."""
    mlp: int
    vocab: int
    turn: int
    """How many numbers of a head are rotated."""
    block_size: int
    out_parts: int
    """Parts in which the inputs of attention's output are added up."""
    down_parts: int
    norm_warps: int
    """Warps of Triton's norm kernel, which decide in what order it adds up."""
    programs: int
    normed: bool = False
    """Queries and keys are normed, each head by itself."""
    stages: int = 0
    """Tiles of the ring."""
    in_flight: int = 4
    """The most tiles that a program has asked for and not received."""
    most_chunk: int = 1024
    """The most inputs of a tile of weights."""

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def most_sums(self) -> int:
        """Products of a phase that a program keeps in shared memory."""
        rows = [(self.qkv, 1, 1), (self.mlp, 2, 1)]
        rows += [(self.width, 1, parts) for parts in (self.out_parts, self.down_parts)]
        return max(
            ROWS * strips * parts * -(-(count // self.programs + 1) // ROWS)
            for count, strips, parts in rows
        )

    @property
    def most_inputs(self) -> int:
        return max(self.width, self.heads * self.dim, self.mlp)

    @property
    def chunks(self) -> list[int]:
        """Inputs of the tiles of each kind of product; 0 where they cannot be cut."""
        products = [
            (self.width, 1),
            (self.heads * self.dim, self.out_parts),
            (self.mlp, self.down_parts),
        ]
        return [
            self._chunk(inputs // parts) if inputs % parts == 0 else 0 for inputs, parts in products
        ]

    def _chunk(self, inputs: int) -> int:
        """Return the largest fit number of inputs of a tile, or 0 where there is none."""
        fit = range(self.most_chunk, _LEAST_CHUNK - 1, -SIDE)
        return next((chunk for chunk in fit if inputs % chunk == 0), 0)

    def room(self) -> int:
        """Return the bytes of shared memory that a program needs beside its ring, or a few more."""
        tiles = 16 * (self.dim + 8) + 16 * (_TILE_T + 8) + 2 * self.dim + self.most_inputs
        return 2 * tiles + 4 * (self.most_sums + 16 * _WARPS + 32 + 17) + 512

    def tile(self) -> int:
        """Return the bytes of the largest tile."""
        return ROWS * 2 * max(self.chunks)

    def slot(self) -> int:
        """Return the bytes of a tile and of the barriers that go with it."""
        return self.tile() + 16

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a program is given."""
        return self.room() + self.stages * self.slot()

    def defines(self) -> dict[str, int]:
        reckoned = ("most_sums", "most_inputs", "shared_bytes")
        named = asdict(self) | {name: getattr(self, name) for name in reckoned}
        return {name.upper(): int(value) for name, value in named.items()}


@cache
def source(*, machine: bool = True) -> str:
    """Return the kernel's source; without the machine's part, another must stand in for it."""
    parts = toolchain.machine("machine") if machine else []
    return "\n".join(
        [*parts, *toolchain.shared(), *(toolchain.part(__package__, name) for name in _FILES)]
    )


# The weights that the kernel of a whole step reads, where they lie.


@dataclass(frozen=True, slots=True)
class StepLayer:
    """The weights of a layer, ``[outputs, inputs]`` each."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    norm_of_mlp: Tensor
    gates_and_ups: Tensor
    down: Tensor
    rotation: Rotation | None


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The weights of a model."""

    layers: Sequence[StepLayer]
    words: Tensor
    head: Tensor
    norm: Tensor
    """Behind the last layer."""
    epsilon: float
    embedding_times: float
    added_times: float
    scale: float
    """It makes powers of two of the products of queries and keys."""

    def rotations(self) -> list[Rotation]:
        """Return those of the layers that rotate."""
        return [layer.rotation for layer in self.layers if layer.rotation is not None]

    def head_epsilon(self) -> float:
        """Return the epsilon of the norms of heads."""
        return max((rotation.epsilon for rotation in self.rotations()), default=0.0)

    def tensors(self) -> list[Tensor]:
        """Return all that the kernel reads, as it is stored."""
        parts: list[StepLayer | Rotation] = [*self.layers, *self.rotations()]
        found = [getattr(part, field.name) for part in parts for field in fields(part)]
        held = [each for each in found if isinstance(each, torch.Tensor)]
        return [self.words, self.head, self.norm, *held]


if TYPE_CHECKING:
    Moved = list[tuple[Tensor, int | Callable[[], int]]]


# What a launch of the kernel of a whole step moves, for those who count bytes.


@dataclass(frozen=True, slots=True)
class Launched:
    """A row's tokens, length and blocks, and the logits that the launch makes."""

    tokens: Tensor
    length: Tensor
    table: Tensor
    logits: Tensor

    def stored(self) -> int:
        return int(self.length[0])


def moved(
    sizes: StepSizes,
    weights: StepWeights,
    caches: Sequence[tuple[Tensor, Tensor]],
    handed: Sequence[Tensor],
    seen_of_parts: Sequence[Tensor],
    launched: Launched,
) -> Moved:
    """List tensors with the bytes that are read and written of each, every place once.

    Programs hand over all of ``handed``; of ``seen_of_parts`` they hand over some rows for each
    head, one for the new token and one for each part of the context.
    """
    turns = _different(each for one in weights.rotations() for each in (one.cosines, one.sines))
    in_rows = {id(each) for each in turns} | {id(weights.words)} - {id(weights.head)}
    whole = [each for each in _different(weights.tensors()) if id(each) not in in_rows]
    found: Moved = [(each, each.nbytes) for each in (*whole, launched.tokens, launched.length)]
    if weights.words is not weights.head:
        found.append((weights.words, taken(weights.words, sizes.width)))
    found += [(each, taken(each, sizes.turn)) for each in turns]
    token = sizes.kv_heads * sizes.dim
    for stored in (each for pair in caches for each in pair):
        found.append((stored, partial(_context, launched, stored, token)))
    found.append((launched.table, partial(_listed, launched, sizes.block_size)))
    found += [(each, 2 * each.nbytes) for each in handed]
    for each in seen_of_parts:
        found.append((each, partial(_of_parts, launched, each, sizes.heads)))
    return [*found, (launched.logits, launched.logits.nbytes)]


def _different(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(each): each for each in tensors}.values())


def _context(launched: Launched, cache: Tensor, token: int) -> int:
    """Return the bytes of what is stored, and of the new token."""
    return taken(cache, (launched.stored() + 1) * token)


def _listed(launched: Launched, block_size: int) -> int:
    return taken(launched.table, launched.stored() // block_size + 1)


def _of_parts(launched: Launched, seen: Tensor, heads: int) -> int:
    """Return what is written and read of ``[heads, parts, numbers]``."""
    stored = launched.stored()
    parts = 1 + (num_parts(stored) if stored else 0)
    return 2 * taken(seen, heads * parts * seen.shape[2])


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


# For which models there is a kernel of a whole step, and how much of a GPU it takes.


_CAPABILITY = 9
"""Copies of tiles by tensor maps came with it."""
_IN_FLIGHT = 32 << 10
"""Bytes of a program on their way. More made what others wait for slower on an H200."""
_LEAST_IN_FLIGHT = 2
"""Tiles."""
_MOST_CHUNKS = (512, 1024, 256)
"""Inputs of the largest tiles: those that are tried first are liked best."""
_LARGEST_HEAD = 128
_LARGEST_GROUP = 16
_LEAST_NORMED = 1024
"""Elements of a token's keys, with KV heads padded to a power of two, from which on Triton's kernel
that norms heads sums eight squares in each thread, as this one does. With fewer it sums fewer in
each: on an H200, 3 and 7 of 2,400 steps had other bits then, and 0 of 2,400 from here on."""
_ALIGNED = 16
"""Bytes, for copies of tiles, and for tokens that are read in pairs of numbers."""


def sizes_of(weights: StepWeights, head_dim: int, keys: Tensor, programs: int) -> StepSizes:
    """Return a model's sizes, on a cache whose keys are ``[blocks, kv_heads, block_size, dim]``."""
    layer = weights.layers[0]
    width, attended = layer.out.shape
    mlp = layer.down.shape[1]
    rotations = weights.rotations()
    return StepSizes(
        width=width,
        heads=attended // head_dim,
        kv_heads=keys.shape[1],
        dim=head_dim,
        mlp=mlp,
        vocab=len(weights.head),
        turn=rotations[0].cosines.shape[1] if rotations else head_dim,
        block_size=keys.shape[2],
        out_parts=streamed.num_parts(width, attended),
        down_parts=streamed.num_parts(width, mlp),
        norm_warps=warps_of_row(width),
        programs=programs,
        normed=any(each.query_gain is not None for each in rotations),
    )


def why_not(
    sizes: StepSizes, weights: StepWeights, keys: Tensor, traits: Sequence[LayerTraits]
) -> str:
    """Say why the kernel cannot compute this model; return nothing where it can."""
    asked_for = {name for layer in traits for name in layer.asked_for} - {"scale"}
    rotations = weights.rotations()
    odd = [
        (asked_for, f"{', '.join(sorted(asked_for))} in its attention"),
        (len({layer.scale for layer in traits}) > 1, "another scale in some layers"),
        (sizes.dim % 16 or sizes.dim > _LARGEST_HEAD, f"heads of {sizes.dim}"),
        (sizes.block_size % 16, f"blocks of {sizes.block_size} tokens"),
        (sizes.turn % 2 or sizes.turn > sizes.dim, f"a rotation of {sizes.turn} numbers"),
        (sizes.heads // sizes.kv_heads > _LARGEST_GROUP, "many query heads for one of keys"),
        (
            min(sizes.width, sizes.qkv, sizes.mlp) < sizes.programs,
            "fewer rows than there are programs",
        ),
        (0 in sizes.chunks, "inputs of its layers that cannot be cut into tiles"),
        (any(each.together for each in rotations), "norms of all heads together"),
        (
            sizes.normed and not _sums_as_triton(sizes),
            f"norms of {sizes.kv_heads} KV heads of {sizes.dim}, which are summed in another order",
        ),
        (len({(each.epsilon, each.cosines.shape) for each in rotations}) > 1, "other rotations"),
        (any(each.dtype is not torch.bfloat16 for each in weights.tensors()), "other floats"),
        (not all(_lies_well(each) for each in weights.tensors()), "weights that lie otherwise"),
        (keys.dtype is not torch.bfloat16, f"a cache of {keys.dtype}"),
        (not keys[0].is_contiguous() or not _blocks_lie_well(keys), "blocks that lie otherwise"),
    ]
    return next((what for wrong, what in odd if wrong), "")


def why_not_on(device: torch.device) -> str:
    """Say why the kernel cannot run on a device; return nothing where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} runs no CUDA C++"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= _CAPABILITY else f"compute capability {major}.{minor} has no tensor maps"


def with_ring(sizes: StepSizes, shared_bytes: int) -> StepSizes | None:
    """Choose how many tiles a program holds, and how large; None where too few find room."""
    for most_chunk in _MOST_CHUNKS:
        cut = replace(sizes, most_chunk=most_chunk)
        if 0 in cut.chunks:
            continue
        stages = (shared_bytes - cut.room()) // cut.slot()
        in_flight = min(_IN_FLIGHT // cut.tile(), stages - _WARPS)
        if in_flight >= _LEAST_IN_FLIGHT:
            return replace(cut, stages=stages, in_flight=in_flight)
    return None


def _sums_as_triton(sizes: StepSizes) -> bool:
    """Return True if both kernels add up the squares of a head in the same order."""
    padded = power_of_two(sizes.dim)
    return padded == sizes.dim and power_of_two(sizes.kv_heads) * padded >= _LEAST_NORMED


def _blocks_lie_well(keys: Tensor) -> bool:
    return keys.data_ptr() % _ALIGNED == 0 and keys.stride(0) * keys.element_size() % _ALIGNED == 0


def _lies_well(weight: Tensor) -> bool:
    return weight.is_contiguous() and weight.data_ptr() % _ALIGNED == 0


# The kernel of a whole step made ready for a model and a cache, where there is one for them.


_LOG = logging.getLogger("roseinfer")
_THREADS = 288
"""Of a program: eight warps that multiply, and one that fetches."""


def prepared(
    weights: StepWeights,
    head_dim: int,
    max_length: int,
    caches: Sequence[tuple[Tensor, Tensor]],
    traits: Sequence[LayerTraits],
) -> WholeStep | None:
    """Return the step, or None where a model's other kernels must do. This compiles, and waits."""
    keys, _ = caches[0]
    if why_not_on(keys.device):
        return None
    device: Any = torch.cuda.get_device_properties(keys.device)
    sizes = sizes_of(weights, head_dim, keys, device.multi_processor_count)
    why = why_not(sizes, weights, keys, traits)
    cut = None if why else with_ring(sizes, device.shared_memory_per_block_optin)
    if cut is None:
        why = why or "too much for a multiprocessor's shared memory"
        _LOG.info("steps of one sequence run in several kernels: the model has %s", why)
        return None
    try:
        return WholeStep(cut, weights, caches, max_length, load(cut, keys.device))
    except CannotCompile as error:
        first = str(error).partition("\n")[0]
        _LOG.warning("steps of one sequence run in several kernels: %s", first)
        return None


def load(sizes: StepSizes, device: torch.device) -> Program:
    """Compile and load the kernel for these sizes."""
    cubin = compiled(source(), sizes.defines(), device)
    return GpuProgram(cubin, KERNEL, _THREADS, sizes.shared_bytes, device, together())
