"""Launching of the megakernel, which computes a whole decode step of one sequence."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.kernels.cuda.tensor_maps import SIDE, tensor_maps
from roseinfer.kernels.cuda.toolchain import CompilationError, cooperative_launch, read_source
from roseinfer.kernels.kernel import CudaKernel
from roseinfer.kernels.runtime import next_power_of_2
from roseinfer.kernels.triton import streamed
from roseinfer.kernels.triton.norm import num_row_warps
from roseinfer.kernels.triton.softmax import num_context_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program
    from roseinfer.kernels.kernel import Amount
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

# Compile-time sizes of the megakernel, and its source.


ROWS = 8
"""Outputs of a tile of weights."""
_MIN_CHUNK = 128
"""Smallest number of inputs of a tile. With fewer, tiles would arrive faster than they can be
requested."""
_TILE_T = 64
_WARPS = 8


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Compile-time sizes, which the source has as macros in capitals."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    """Elements per head."""
    mlp: int
    vocab: int
    rotary_dim: int
    """Rotated elements of a head."""
    block_size: int
    out_parts: int
    """Parts in which the inputs of attention's output are added up."""
    down_parts: int
    norm_warps: int
    """Warps of Triton's norm kernel, which fix its order of adding up."""
    programs: int
    normed: bool = False
    """True if queries and keys are normed, each head by itself."""
    stages: int = 0
    """Tiles of the ring."""
    in_flight: int = 4
    """Largest number of tiles that a program has requested and not received."""
    max_chunk: int = 1024
    """Largest number of inputs of a tile of weights."""

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def max_results(self) -> int:
        """Results of a phase that a program keeps in shared memory, at most."""
        rows = [(self.qkv, 1, 1), (self.mlp, 2, 1)]
        rows += [(self.width, 1, parts) for parts in (self.out_parts, self.down_parts)]
        return max(
            ROWS * strips * parts * -(-(count // self.programs + 1) // ROWS)
            for count, strips, parts in rows
        )

    @property
    def max_inputs(self) -> int:
        return max(self.width, self.heads * self.dim, self.mlp)

    @property
    def chunks(self) -> list[int]:
        """Inputs of the tiles of each kind of GEMM; 0 where they cannot be split into tiles."""
        products = [
            (self.width, 1),
            (self.heads * self.dim, self.out_parts),
            (self.mlp, self.down_parts),
        ]
        return [
            self._chunk(inputs // parts) if inputs % parts == 0 else 0 for inputs, parts in products
        ]

    def _chunk(self, inputs: int) -> int:
        """Return the largest number of inputs that a tile can have; 0 without one."""
        fit = range(self.max_chunk, _MIN_CHUNK - 1, -SIDE)
        return next((chunk for chunk in fit if inputs % chunk == 0), 0)

    def unstaged_bytes(self) -> int:
        """Return an upper bound on a program's shared memory in bytes, without its ring."""
        tiles = 16 * (self.dim + 8) + 16 * (_TILE_T + 8) + 2 * self.dim + self.max_inputs
        return 2 * tiles + 4 * (self.max_results + 16 * _WARPS + 32 + 17) + 512

    def tile_bytes(self) -> int:
        """Return the bytes of the largest tile."""
        return ROWS * 2 * max(self.chunks)

    def stage_bytes(self) -> int:
        """Return the bytes of a tile with its barriers."""
        return self.tile_bytes() + 16

    @property
    def threads(self) -> int:
        """Threads of a program: warps that multiply, and one that fetches."""
        return (_WARPS + 1) * 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, in bytes."""
        return self.unstaged_bytes() + self.stages * self.stage_bytes()

    def defines(self) -> dict[str, int]:
        reckoned = ("max_results", "max_inputs", "shared_bytes")
        named = asdict(self) | {name: getattr(self, name) for name in reckoned}
        return {name.upper(): int(value) for name, value in named.items()}

    def source(self, headers: Mapping[str, str] | None = None) -> str:
        return source(headers)


def source(headers: Mapping[str, str] | None = None) -> str:
    """Return the kernel's source; ``headers`` replace its own by name."""
    return read_source("whole_step.cu", headers)


# The megakernel's weights, as views of the model's.


@dataclass(frozen=True, slots=True)
class MegakernelLayer:
    """The weights of a layer, ``[outputs, inputs]`` each."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up_weight: Tensor
    down: Tensor
    rotation: RotaryEmbedding | None


@dataclass(frozen=True, slots=True)
class MegakernelWeights:
    """The weights of a model."""

    layers: Sequence[MegakernelLayer]
    words: Tensor
    head: Tensor
    norm: Tensor
    """Norm after the last layer."""
    epsilon: float
    embedding_multiplier: float
    residual_multiplier: float
    scale: float
    """Factor from query-key products to exponents of two."""

    def rotations(self) -> list[RotaryEmbedding]:
        """Return the rotary embeddings of the layers that have one."""
        return [layer.rotation for layer in self.layers if layer.rotation is not None]

    def head_epsilon(self) -> float:
        """Return the epsilon of the norms of heads."""
        return max((rotation.epsilon for rotation in self.rotations()), default=0.0)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the kernel reads, as they are stored."""
        parts: list[MegakernelLayer | RotaryEmbedding] = [*self.layers, *self.rotations()]
        values = [getattr(part, field.name) for part in parts for field in fields(part)]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        return [self.words, self.head, self.norm, *tensors]


_COUNTERS = 64
"""Counters of launches and of finished programs."""
_POINTERS = (
    "layers", "maps", "embedding", "final_norm", "token", "length", "table", "residual", "qkv_new",
    "attended", "hidden", "logits", "sums", "softmax_stats", "counters", "timeouts",
)  # fmt: skip
_FACTORS = (
    "epsilon", "head_epsilon", "embedding_multiplier", "residual_multiplier", "scale",
)  # fmt: skip
KERNEL = CudaKernel(
    "decode_step",
    {
        **dict.fromkeys(_POINTERS, ctypes.c_void_p),
        "block_stride": ctypes.c_longlong,
        **dict.fromkeys(("num_layers", "max_parts"), ctypes.c_int),
        **dict.fromkeys(_FACTORS, ctypes.c_float),
    },
    {},
    fallback="steps of one sequence run in several kernels",
    attribute=cooperative_launch,
)


class Megakernel:
    """Kernel for the logits of one sequence's next token in one launch, on one cache."""

    def __init__(
        self,
        sizes: StepSizes,
        weights: MegakernelWeights,
        caches: Sequence[tuple[Tensor, Tensor]],
        max_length: int,
        program: Program,
    ) -> None:
        """Prepare launches; ``caches``, keys and values by layer, must keep their addresses."""
        self._sizes, self._weights, self._program = sizes, weights, program
        self._caches = caches
        device = weights.words.device
        max_parts = num_context_parts(max_length)
        parts = sizes.heads, max_parts + 1
        with torch.inference_mode(False):
            self._pointers = torch.tensor(
                [_pointers(each, *own) for each, own in zip(weights.layers, caches, strict=True)],
                dtype=torch.int64,
                device=device,
            )
            self._maps = tensor_maps(program.encode, _matrices(sizes, weights), ROWS)
            counts = (2 * sizes.width, sizes.qkv, sizes.heads * sizes.dim, sizes.mlp)
            self._activations = [
                torch.zeros(count, dtype=torch.int32, device=device) for count in counts
            ]
            self._sums = torch.zeros((*parts, sizes.dim), dtype=torch.int64, device=device)
            self._softmax_stats = torch.zeros((*parts, 2), dtype=torch.int64, device=device)
            self._sync_counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
            self.timeouts = torch.zeros(2, dtype=torch.int32, device=device)
            """After the first number, the launches that timed out waiting for other programs."""
        self._max_parts = max_parts

    def logits(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Store the key and value of a row's token in every layer; return ``[1, vocab]`` logits.

        ``lengths`` counts the tokens stored before, and ``table`` lists the row's blocks. All three
        are read on the device alone. A launch that times out returns logits of NaN.
        """
        assert tokens.dtype == lengths.dtype == table.dtype == torch.int64
        weights = self._weights
        logits = weights.words.new_empty((1, self._sizes.vocab))
        residual, qkv_new, attended, hidden = self._activations
        KERNEL.launch(
            self._program, self._sizes.programs,
            partial(self._traffic, tokens, lengths, table, logits),
            layers=self._pointers, maps=self._maps,
            embedding=weights.words, final_norm=weights.norm,
            token=tokens, length=lengths, table=table, residual=residual, qkv_new=qkv_new,
            attended=attended, hidden=hidden, logits=logits, sums=self._sums,
            softmax_stats=self._softmax_stats, counters=self._sync_counters, timeouts=self.timeouts,
            block_stride=self._caches[0][0].stride(0), num_layers=len(weights.layers),
            max_parts=self._max_parts, epsilon=weights.epsilon,
            head_epsilon=weights.head_epsilon(),
            embedding_multiplier=weights.embedding_multiplier,
            residual_multiplier=weights.residual_multiplier, scale=weights.scale,
        )  # fmt: skip
        return logits

    def _traffic(
        self, tokens: Tensor, lengths: Tensor, table: Tensor, logits: Tensor
    ) -> list[tuple[Tensor, Amount]]:
        """List tensors with the bytes read and written of each, counting every address once.

        Programs exchange all activations, and some rows of partial results for each head: one for
        the new token and one for each part of the context.
        """
        sizes, weights = self._sizes, self._weights
        traffic: list[tuple[Tensor, Amount]] = []

        def add(tensor: Tensor, elements: int | Callable[[int], int]) -> None:
            """Count elements of a tensor, by the stored tokens when the kernel runs."""
            size = tensor.element_size()
            if isinstance(elements, int):
                traffic.append((tensor, elements * size))
            else:
                traffic.append((tensor, lambda: elements(int(lengths[0])) * size))

        tables = [each for one in weights.rotations() for each in (one.cosines, one.sines)]
        by_row = {id(each): sizes.rotary_dim for each in tables}
        if weights.words is not weights.head:
            by_row[id(weights.words)] = sizes.width
        for tensor in {id(each): each for each in weights.tensors()}.values():
            add(tensor, by_row.get(id(tensor), tensor.numel()))
        for tensor in (tokens, lengths, logits):
            add(tensor, tensor.numel())
        of_token = sizes.kv_heads * sizes.dim
        for cache_of_layer in (each for pair in self._caches for each in pair):
            add(cache_of_layer, lambda stored: (stored + 1) * of_token)
        add(table, lambda stored: stored // sizes.block_size + 1)
        for tensor in self._activations:
            add(tensor, 2 * tensor.numel())
        for tensor in (self._sums, self._softmax_stats):
            of_part = 2 * sizes.heads * tensor.shape[2]
            add(tensor, partial(_exchanged, of_part))
        return traffic


def _exchanged(of_part: int, stored: int) -> int:
    """Return the partial results of the new token and of every part before it."""
    return of_part * (1 + (num_context_parts(stored) if stored else 0))


def _matrices(sizes: StepSizes, weights: MegakernelWeights) -> list[tuple[Tensor, int]]:
    """Return the matrices that the kernel fetches, in order, with the inputs of their tiles."""
    of_width, of_attended, of_mlp = sizes.chunks
    matrices = []
    for layer in weights.layers:
        matrices += [(layer.qkv, of_width), (layer.out, of_attended)]
        matrices += [(layer.gate_up_weight, of_width), (layer.down, of_mlp)]
    return [*matrices, (weights.head, of_width)]


def _pointers(layer: MegakernelLayer, keys: Tensor, values: Tensor) -> list[int]:
    """Return a layer's pointers, ``Layer`` in the source."""
    rotation = layer.rotation
    of_heads: tuple[Tensor | None, ...] = (None,) * 4
    if rotation is not None:
        of_heads = (
            rotation.cosines,
            rotation.sines,
            rotation.query_norm_weight,
            rotation.key_norm_weight,
        )
    tensors = layer.norm, layer.qkv_bias, layer.mlp_norm, *of_heads, keys, values
    return [0 if each is None else each.data_ptr() for each in tensors]


# Models that the megakernel supports, and its share of a GPU.


_CAPABILITY = 9
"""Compute capability that has copies of tiles by tensor maps."""
_MAX_BYTES_IN_FLIGHT = 32 << 10
"""Bytes in flight per program. More delayed other loads on an H200."""
_MIN_TILES_IN_FLIGHT = 2
"""Smallest number of tiles in flight."""
_MAX_CHUNK_CHOICES = (512, 1024, 256)
"""Choices for the inputs of the largest tiles, in order of preference."""
_MAX_HEAD_DIM = 128
_MAX_QUERY_GROUP = 16
_MIN_NORM_ELEMENTS = 1024
"""Smallest number of elements of a token's keys, with KV heads padded to a power of two, for models
that norm heads. From here on each thread of Triton's norm kernel sums eight squares, as in this
kernel. With fewer elements it sums fewer squares: on an H200, 3 and 7 of 2,400 steps had other bits
then, and 0 of 2,400 from here on."""
_ALIGNMENT = 16
"""Alignment in bytes, for copies of tiles, and for tokens that are read in pairs of elements."""


def sizes_of(weights: MegakernelWeights, head_dim: int, keys: Tensor, programs: int) -> StepSizes:
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
        rotary_dim=rotations[0].cosines.shape[1] if rotations else head_dim,
        block_size=keys.shape[2],
        out_parts=streamed.num_k_splits(width, attended),
        down_parts=streamed.num_k_splits(width, mlp),
        norm_warps=num_row_warps(width),
        programs=programs,
        normed=any(each.query_norm_weight is not None for each in rotations),
    )


def unsupported_reason(
    sizes: StepSizes, weights: MegakernelWeights, keys: Tensor, traits: Sequence[LayerTraits]
) -> str:
    """Return why the kernel cannot compute this model; empty where it can."""
    asked_for = {name for layer in traits for name in layer.trait_names} - {"scale"}
    rotations = weights.rotations()
    odd = [
        (asked_for, f"{', '.join(sorted(asked_for))} in its attention"),
        (len({layer.scale for layer in traits}) > 1, "another scale in some layers"),
        (sizes.dim % 16 or sizes.dim > _MAX_HEAD_DIM, f"heads of {sizes.dim}"),
        (sizes.block_size % 16, f"blocks of {sizes.block_size} tokens"),
        (
            sizes.rotary_dim % 2 or sizes.rotary_dim > sizes.dim,
            f"a rotation of {sizes.rotary_dim} numbers",
        ),
        (sizes.heads // sizes.kv_heads > _MAX_QUERY_GROUP, "too many query heads per KV head"),
        (
            min(sizes.width, sizes.qkv, sizes.mlp) < sizes.programs,
            "fewer rows than there are programs",
        ),
        (0 in sizes.chunks, "layers whose inputs cannot be split into tiles"),
        (any(each.norm_across_heads for each in rotations), "norms across heads"),
        (
            sizes.normed and not _matches_triton_norm(sizes),
            f"norms of {sizes.kv_heads} KV heads of {sizes.dim}, which are summed in another order",
        ),
        (
            len({(each.epsilon, each.cosines.shape) for each in rotations}) > 1,
            "different rotary embeddings in some layers",
        ),
        (
            any(each.dtype is not torch.bfloat16 for each in weights.tensors()),
            "weights that are not bfloat16",
        ),
        (
            not all(_is_weight_aligned(each) for each in weights.tensors()),
            "weights that are not contiguous or aligned",
        ),
        (keys.dtype is not torch.bfloat16, f"a cache of {keys.dtype}"),
        (
            not keys[0].is_contiguous() or not _are_blocks_aligned(keys),
            "blocks that are not contiguous or aligned",
        ),
    ]
    return next((what for wrong, what in odd if wrong), "")


def device_unsupported_reason(device: torch.device) -> str:
    """Return why the kernel cannot run on a device; empty where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} runs no CUDA C++"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= _CAPABILITY else f"compute capability {major}.{minor} has no tensor maps"


def choose_ring(sizes: StepSizes, shared_bytes: int) -> StepSizes | None:
    """Choose the number and size of a program's tiles; return None where too few fit."""
    for max_chunk in _MAX_CHUNK_CHOICES:
        cut = replace(sizes, max_chunk=max_chunk)
        if 0 in cut.chunks:
            continue
        stages = (shared_bytes - cut.unstaged_bytes()) // cut.stage_bytes()
        in_flight = min(_MAX_BYTES_IN_FLIGHT // cut.tile_bytes(), stages - _WARPS)
        if in_flight >= _MIN_TILES_IN_FLIGHT:
            return replace(cut, stages=stages, in_flight=in_flight)
    return None


def _matches_triton_norm(sizes: StepSizes) -> bool:
    """Return True if both kernels add up the squares of a head in the same order."""
    padded = next_power_of_2(sizes.dim)
    return padded == sizes.dim and next_power_of_2(sizes.kv_heads) * padded >= _MIN_NORM_ELEMENTS


def _are_blocks_aligned(keys: Tensor) -> bool:
    return (
        keys.data_ptr() % _ALIGNMENT == 0 and keys.stride(0) * keys.element_size() % _ALIGNMENT == 0
    )


def _is_weight_aligned(weight: Tensor) -> bool:
    return weight.is_contiguous() and weight.data_ptr() % _ALIGNMENT == 0


# Preparation of the megakernel for a model and a cache.


_LOG = logging.getLogger("roseinfer")


def prepare_megakernel(
    weights: MegakernelWeights,
    head_dim: int,
    max_length: int,
    caches: Sequence[tuple[Tensor, Tensor]],
    traits: Sequence[LayerTraits],
) -> Megakernel | None:
    """Compile and return the megakernel; return None where it is not supported."""
    keys, _ = caches[0]
    if device_unsupported_reason(keys.device):
        return None
    device: Any = torch.cuda.get_device_properties(keys.device)
    sizes = sizes_of(weights, head_dim, keys, device.multi_processor_count)
    why = unsupported_reason(sizes, weights, keys, traits)
    cut = None if why else choose_ring(sizes, device.shared_memory_per_block_optin)
    if cut is None:
        why = why or "too much for a multiprocessor's shared memory"
        _LOG.info("%s: the model has %s", KERNEL.fallback, why)
        return None
    try:
        return Megakernel(cut, weights, caches, max_length, KERNEL.compile(cut, keys.device))
    except CompilationError as error:
        KERNEL.warn(error)
        return None
