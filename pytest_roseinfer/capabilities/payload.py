"""The bits that are written for a token, their layout in memory, and the poison of free blocks.

Bits encode the sequence, position, layer, head, and K or V. All elements of all tokens differ, so
a misplaced row is detected and can be decoded to the place where it belongs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pytest_roseinfer.oracle.pages import PADDING_SEQUENCE, POSITIONS, text_place, token_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

    from pytest_roseinfer.capabilities.cache_data import CacheSpec, Tolerance
else:
    from pytest_roseinfer.capabilities import torch

# Payloads for quantised caches: distinct after rounding, with magnitudes that reveal a wrong scale
#
# All elements of a token have about the same magnitude, so that rounding loses none of them. The
# magnitudes of two tokens differ by a factor of up to 32, or, where a block has one scale, those of
# two blocks by up to 256, so that another one's scale is detected. Elements are below 2, as
# attention needs them, and with one scale per token none of them is subnormal in ``float8_e4m3fn``.


_TELLING = 4
"""Fewest elements of a row that can be recognised as a multiple of another row."""
_ALIKE = 0.995
"""Cosine similarity above which one row is taken for a multiple of the other."""


def coarse(element: Tensor, token: Tensor, page: Tensor, over: str) -> Tensor:
    """Make values from random bits of each element, its token and its page."""
    size = 0.5 + (element & 0xFFFF) / (1 << 17)
    sign = 1 - 2 * ((element >> 16) & 1)
    # Tokens that share the scale of a page differ by one octave at most, or small ones were lost.
    octave = token % 6 if over == "token" else page % 5 * 2 + token % 2
    return sign * size * torch.exp2(1.0 - octave)


def times_as_large(expected: Tensor, actual: Tensor) -> float | None:
    """Return by what factor two rows differ, as after a wrong scale; None if by no factor."""
    if actual.dtype != expected.dtype or len(expected) < _TELLING:
        return None
    cosine = float(torch.cosine_similarity(expected.double(), actual.double(), 0))
    return float(actual.norm() / expected.norm()) if cosine > _ALIKE else None


# Poison: NaNs in memory that must not be read, whose bits carry the reason
#
# An 8-bit dtype has no bits for a reason, and an integer dtype has no NaN: poison has none there.


_QUIET = {
    "float16": ("int16", 0x7E00, 6),
    "bfloat16": ("int16", 0x7FC0, 3),
    "float32": ("int32", 0x7FC0_0000, 19),
    "float64": ("int64", 0x7FF8 << 48, 48),
}
"""The integer dtype, the bits of NaN, and the shift to three free bits, by dtype."""


class Poison(IntEnum):
    """Reason why memory must not be read, which its NaNs carry as a number."""

    NEVER_WRITTEN = 1
    FREED = 2
    INPUT = 3
    NOT_COMPUTED = 4


_WORDS = {
    Poison.NEVER_WRITTEN: "poison (nothing has been written there yet)",
    Poison.FREED: "poison (the block was freed, and nothing has been written there since)",
    Poison.INPUT: "poison (input was kept and not copied: its memory has another use now)",
    Poison.NOT_COMPUTED: "poison (the device has not computed it yet)",
}
POISON_DESCRIPTIONS = {
    (name, nan | reason << place): _WORDS[reason]
    for name, (_, nan, place) in _QUIET.items()
    for reason in Poison
}
"""Descriptions of poison, by the name of the dtype and the bits of the number."""
ANY_NAN = "NaN (poison, or computed from it)"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def poison_of(dtype: torch.dtype, reason: Poison) -> torch.Tensor:
    """Return the NaN of a reason; a plain NaN if the dtype has no bits for a reason."""
    if name_of(dtype) not in _QUIET:
        return torch.tensor(float("nan"))
    integer, nan, place = _QUIET[name_of(dtype)]
    return torch.tensor(nan | reason << place, dtype=getattr(torch, integer)).view(dtype)


def poison(tensor: torch.Tensor, reason: Poison) -> None:
    """Overwrite memory that must not be read: with NaN, or the lowest or highest integer."""
    if tensor.is_floating_point():
        tensor.copy_(poison_of(tensor.dtype, reason))
    else:
        codes = torch.iinfo(tensor.dtype)
        tensor.fill_(codes.min or codes.max)


_ODD = 0x2545F4914F6CDD1D
_MIX = 0x1B873593CC9E2D51
_NOT_KEPT = ", which a conversion through another dtype loses"
_NARROWER = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_NO_ELEMENT = 65535
"""Element number for random bits that all elements of a token share."""

VIEWS = ("plain", "fused", "transposed", "strided")
"""Layouts of ``lay_out`` that change only strides."""
LAYOUTS = (*VIEWS, "apart", "wider")
"""All layouts. With ``apart``, keys and values are laid out differently."""


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy ``[layers, tokens, heads, head_dim]`` values to other strides or dtype."""
    if layout == "fused":  # one third of a wider tensor, like the output of a qkv projection
        wide = tensor.new_empty((*tensor.shape[:2], 3, *tensor.shape[2:]))
        wide[:, :, 1] = tensor
        return wide[:, :, 1]
    if layout == "transposed":  # [heads, tokens] in memory, like the keys of a prompt
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":  # every other element of the last dimension
        wide = tensor.new_empty((*tensor.shape, 2))
        wide[..., 1] = tensor
        return wide[..., 1]
    if layout == "wider":  # a dtype that the cache must convert from, without loss
        return tensor.float()
    return tensor.clone()


def _integer(size: int) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, f"int{8 * size}")
    return dtype


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View memory as integers, so that NaNs compare and -0.0 differs from 0.0."""
    return tensor.view(_integer(tensor.element_size()))


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _kind(one) == _kind(other) and torch.equal(as_bits(one), as_bits(other))


def all_same_bits(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Compare many pairs of tensors with a single synchronisation of the GPU."""
    if any(_kind(one) != _kind(other) for one, other in pairs):
        return False
    sides = [[as_bits(pair[side]).flatten() for pair in pairs] for side in (0, 1)]
    return not pairs or torch.equal(*map(torch.cat, sides))


def _exponent_bits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the exponent bits that all numbers from 1/128 to 2 have set, and the one they clear.

    With the top bit of its exponent clear, a number is below 2, and neither NaN nor infinite.
    With all other exponent bits but the last three set, it is no smaller than 1/128.
    """
    top = dtype.itemsize * 8 - 2
    mantissa = round(-math.log2(torch.finfo(dtype).eps))
    return (1 << top) - (1 << min(top, mantissa + 3)), 1 << top


class HeadPosition(NamedTuple):
    """The place where a row of bits belongs."""

    token: int
    layer: int
    head: int
    kind: str

    def describe(self, here: tuple[int, int, str]) -> str:
        """Describe the token, with layer, head and kind if these differ from ``here``."""
        token, *place = self
        elsewhere = f", layer {self.layer}, head {self.head}, {self.kind}" * (tuple(place) != here)
        return describe_token(token) + elsewhere

    def likely_cause(self, other: HeadPosition) -> str:
        """Describe a common mistake that would put ``other`` here; empty if none would."""
        if self.token != other.token:
            return "one position off" * (abs(self.token - other.token) == 1)
        if self.kind != other.kind:
            return f"{other.kind} in place of {self.kind}"
        if self.layer != other.layer:
            return "another layer's"
        return "another head's" * (self.head != other.head)


def kind_of_bits(row: torch.Tensor) -> str:
    """Return the kind of bits that are no token's."""
    if not as_bits(row).any():
        return "zeros"
    return "NaN" if row.is_floating_point() and row.isnan().all() else "other bits"


def rounded_to(exact: torch.Tensor, actual: torch.Tensor) -> str:
    """Return the dtype that a row was rounded to; empty if rounding does not explain it."""
    for name in _NARROWER if exact.is_floating_point() else ():
        narrow = getattr(torch, name)
        if narrow != exact.dtype and same_bits(exact.to(narrow).to(exact.dtype), actual):
            return name
    return ""


@dataclass(frozen=True, slots=True)
class HeadMismatch:
    """The expected and the actual contents of one head of one token, in words."""

    head: int
    kind: str
    """K or V."""
    expected: str
    actual: str
    token: int | None
    """Token whose bits were found; None if they are no token's."""
    likely_cause: str = ""
    """Likely cause, in words; empty if unknown."""
    kind_of_bits: str = ""
    """Kind of the actual bits: ``token``, ``zeros``, ``NaN`` or ``other bits``."""
    expected_token: int | None = None
    """Token whose bits were expected; None if they are no token's."""

    @property
    def finding_kind(self) -> str:
        """Kind of difference, as in ``Finding.kind``."""
        return f"{self.kind} {self.likely_cause or self.kind_of_bits}"

    def describe(self) -> str:
        likely_cause = f": {self.likely_cause}" * bool(self.likely_cause)
        return f"expected {self.expected}, found {self.actual}{likely_cause}"


@dataclass(slots=True)
class Payload:
    """Encoder of tokens as keys and values, for caches of one spec."""

    spec: CacheSpec
    finite: bool = True
    """True for numbers of moderate size; False for any bit pattern, with NaNs and infinities."""
    tolerance: Tolerance | None = None
    """Tolerance of a quantised cache, whose numbers are always of moderate size; None if exact."""
    stream: int = 0
    """Number of the encoding: 0 for keys and values. Encodings of other numbers have other bits."""
    _known_tokens: torch.Tensor | None = field(default=None, init=False, repr=False)
    """Tokens encoded so far, ``[2, layers, tokens, heads, head_dim]``."""
    _place: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    """Index of each token in ``_known_tokens``."""

    @classmethod
    def of(cls, adapter: type[Any], spec: CacheSpec, *, finite: bool) -> Self:
        """Return the payload for a cache of an adapter."""
        return cls(spec, finite, adapter.tolerance.get(spec.dtype))

    @property
    def dtype(self) -> torch.dtype:
        name = self.tolerance.tensors if self.tolerance else self.spec.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    @property
    def rounds_blocks(self) -> bool:
        """True if a write may change other tokens of its block, since a block has one scale."""
        return self.tolerance is not None and self.tolerance.over == "block"

    def __post_init__(self) -> None:
        self.finite = self.finite or self.tolerance is not None

    def layer(self, tokens: Sequence[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode keys and values of one layer, ``[tokens, heads, head_dim]``."""
        keys, values = self.all_layers(tokens, slice(layer, layer + 1))
        return keys[0], values[0]

    def all_layers(
        self, tokens: Sequence[int], layers: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode keys and values as fresh tensors, ``[layers, tokens, heads, head_dim]``."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._place]
        if new or self._known_tokens is None:
            coded = self._encode(new, range(self.spec.num_layers))
            self._known_tokens = (
                coded if self._known_tokens is None else torch.cat([self._known_tokens, coded], 2)
            )
            self._place.update(
                zip(new, range(len(self._place), self._known_tokens.shape[2]), strict=True)
            )
        places = torch.tensor([self._place[token] for token in tokens], dtype=torch.int64)
        keys, values = self._known_tokens[:, layers].index_select(2, places.to(self.spec.device))
        return keys, values

    def _encode(self, tokens: Sequence[int], layers: Iterable[int]) -> torch.Tensor:
        heads, device = (self.spec.num_heads, self.spec.head_dim), self.spec.device
        inner = torch.arange(math.prod(heads), device=device).view(heads)
        layer = torch.tensor(list(layers), device=device).view(-1, 1, 1, 1)
        kind = torch.arange(2, device=device).view(-1, 1, 1, 1, 1)

        def scrambled(numbers: Sequence[int], inner: torch.Tensor | int) -> torch.Tensor:
            number = torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, 1, 1)
            code = ((number * 64 + layer) * 2 + kind) * 65536 + inner
            code = (code + 1) * _ODD + self.stream * _MIX
            return ((code ^ ((code >> 29) & 0x7FFFFFFFF)) * _MIX) >> 24

        if self.tolerance:
            pages = [page_number(token, self.spec.block_size) for token in tokens]
            by_token, by_page = scrambled(tokens, _NO_ELEMENT), scrambled(pages, _NO_ELEMENT)
            values = coarse(scrambled(tokens, inner), by_token, by_page, self.tolerance.over)
            return values.to(self.dtype)
        bits = scrambled(tokens, inner).to(_integer(self.dtype.itemsize))
        if self.finite and self.dtype.is_floating_point:
            low, high = _exponent_bits(self.dtype)
            bits = (bits & ~high) | low
        return bits.view(self.dtype)

    def inputs(self, tokens: Sequence[int], layout: str) -> list[torch.Tensor]:
        """Encode keys and values of all layers, in the memory layout that a cache is to get."""
        if layout == "wider" and not self.finite:
            layout = "plain"  # a conversion changes the bits of NaNs
        layouts = ("fused", "transposed") if layout == "apart" else (layout, layout)
        both = zip(self.all_layers(tokens), layouts, strict=True)
        return [lay_out(tensor, name) for tensor, name in both]

    def describe_mismatch(
        self,
        expected_row: torch.Tensor,
        actual_row: torch.Tensor,
        layer: int,
        head: int,
        kind: str,
        known_tokens: Sequence[int],
    ) -> HeadMismatch:
        """Describe two rows ``[head_dim]`` in words, as ``known_tokens`` tokens if possible."""
        place = self.find_position(expected_row, layer, head, known_tokens)
        other = self.find_position(actual_row, layer, head, known_tokens)
        here = layer, head, kind
        actual = (
            other.describe(here) if other else self.describe_unknown_row(actual_row, expected_row)
        )
        likely_cause = place.likely_cause(other) if place and other else ""
        expected = place.describe(here) if place else self.describe_unknown_row(expected_row)
        return HeadMismatch(
            head,
            kind,
            expected,
            actual,
            other.token if other else None,
            likely_cause,
            "token" if other else kind_of_bits(actual_row),
            place.token if place else None,
        )

    def describe_unknown_row(self, row: torch.Tensor, right: torch.Tensor | None = None) -> str:
        """Describe a row that matches no token, and how it differs from the ``right`` row."""
        if row.dtype != self.dtype:
            return f"the codes {row.tolist()[:4]}..."
        if not as_bits(row).any():
            return "zeros"
        if row.isnan().all():
            bits = {
                POISON_DESCRIPTIONS.get((name_of(row.dtype), each), ANY_NAN)
                for each in as_bits(row).tolist()
            }
            return " and ".join(sorted(bits)) + ", or its scale is" * bool(self.tolerance)
        bits_of_none = f"bits no token has ({row.tolist()[:4]}...)"
        if right is None:
            return bits_of_none
        wrong = (as_bits(row) != as_bits(right)).nonzero().flatten().tolist()
        if not self.tolerance and row[wrong].isnan().all() and right[wrong].isnan().all():
            return f"that but for the bits of NaN in elements {_format_numbers(wrong)}{_NOT_KEPT}"
        if not right.double().isfinite().all():
            return bits_of_none
        if not row.dtype.is_floating_point:
            return bits_of_none
        off = f"up to {(row.double() - right.double()).abs().max():.3g} off"
        if self.tolerance:
            least = f"1/{1 / self.tolerance.of_greatest:.4g}"
            off += f" where {least} of the greatest of its {self.tolerance.over} is allowed"
        if self.tolerance and (times := times_as_large(right, row)):
            return f"{times:.4g} times that, {off}"
        if not row.double().isfinite().all():
            off = "in part not finite"
        if rounded := rounded_to(right, row):
            return f"that rounded to {rounded}, {off}"
        if not self.tolerance and len(wrong) < len(row):
            difference = self.describe_unknown_row(row[wrong])
            return f"that but for elements {_format_numbers(wrong)}: {difference}"
        return f"{bits_of_none}, {off}"

    def find_position(
        self, row: torch.Tensor, layer: int, head: int, tokens: Sequence[int]
    ) -> HeadPosition | None:
        """Find the place where a row of bits belongs, first in the given layer and head."""
        if row.dtype != self.dtype:
            return None
        layers = [layer, *(other for other in range(self.spec.num_layers) if other != layer)]
        for is_match in (_equal, self._is_near) if self.tolerance else (_equal,):
            for token in tokens:
                coded = self._encode([token], layers)
                if hit := is_match(coded, row).all(-1).nonzero().tolist():
                    kind, layer_at, _, head_at = min(hit, key=lambda at: (at[1], at[3] != head))
                    return HeadPosition(token, layers[layer_at], head_at, "KV"[kind])
        return None

    def _is_near(self, coded: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        assert self.tolerance
        limit = coded.abs().amax((-1, -2), keepdim=True) * self.tolerance.of_greatest
        return (row - coded).abs() <= limit


def _format_numbers(numbers: Sequence[int]) -> str:
    """List ascending numbers, as a range if they are consecutive."""
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers) > 2:
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


def _equal(coded: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return as_bits(coded) == as_bits(row)


def page_number(token: int, block_size: int) -> int:
    """Return the number of the page that a token was written to, one for all tokens of the page.

    After a truncation, new tokens of the same page get another number.
    """
    wrote, position = divmod(token, POSITIONS)
    return wrote * POSITIONS + position // block_size


def describe_token(token: int) -> str:
    """Describe a token by its sequence or text, and its position."""
    seq, position, life = token_parts(token)
    if seq == PADDING_SEQUENCE:
        return f"padding row {position}"
    if place := text_place(token):
        within = f" in {place.space}" if place.space else ""
        return f"text {place.text}{within}, token {position}"
    rewrites = f" (life {life + 1}: it was freed or cut before)" if life else ""
    return f"sequence {seq}{rewrites}, token {position}"
