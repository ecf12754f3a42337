"""States of recurrent layers, in addition to keys and values: functions of all tokens so far."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    Ranks,
    Run,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    describe_error,
    invariant,
)
from pytest_roseinfer.capabilities.operation import (
    Operation,
    Writer,
    add_while_fitting,
    call_or_error,
)
from pytest_roseinfer.capabilities.payload import as_bits, same_bits
from pytest_roseinfer.capabilities.prefixes import BeginWith, LookUp
from pytest_roseinfer.capabilities.return_values import raise_invalid
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.oracle.pages import NAMES, POSITIONS, token_of
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.observation import Snapshot
    from pytest_roseinfer.oracle.texts import TextSlice
else:
    from pytest_roseinfer.capabilities import torch

_STATES = NAMES - 1
"""Name under which the payload encodes states, which no sequence or text has."""


class StateMethods:
    """Adapter methods for states."""

    @optional
    def use_states(self, states: torch.Tensor) -> None:
        """Receive the states after each token of the next write, before ``append`` and the like.

        ``[layers, tokens, heads, head_dim]``, in the order of the write, without padding. A state
        depends on all tokens of its sequence up to there, and each is different. A sequence needs
        the last one only; a cache that reuses prefixes or truncates also needs those of some
        lengths. The tensor is overwritten after the write.
        """

    @optional
    def peek_state(self, seq: int) -> torch.Tensor:
        """Return the state after the last token of a sequence, ``[layers, heads, head_dim]``.

        It is called after every step, for each sequence that has tokens.
        """


class Prefix(NamedTuple):
    """All tokens before a state."""

    length: int
    parent: int
    """Number of the state before the last token; 0 for that of no tokens."""


class StateNumbers:
    """Numbers of states, one for each prefix of tokens."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self.prefixes = [Prefix(0, 0)]
        """Prefix of each state, by its number."""

    def after_each(self, tokens: Iterable[int], state: int = 0) -> list[int]:
        """Return the number of the state after each token that follows ``state``."""
        numbers = []
        for token in tokens:
            key = state, token
            if key not in self._numbers:
                self._numbers[key] = len(self.prefixes)
                self.prefixes.append(Prefix(self.prefixes[state].length + 1, state))
            state = self._numbers[key]
            numbers.append(state)
        return numbers

    def after(self, tokens: Iterable[int]) -> int:
        """Return the number of the state after these tokens; 0 without any."""
        return next(reversed(self.after_each(tokens)), 0)

    def has_prefix(self, state: int, prefix: int) -> bool:
        """Return True if the tokens before ``state`` begin with those before ``prefix``."""
        while self.prefixes[state].length > self.prefixes[prefix].length:
            state = self.prefixes[state].parent
        return state == prefix


def state_tokens(states: Iterable[int]) -> list[int]:
    """Return the tokens by which the payload encodes states."""
    return [token_of(_STATES, each % POSITIONS, each // POSITIONS) for each in states]


class States(Observer):
    """Feeder of states, right before a write, and counter of states that are used again."""

    any_of = ("use_states",)
    conditions: ClassVar = {
        "state_reused": "A sequence begins with tokens that ``begin_with`` found, and so with a "
        "stored state. Required of a cache that defines ``use_states`` and ``begin_with``.",
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.numbers = StateNumbers()
        self._next: list[int] = []
        """States of the tokens of the present step."""

    def before(self, step: Operation) -> Mapping[str, int]:
        oracle, self._next = self.run.oracle, []
        if written := step.written(oracle):
            at = 0
            for seq, count in written.rows:
                before = oracle.tokens(seq) if seq in oracle.sequences else []
                before = before[: len(before) - oracle.unwritten(seq)] if before else []
                state = self.numbers.after(before)
                self._next += self.numbers.after_each(written.tokens[at : at + count], state)
                at += count
        return {}

    def before_call(self, step: Operation, text_slices: Sequence[TextSlice]) -> None:  # noqa: ARG002
        if self._next:
            states, _ = self.run.payload.all_layers(state_tokens(self._next))
            use = self.run.adapter.use_states
            self.run.cache_under_test.pass_input([states], lambda part: use(states[:, part]))

    def after(self, observation: Observation) -> Mapping[str, int]:
        step = observation.operation
        reused = isinstance(step, BeginWith) and observation.oracle.length(step.seq) > 0
        return {"state_reused": int(reused)}

    def notes(self, after: Snapshot) -> StateNumbers:  # noqa: ARG002
        return self.numbers


@invariant(rank=14, needs=("use_states",))
def states(observation: Observation) -> Finding | None:
    """The state of each sequence must be that after its last token, bit for bit."""
    for seq, actual in observation.after.states.items():
        if isinstance(actual, Exception):
            problem = f"peek_state({seq}) raised {describe_error(actual)}"
            kind = f"raised {type(actual).__name__}"
            return Finding(problem, Location(0, {seq: None}), actual, kind=kind)
        numbers: StateNumbers = observation.notes[States]
        right = numbers.after(observation.oracle.tokens(seq))
        expected, _ = observation.payload.all_layers(state_tokens([right]))
        if not same_bits(expected[:, 0], actual):
            return _difference(observation, seq, right, expected[:, 0], actual)
    return None


def _difference(
    observation: Observation, seq: int, right: int, expected: torch.Tensor, actual: torch.Tensor
) -> Finding:
    location = f"peek_state: sequence {seq}"
    if (expected.dtype, expected.device) != (actual.dtype, actual.device):
        problem = f"expected {expected.dtype} on {expected.device}, found {actual.dtype} on"
        return Finding(f"{location}: {problem} {actual.device}", kind="dtype or device")
    wrong = (as_bits(expected) != as_bits(actual.contiguous())).flatten(1).any(1)
    layer = int(wrong.nonzero()[0])
    found, kind = _describe_state(observation, seq, right, layer, actual[layer].contiguous())
    tokens = format_count(observation.oracle.length(seq), "token")
    return Finding(
        f"{location}, layer {layer}: expected the state after all of its {tokens}, found {found}",
        Location(layer, {seq: None}),
        kind=kind,
    )


def _describe_state(
    observation: Observation, seq: int, right: int, layer: int, actual: torch.Tensor
) -> tuple[str, str]:
    """Describe the state that a sequence has in place of ``right``, and name the kind of it."""
    numbers: StateNumbers = observation.notes[States]
    known = range(1, len(numbers.prefixes))
    for other in dict.fromkeys((layer, *range(observation.spec.num_layers))):
        coded, _ = observation.payload.all_layers(state_tokens(known), slice(other, other + 1))
        same = (as_bits(coded[0]) == as_bits(actual)).flatten(1).all(1).nonzero().flatten().tolist()
        if same:
            found = _describe_known(observation, seq, right, known[same[0]])
            if other == layer:
                return found, "another state"
            return f"{found}, of layer {other}", "another layer"
    if not as_bits(actual).any():
        return "zeros", "zeros"
    if actual.is_floating_point() and actual.isnan().all():
        return "NaN (poison, or computed from it)", "NaN"
    return f"bits of no state ({actual.flatten().tolist()[:4]}...)", "other bits"


def _describe_known(observation: Observation, seq: int, right: int, state: int) -> str:
    numbers: StateNumbers = observation.notes[States]
    length = numbers.prefixes[state].length
    if numbers.has_prefix(right, state):
        return f"that after the first {length}"
    oracle = observation.oracle
    for other in oracle.readable:
        if other != seq and numbers.has_prefix(numbers.after(oracle.tokens(other)), state):
            return f"that of sequence {other} after its first {length}"
    return f"that after {format_count(length, 'token')} that no sequence has now"


def _show_states(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    if not (look.reads and run.cache_under_test.device.idle):
        return {}
    oracle = run.oracle
    return {
        "states": {
            seq: call_or_error(_read_state, run, seq)
            for seq in oracle.readable
            if oracle.length(seq) and not oracle.unwritten(seq)
        }
    }


def _read_state(run: Run, seq: int) -> torch.Tensor:
    state: Any = run.adapter.peek_state(seq)
    shape = (run.spec.num_layers, run.spec.num_heads, run.spec.head_dim)
    if not (isinstance(state, torch.Tensor) and state.shape == shape):
        right = f"a tensor [layers={shape[0]}, heads={shape[1]}, head_dim={shape[2]}]"
        raise_invalid(f"peek_state({seq})", state, right)
    return state.clone()


def _share_states(ranks: Ranks, given: torch.Tensor) -> None:
    heads = ranks.heads(given)
    ranks.each(lambda at, cache: cache.use_states(*heads[at]))


def _join_states(ranks: Ranks, seq: int) -> torch.Tensor:
    return torch.cat(ranks.each(lambda _, cache: cache.peek_state(seq)), -2)


def _begin_with_the_second_text(writer: Writer) -> None:
    """Open with two texts that differ, and a sequence that begins with what is found of one.

    Random lookups are mostly of a text that no other one resembles.
    """
    add_while_fitting(writer, _store_two_texts(writer))


def _store_two_texts(writer: Writer) -> Iterator[Operation]:
    size, can = writer.oracle.block_size, writer.adapter.abilities
    tokens = writer.pick((size, 2 * size, size + 1, 3 * size))
    if writer.live or not LookUp.needs | Prefill.needs <= can or writer.between(0, 2):
        return
    (first,) = writer.fresh(1)
    yield Prefill(first, tokens, writer.layout())
    second = writer.name_without_prefix(tokens)
    if second is None:
        return
    yield Prefill(second, tokens, writer.layout())
    text = writer.oracle.text_of(writer.pick((first, second)))
    if "free" in can:
        yield Free(first)
        yield Free(second)
    third = writer.name_with_prefix(tokens, text)
    tokens += writer.adapter.prefixes.recomputed_tokens
    yield LookUp(third, tokens)
    yield BeginWith(third)
    # What the sequence found must still be there for another one.
    yield Append((third,), writer.layout())
    fourth = writer.name_with_prefix(tokens, text)
    yield LookUp(fourth, tokens)
    yield BeginWith(fourth)


STATES = Capability(
    methods=StateMethods,
    preludes=(Prelude(("use_states",), 11, _begin_with_the_second_text),),
    needs={"use_states": ("peek_state",), "peek_state": ("use_states",)},
    observers=(States,),
    views=(View(("use_states",), _show_states),),
    invariants=(states,),
    sharded={"use_states": _share_states, "peek_state": _join_states},
)
