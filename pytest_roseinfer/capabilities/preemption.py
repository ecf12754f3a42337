"""Preemption of sequences, whose tokens are written again later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, optional
from pytest_roseinfer.capabilities.misuse import Call, MisuseState, misuse
from pytest_roseinfer.capabilities.writes import draw_long_writes
from pytest_roseinfer.oracle.pages import Absence, State
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch


class PreemptionMethods:
    """Adapter methods for preemption."""

    @optional
    def preempt(self, seq: int) -> None:
        """Free the blocks of a sequence, which keeps its name until ``resume`` or ``free``.

        The cache may keep their tokens until another sequence needs the blocks: the ledger lists
        such blocks as free and ``cached``.
        """

    @optional
    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write all tokens of a preempted sequence again, with the same keys and values.

        Tokens in blocks that were kept need not be written.
        """


@dataclass(slots=True)
class Preempted(State):
    """Preempted sequences, whose tokens are to be written again."""

    any_of: ClassVar = ("preempt",)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each preempted sequence."""

    @property
    def absent(self) -> Mapping[int, Absence]:
        return {seq: Absence("preempted", tokens) for seq, tokens in self.tokens.items()}

    def on_free(self, seq: int) -> None:
        self.tokens.pop(seq, None)


def preempted(oracle: operation.Oracle) -> dict[int, list[int]]:
    """Return the tokens of each preempted sequence."""
    return oracle.ensure_state(Preempted).tokens


@operation.register("Preempt")
class Preempt(operation.Operation):
    """Preempt a sequence, which frees its blocks."""

    seq: int

    needs = frozenset({"preempt", "resume"})
    needs_tokens = True

    def describe(self) -> str:
        return f"preempt sequence {self.seq}"

    def uses(self) -> list[int]:
        return [self.seq]

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        tokens = oracle.tokens(self.seq)
        preempted(oracle)[self.seq] = oracle.tokens_written_again(self.seq, tokens)
        oracle.release_pages(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.preempt(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if writer.filled:
            yield operation.DrawOption(121, 3, lambda: cls(writer.pick(writer.filled)))


@operation.register("Resume")
class Resume(operation.Write):
    """Write all tokens of a preempted sequence again."""

    seq: int
    count: int
    """Number of its tokens."""
    layout: str = "plain"

    needs = frozenset({"preempt", "resume"})

    def rows(self) -> operation.Rows:
        return [(self.seq, self.count)]

    def describe(self) -> str:
        tokens = format_count(self.count, "token")
        return f"resume sequence {self.seq}, with its {tokens}{self.describe_layout()}"

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in preempted(oracle) and len(preempted(oracle)[self.seq]) == self.count

    def fill_in_numbers(self, oracle: operation.Oracle) -> operation.Operation:
        tokens = preempted(oracle).get(self.seq, ())
        return Resume(self.seq, len(tokens) or self.count, self.layout)

    def tokens(self, oracle: operation.Oracle) -> operation.Tokens:
        return preempted(oracle)[self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.append(self.rows(), self.tokens(oracle))
        del preempted(oracle)[self.seq]

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.resume(self.seq, cache.key, cache.value)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        oracle = writer.oracle
        rows = [(seq, len(tokens)) for seq, tokens in preempted(oracle).items()]
        fitting = [row for row in rows if oracle.fits([row])]

        def draw_step() -> Resume:
            return cls(*writer.pick(fitting or rows), writer.layout())

        if rows:
            yield operation.DrawOption(122, 6 if fitting else 3, draw_step)
            yield from draw_long_writes(writer)


# Bad calls


@misuse("gather", "preempt")
def gather_preempted(at: MisuseState) -> Iterator[Call]:
    yield from at.gather_absent([*preempted(at.oracle)])


PREEMPTION = Capability(
    methods=PreemptionMethods,
    misuse=(gather_preempted,),
    states=(Preempted,),
    return_steps=lambda oracle: [
        Resume(seq, len(tokens)) for seq, tokens in preempted(oracle).items()
    ],
    needs={"preempt": ("resume",), "resume": ("preempt",)},
    operations=(
        Preempt,
        Resume,
    ),
)
