"""What is done to a cache, step by step: plain data that can be said, saved and replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from pytest_roseinfer.adapters.cache import CacheSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer.oracle import Oracle


@dataclass(frozen=True, slots=True)
class Append:
    """One token to each of some sequences, in this order; unseen names start empty."""

    seqs: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> list[tuple[int, int]]:
        return [(seq, 1) for seq in self.seqs]

    def words(self) -> str:
        return f"append one token to {_listed(self.seqs)}{_laid_out(self.layout)}"


@dataclass(frozen=True, slots=True)
class AppendPadded:
    """One token to each of some sequences; where the sequence is None, a padding row."""

    seqs: tuple[int | None, ...]
    layout: str = "plain"

    def rows(self) -> list[tuple[int, int]]:
        return [(seq, 1) for seq in self.seqs if seq is not None]

    def words(self) -> str:
        rows = ["padding" if seq is None else str(seq) for seq in self.seqs]
        return f"append one token to rows {', '.join(rows)}{_laid_out(self.layout)}"


@dataclass(frozen=True, slots=True)
class AppendMany:
    """Several tokens to each of some sequences."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> list[tuple[int, int]]:
        return list(zip(self.seqs, self.counts, strict=True))

    def words(self) -> str:
        each = ", ".join(f"{count} to sequence {seq}" for seq, count in self.rows())
        return f"append tokens: {each}{_laid_out(self.layout)}"


@dataclass(frozen=True, slots=True)
class Prefill:
    """A new sequence with a whole prompt."""

    seq: int
    count: int
    layout: str = "plain"

    def rows(self) -> list[tuple[int, int]]:
        return [(self.seq, self.count)]

    def words(self) -> str:
        return f"prefill sequence {self.seq} with {self.count} tokens{_laid_out(self.layout)}"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Room for several tokens of some sequences, which a ``Fill`` writes later."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> list[tuple[int, int]]:
        return list(zip(self.seqs, self.counts, strict=True))

    def words(self) -> str:
        each = ", ".join(f"{count} of sequence {seq}" for seq, count in self.rows())
        return f"reserve room for tokens: {each}"


@dataclass(frozen=True, slots=True)
class Fill:
    """Write the tokens of the oldest reservation that is still open."""

    def words(self) -> str:
        return "write the tokens that room was reserved for first"


@dataclass(frozen=True, slots=True)
class Copy:
    """A new sequence with the tokens another has, written anew: a fork that shares nothing."""

    parent: int
    child: int
    count: int
    layout: str = "plain"

    def rows(self) -> list[tuple[int, int]]:
        return [(self.child, self.count)]

    def words(self) -> str:
        return f"write the {self.count} tokens of sequence {self.parent} again as {self.child}"


@dataclass(frozen=True, slots=True)
class Fork:
    parent: int
    child: int

    def words(self) -> str:
        return f"fork sequence {self.parent} as sequence {self.child}"


@dataclass(frozen=True, slots=True)
class Free:
    seq: int

    def words(self) -> str:
        return f"free sequence {self.seq}"


@dataclass(frozen=True, slots=True)
class SetOptions:
    options: Mapping[str, Any] = field(default_factory=dict)

    def words(self) -> str:
        return "set " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())


Write = Append | AppendPadded | AppendMany | Prefill | Copy | Reserve
Operation = Write | Fill | Fork | Free | SetOptions
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Append, AppendPadded, AppendMany, Prefill, Copy, Reserve, Fill, Fork, Free, SetOptions,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class History:
    """A cache's shape and all that is done to it."""

    spec: CacheSpec
    operations: tuple[Operation, ...]
    finite: bool = True

    @property
    def size(self) -> int:
        return len(self.operations)

    @property
    def device(self) -> str:
        return self.spec.device

    def words(self) -> str:
        shape = ", ".join(f"{name}={value}" for name, value in self.spec.to_json().items())
        steps = [f"  {at}. {step.words()}" for at, step in enumerate(self.operations, 1)]
        return "\n".join([f"a cache with {shape}", *steps])

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_json(),
            "finite": self.finite,
            "operations": [{"do": type(step).__name__, **asdict(step)} for step in self.operations],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> History:
        return cls(
            CacheSpec(**data["spec"]),
            tuple(_operation(step) for step in data["operations"]),
            data["finite"],
        )


def _operation(data: Mapping[str, Any]) -> Operation:
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data.items()
        if name != "do"
    }
    made: Operation = _KINDS[data["do"]](**fields)
    return made


def is_write(step: Operation) -> TypeGuard[Write]:
    return isinstance(step, Write)


def changed_by(step: Operation) -> list[int]:
    """The sequences that a step begins, adds to or frees."""
    if is_write(step):
        return [seq for seq, _ in step.rows()]
    if isinstance(step, Fork):
        return [step.child]
    return [step.seq] if isinstance(step, Free) else []


def tokens_of(oracle: Oracle, step: Write) -> list[int]:
    """The tokens a write is about to write."""
    if isinstance(step, Copy):
        return oracle.tokens(step.parent)
    return oracle.new_tokens(step.rows())


def apply_to_oracle(oracle: Oracle, step: Operation) -> bool:
    """Do a step to the oracle; False when it does not fit.

    Tokens count as stored from the moment room is reserved for them.
    """
    if not fits_oracle(oracle, step):
        return False
    if isinstance(step, Fork):
        oracle.fork(step.parent, step.child)
    elif isinstance(step, Free):
        oracle.free(step.seq)
    elif is_write(step):
        oracle.append(step.rows(), tokens_of(oracle, step))
    return True


def fits_oracle(oracle: Oracle, step: Operation) -> bool:
    """Whether there is room for a step."""
    if isinstance(step, Fork):
        return oracle.fork_fits(step.parent)
    return oracle.fits(step.rows()) if is_write(step) else True


def _listed(seqs: tuple[int, ...]) -> str:
    return f"sequence{'s' * (len(seqs) != 1)} {', '.join(map(str, seqs))}"


def _laid_out(layout: str) -> str:
    return "" if layout == "plain" else f" (inputs {layout})"
