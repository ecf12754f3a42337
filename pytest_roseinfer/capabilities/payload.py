"""The bits that are written for a token, their layout in memory, and the poison of free blocks.

Bits are coded by sequence, position, layer, head, and K or V. Every element of every token
differs, so a misplaced one shows, and what is found in the wrong place can be decoded back to
where it belongs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pytest_roseinfer.oracle.pages import PADDING_SEQUENCE, POSITIONS, TEXTS, token_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

    from pytest_roseinfer.capabilities.cache_data import CacheSpec, Tolerance
else:
    from pytest_roseinfer.capabilities import torch

# Numbers for caches that round: coarse enough to stay apart, and of sizes that tell scales apart.
#
# All elements of a token are about as large as its greatest, so that none of them is lost in the
# rounding. Its greatest is up to 32 times as large as that of the next token or, where a block has
# one scale, up to 256 times that of the next block, so that the scale of another one shows.
# Elements are below 2, as attention needs them, and where tokens are rounded one by one no
# ``float8_e4m3fn`` of them is subnormal.


_TELLING = 4
"""Elements of a row that can tell whether it is another one enlarged."""
_ALIKE = 0.995


def coarse(element: Tensor, token: Tensor, page: Tensor, over: str) -> Tensor:
    """Make numbers out of random bits: of each element, of its token, and of its page."""
    size = 0.5 + (element & 0xFFFF) / (1 << 17)
    sign = 1 - 2 * ((element >> 16) & 1)
    # The tokens of a page that has one scale differ by an octave, or small ones would be lost.
    octave = token % 6 if over == "token" else page % 5 * 2 + token % 2
    return sign * size * torch.exp2(1.0 - octave)


def times_as_large(want: Tensor, found: Tensor) -> float | None:
    """Say how many times as large as wanted a row is, as with the scale of another, if it is so."""
    if found.dtype != want.dtype or len(want) < _TELLING:
        return None
    cosine = float(torch.cosine_similarity(want.double(), found.double(), 0))
    return float(found.norm() / want.norm()) if cosine > _ALIKE else None


# What stands where nobody may read: NaNs that say how they came there.
#
# A dtype of 8 bits has no room for that, and one of integers has no NaN: there poison is plain.


_QUIET = {
    "float16": ("int16", 0x7E00, 6),
    "bfloat16": ("int16", 0x7FC0, 3),
    "float32": ("int32", 0x7FC0_0000, 19),
    "float64": ("int64", 0x7FF8 << 48, 48),
}
"""Of each dtype: its bits as an integer, the bits of NaN, and the place of three that are free."""


class Poison(IntEnum):
    """Why a place must not be read; its NaNs carry the value."""

    NEVER_WRITTEN = 1
    FREED = 2
    INPUT = 3
    NOT_YET = 4


_WORDS = {
    Poison.NEVER_WRITTEN: "poison (nothing has been written there yet)",
    Poison.FREED: "poison (the block was freed, and nothing has been written there since)",
    Poison.INPUT: "poison (input was kept and not copied: its memory has another use now)",
    Poison.NOT_YET: "poison (the device has not come to it yet)",
}
WORDS = {
    (name, nan | why << place): _WORDS[why]
    for name, (_, nan, place) in _QUIET.items()
    for why in Poison
}
"""What the bits of a number say, by the name of its dtype, if it is poison."""
ANY_NAN = "NaN (poison, or what became of it)"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def poison_of(dtype: torch.dtype, why: Poison) -> torch.Tensor:
    """Return the NaN that stands for a reason; one without a reason where the dtype has no room."""
    if name_of(dtype) not in _QUIET:
        return torch.tensor(float("nan"))
    integer, nan, place = _QUIET[name_of(dtype)]
    return torch.tensor(nan | why << place, dtype=getattr(torch, integer)).view(dtype)


def poison(tensor: torch.Tensor, why: Poison) -> None:
    """Overwrite what nobody may read: with NaN, or with codes at the end of their range."""
    if tensor.is_floating_point():
        tensor.copy_(poison_of(tensor.dtype, why))
    else:
        codes = torch.iinfo(tensor.dtype)
        tensor.fill_(codes.min or codes.max)


_ODD = 0x2545F4914F6CDD1D
_MIX = 0x1B873593CC9E2D51
_NOT_KEPT = ", which are not kept where numbers go through another dtype"
_NARROWER = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_NO_ELEMENT = 65535
"""In the place of an element, for numbers that all elements of a token share."""

VIEWS = ("plain", "fused", "transposed", "strided")
"""Names for ``lay_out`` that change strides alone."""
LAYOUTS = (*VIEWS, "apart", "wider")
"""All names. With ``apart``, keys and values are laid out differently."""


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy ``[layers, tokens, heads, head_dim]`` values to other strides or dtype."""
    if layout == "fused":  # one third of a wider tensor, as a qkv projection leaves it
        wide = tensor.new_empty((*tensor.shape[:2], 3, *tensor.shape[2:]))
        wide[:, :, 1] = tensor
        return wide[:, :, 1]
    if layout == "transposed":  # [heads, tokens] in memory, as a prompt's keys are
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":  # every other element of the last dimension
        wide = tensor.new_empty((*tensor.shape, 2))
        wide[..., 1] = tensor
        return wide[..., 1]
    if layout == "wider":  # a dtype the cache must convert from, losing nothing
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
    """Compare many pairs at once: a GPU is waited for once, and not for every pair."""
    if any(_kind(one) != _kind(other) for one, other in pairs):
        return False
    sides = [[as_bits(pair[side]).flatten() for pair in pairs] for side in (0, 1)]
    return not pairs or torch.equal(*map(torch.cat, sides))


def _exponent_bits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the bits that must be on in a number of moderate size, and the one that must be off.

    With the top bit of its exponent off, a number is below 2, and neither NaN nor infinite.
    With all others on but the last three, it is no smaller than 1/128.
    """
    top = dtype.itemsize * 8 - 2
    mantissa = round(-math.log2(torch.finfo(dtype).eps))
    return (1 << top) - (1 << min(top, mantissa + 3)), 1 << top


class Place(NamedTuple):
    """Where a row of bits belongs."""

    token: int
    layer: int
    head: int
    kind: str

    def words(self, here: tuple[int, int, str]) -> str:
        """Name the token, and its layer, head and kind where these are not those of ``here``."""
        token, *own = self
        elsewhere = f", layer {self.layer}, head {self.head}, {self.kind}" * (tuple(own) != here)
        return token_words(token) + elsewhere

    def unlike(self, other: Place) -> str:
        """Say what mistake would leave ``other`` here, if it is a common one."""
        if self.token != other.token:
            return "one position off" * (abs(self.token - other.token) == 1)
        if self.kind != other.kind:
            return f"{other.kind} in place of {self.kind}"
        if self.layer != other.layer:
            return "another layer's"
        return "another head's" * (self.head != other.head)


def rounded_to(exact: torch.Tensor, found: torch.Tensor) -> str:
    """Name the dtype to which a row was rounded on its way; nothing if that is not what it was."""
    for name in _NARROWER:
        narrow = getattr(torch, name)
        if narrow != exact.dtype and same_bits(exact.to(narrow).to(exact.dtype), found):
            return name
    return ""


@dataclass(frozen=True, slots=True)
class Contents:
    """What one head of one slot should hold and what it holds, in words."""

    head: int
    kind: str
    """K or V."""
    expected: str
    found: str
    token: int | None
    """The token found, if it is one."""
    looks: str = ""
    """Like what mistake it looks."""

    def words(self) -> str:
        looks = f": {self.looks}" * bool(self.looks)
        return f"expected {self.expected}, found {self.found}{looks}"


@dataclass(slots=True)
class Payload:
    """Codes tokens for caches of one spec."""

    spec: CacheSpec
    finite: bool = True
    """Numbers of moderate size. Off: any bit pattern, NaN payloads and infinities too."""
    tolerance: Tolerance | None = None
    """How far what is read back may be off. With it, numbers are of moderate size in any case."""
    _known: torch.Tensor | None = field(default=None, init=False, repr=False)
    """Tokens coded so far, ``[2, layers, tokens, heads, head_dim]``."""
    _place: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    """Where each token stands in there."""

    @classmethod
    def of(cls, adapter: type[Any], spec: CacheSpec, *, finite: bool) -> Self:
        """Return what codes tokens for the cache of an adapter."""
        return cls(spec, finite, adapter.tolerance.get(spec.dtype))

    @property
    def dtype(self) -> torch.dtype:
        name = self.tolerance.tensors if self.tolerance else self.spec.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    @property
    def rounds_blocks(self) -> bool:
        """A token may change as others come into its block, which has one scale."""
        return self.tolerance is not None and self.tolerance.over == "block"

    def __post_init__(self) -> None:
        self.finite = self.finite or self.tolerance is not None

    def layer(self, tokens: Sequence[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Code keys and values in one layer, ``[tokens, heads, head_dim]``."""
        keys, values = self.all_layers(tokens, slice(layer, layer + 1))
        return keys[0], values[0]

    def all_layers(
        self, tokens: Sequence[int], layers: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Code keys and values, ``[layers, tokens, heads, head_dim]``; they may be overwritten."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._place]
        if new or self._known is None:
            coded = self._coded(new, range(self.spec.num_layers))
            self._known = coded if self._known is None else torch.cat([self._known, coded], 2)
            self._place.update(zip(new, range(len(self._place), self._known.shape[2]), strict=True))
        places = torch.tensor([self._place[token] for token in tokens], dtype=torch.int64)
        keys, values = self._known[:, layers].index_select(2, places.to(self.spec.device))
        return keys, values

    def _coded(self, tokens: Sequence[int], layers: Iterable[int]) -> torch.Tensor:
        heads, device = (self.spec.num_heads, self.spec.head_dim), self.spec.device
        inner = torch.arange(math.prod(heads), device=device).view(heads)
        layer = torch.tensor(list(layers), device=device).view(-1, 1, 1, 1)
        kind = torch.arange(2, device=device).view(-1, 1, 1, 1, 1)

        def scrambled(numbers: Sequence[int], inner: torch.Tensor | int) -> torch.Tensor:
            number = torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, 1, 1)
            code = ((number * 64 + layer) * 2 + kind) * 65536 + inner
            code = (code + 1) * _ODD
            return ((code ^ ((code >> 29) & 0x7FFFFFFFF)) * _MIX) >> 24

        if self.tolerance:
            pages = [page_number(token, self.spec.block_size) for token in tokens]
            by_token, by_page = scrambled(tokens, _NO_ELEMENT), scrambled(pages, _NO_ELEMENT)
            found = coarse(scrambled(tokens, inner), by_token, by_page, self.tolerance.over)
            return found.to(self.dtype)
        bits = scrambled(tokens, inner).to(_integer(self.dtype.itemsize))
        if self.finite:
            low, high = _exponent_bits(self.dtype)
            bits = (bits & ~high) | low
        return bits.view(self.dtype)

    def inputs(self, tokens: Sequence[int], layout: str) -> list[torch.Tensor]:
        """Code keys and values in all layers, laid out to be handed to a cache."""
        if layout == "wider" and not self.finite:
            layout = "plain"  # NaN patterns survive no conversion
        layouts = ("fused", "transposed") if layout == "apart" else (layout, layout)
        both = zip(self.all_layers(tokens), layouts, strict=True)
        return [lay_out(tensor, own) for tensor, own in both]

    def contents(
        self,
        want: torch.Tensor,
        got: torch.Tensor,
        layer: int,
        head: int,
        kind: str,
        known: Sequence[int],
    ) -> Contents:
        """Put two rows ``[head_dim]`` in words, as far as ``known`` tokens explain them."""
        place = self._belongs(want, layer, head, known)
        other = self._belongs(got, layer, head, known)
        here = layer, head, kind
        found = other.words(here) if other else self._words(got, want)
        looks = place.unlike(other) if place and other else ""
        expected = place.words(here) if place else self._words(want)
        return Contents(head, kind, expected, found, other.token if other else None, looks)

    def _words(self, row: torch.Tensor, right: torch.Tensor | None = None) -> str:
        """Put a row that is no token's in words, and how it differs from the ``right`` one."""
        if row.dtype != self.dtype:
            return f"the codes {row.tolist()[:4]}..."
        if not as_bits(row).any():
            return "zeros"
        if row.isnan().all():
            bits = {
                WORDS.get((name_of(row.dtype), each), ANY_NAN) for each in as_bits(row).tolist()
            }
            return " and ".join(sorted(bits)) + ", or its scale is" * bool(self.tolerance)
        bits_of_none = f"bits no token has ({row.tolist()[:4]}...)"
        if right is None:
            return bits_of_none
        wrong = (as_bits(row) != as_bits(right)).nonzero().flatten().tolist()
        if not self.tolerance and row[wrong].isnan().all() and right[wrong].isnan().all():
            return f"that but for the bits of NaN in elements {_listed(wrong)}{_NOT_KEPT}"
        if not right.isfinite().all():
            return bits_of_none
        off = f"up to {(row.double() - right.double()).abs().max():.3g} off"
        if self.tolerance:
            least = f"1/{1 / self.tolerance.of_greatest:.4g}"
            off += f" where {least} of the greatest of its {self.tolerance.over} is allowed"
        if self.tolerance and (times := times_as_large(right, row)):
            return f"{times:.4g} times that, {off}"
        if not row.isfinite().all():
            off = "in part not finite"
        if rounded := rounded_to(right, row):
            return f"that rounded to {rounded}, {off}"
        if not self.tolerance and len(wrong) < len(row):
            return f"that but for elements {_listed(wrong)}: {self._words(row[wrong])}"
        return f"{bits_of_none}, {off}"

    def _belongs(
        self, row: torch.Tensor, layer: int, head: int, tokens: Sequence[int]
    ) -> Place | None:
        """Find where a row of bits belongs; the layer and head it was found in come first."""
        if row.dtype != self.dtype:
            return None
        layers = [layer, *(other for other in range(self.spec.num_layers) if other != layer)]
        for alike in (_equal, self._near) if self.tolerance else (_equal,):
            for token in tokens:
                coded = self._coded([token], layers)
                if hit := alike(coded, row).all(-1).nonzero().tolist():
                    kind, layer_at, _, head_at = min(hit, key=lambda at: (at[1], at[3] != head))
                    return Place(token, layers[layer_at], head_at, "KV"[kind])
        return None

    def _near(self, coded: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        assert self.tolerance
        limit = coded.abs().amax((-1, -2), keepdim=True) * self.tolerance.of_greatest
        return (row - coded).abs() <= limit


def _listed(numbers: Sequence[int]) -> str:
    """List ascending numbers, as a range where none is left out."""
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers) > 2:
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


def _equal(coded: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return as_bits(coded) == as_bits(row)


def page_number(token: int, block_size: int) -> int:
    """Number the page that a token was written to: tokens of one sequence and page have the same.

    That is as long as the sequence is not cut.
    """
    wrote, position = divmod(token, POSITIONS)
    return wrote * POSITIONS + position // block_size


def token_words(token: int) -> str:
    seq, position, life = token_parts(token)
    if seq == PADDING_SEQUENCE:
        return f"padding row {position}"
    if seq >= TEXTS:
        within = f" in namespace {life}" if life else ""
        return f"text {seq - TEXTS}{within}, token {position}"
    again = f" (life {life + 1}: it was freed or cut before)" if life else ""
    return f"sequence {seq}{again}, token {position}"
