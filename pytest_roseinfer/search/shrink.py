"""Shrinking: lists smaller histories, caches and mixes, and keeps those that still fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from itertools import chain, combinations, islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.operation import MAX_SEQUENCES, NAMING, Write
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.capabilities.text_keys import simpler_keys
from pytest_roseinfer.capabilities.writes import Append, AppendMany, Prefill
from pytest_roseinfer.engine_capabilities.capability import RequestCore, change, plain
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.oracle.oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History
    from pytest_roseinfer.search.named_checks import Example

SHRINK_SECONDS = 20.0
"""Maximum seconds to shrink one example."""
_Case = TypeVar("_Case", bound="Example")


@dataclass(slots=True)
class Shrinker(Generic[_Case]):
    """Shrinker with the smallest failing example so far, and its failure.

    It tries smaller examples and keeps each one that still fails the check, until none does. It
    shrinks the example itself, a history or a mix of requests, not the choices of its strategy: a
    choice changes its meaning once a previous one is removed.
    """

    example: _Case
    failure: Exception
    check: Callable[[_Case], object]
    ends: float = field(default_factory=lambda: monotonic() + SHRINK_SECONDS)
    cut_short: bool = False
    """True if the time ran out before all smaller examples were tried."""
    _tried: set[str] = field(default_factory=set)

    def shrink(self, passes: Sequence[Callable[[_Case], Iterator[_Case]]]) -> None:
        """Try the candidates of each pass in turns, until none fails or the time runs out."""
        before = None
        while before != self.example and not self.cut_short:
            before = self.example
            for smaller in passes:
                self._go_through(smaller)

    def note_if_cut_short(self) -> None:
        """Note in the failure's message that there may be a smaller example."""
        if self.cut_short and isinstance(self.failure, Difference):
            self.failure.extra_paragraphs.append(
                f"There may be a smaller example: shrinking ended after {SHRINK_SECONDS:g} s."
            )

    def _go_through(self, smaller: Callable[[_Case], Iterator[_Case]]) -> None:
        """Try the candidates of a pass; after a kept one, continue at its index in the new list."""
        at: int | None = 0
        while at is not None:
            at = self._next_kept(smaller, at)

    def _next_kept(self, smaller: Callable[[_Case], Iterator[_Case]], begin: int) -> int | None:
        for at, candidate in enumerate(islice(smaller(self.example), begin, None), begin):
            if self.cut_short:
                return None
            if self._still_fails(candidate):
                return at
        return None

    def _still_fails(self, candidate: _Case) -> bool:
        """Try a candidate that was not tried before; keep it if the check fails in the same way."""
        # Also for repeated candidates: a long history has many, and listing them takes long too.
        self.cut_short = monotonic() > self.ends
        text = json.dumps(candidate.to_json())
        if self.cut_short or text in self._tried:
            return False
        self._tried.add(text)
        try:
            self.check(candidate)
        except type(self.failure) as failure:
            # An error raised by the target is another bug than wrong contents. But an error may be
            # caused by wrong contents, which a smaller example shows directly.
            if type(failure.__cause__) not in (type(self.failure.__cause__), type(None)):
                return False
            # An error in a step that fits is worse than a wrong error in a step that must fail.
            if _without_room(failure) and not _without_room(self.failure):
                return False
            self.example, self.failure = candidate, failure
            return True
        except Exception:  # another failure
            return False
        return False


def passes_of(adapter: type[Any], example: _Case) -> Sequence[Callable[[_Case], Iterator[_Case]]]:
    """Return the shrinking passes for an example of this adapter."""
    listed: Any = passes_of_mixes if isinstance(example, RequestMix) else passes_of_histories
    passes: Sequence[Callable[[_Case], Iterator[_Case]]] = listed(adapter)
    return passes


def _without_room(failure: Exception) -> bool:
    return isinstance(failure, Difference) and failure.on_refused_step


# Simpler steps: fewer rows, smaller numbers, default switches.


def simpler_steps(step: Operation, usual: Mapping[str, Any]) -> Iterator[Operation]:
    """List simpler steps of the same kind; ``usual`` are the default switches of a cache."""
    yield from _with_fewer_rows(step)
    yield from step.simpler()
    for each in fields(step):  # type: ignore[arg-type]
        value = getattr(step, each.name)
        if isinstance(value, Mapping):
            yield from (
                replace_field(step, each.name, new) for new in nearer_default_options(value, usual)
            )
        elif each.default is not MISSING and value != each.default:
            yield replace_field(step, each.name, each.default)
    yield from _with_smaller_numbers(step)


def nearer_default_options(
    options: Mapping[str, Any], usual: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """List switches closer to the default: all default, then each one of them."""
    unusual = [name for name in usual if options.get(name) != usual[name]]
    if unusual:
        yield {**options, **usual}
    yield from ({**options, name: usual[name]} for name in unusual)


def with_numbers(step: Operation, change: Callable[[int], int]) -> Operation:
    """Return a step with all numbers except names changed, none below the step's minimum."""
    for name, numbers in _numbers(step).items():
        changed = tuple(max(step.least, change(number)) for number in numbers)
        single = isinstance(getattr(step, name), int)
        step = replace_field(step, name, changed[0] if single else changed)
    return step


def smaller_numbers(number: int, minimum: int) -> list[int]:
    """List some smaller numbers, the smallest first."""
    few = {minimum, minimum + 1, number // 2, number - 2, number - 1}
    return sorted(each for each in few if minimum <= each < number)


def replace_field(step: Operation, name: str, value: object) -> Operation:
    return replace(step, **{name: value})  # type: ignore[type-var]


def _with_fewer_rows(step: Operation) -> Iterator[Operation]:
    rows = {name: value for name, value in _values(step).items() if isinstance(value, tuple)}
    count = len(next(iter(rows.values()), ()))
    for at in reversed(range(count if count > 1 else 0)):
        remaining = {name: value[:at] + value[at + 1 :] for name, value in rows.items()}
        yield replace(step, **remaining)  # type: ignore[type-var]


def _with_smaller_numbers(step: Operation) -> Iterator[Operation]:
    for name, numbers in _numbers(step).items():
        for at, number in enumerate(numbers):
            for smaller in smaller_numbers(number, step.least):
                changed = (*numbers[:at], smaller, *numbers[at + 1 :])
                single = isinstance(getattr(step, name), int)
                yield replace_field(step, name, smaller if single else changed)


def _numbers(step: Operation) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each numeric field that names no sequence and has no default."""
    open_ = {each.name for each in fields(step) if each.default is MISSING}  # type: ignore[arg-type]
    values = {name: value for name, value in _values(step).items() if name in open_ - {*NAMING}}
    rows = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    return {name: row for name, row in rows.items() if all(isinstance(each, int) for each in row)}


def _values(step: Operation) -> dict[str, Any]:
    return {each.name: getattr(step, each.name) for each in fields(step)}  # type: ignore[arg-type]


# The same steps on a plainer or smaller cache.


_FEWEST_BLOCKS = 2


def smaller_caches(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    spec = history.spec
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    for options in nearer_default_options(spec.options, usual):
        yield _with_spec(history, options=options)
    if not history.finite:
        yield replace(history, finite=True)
    if history.gathers_every > 1:
        yield replace(history, gathers_every=1)
    yield from (replace(history, texts=history.texts[:few]) for few in range(1, len(history.texts)))
    for texts in simpler_keys(adapter.key_parts, history.texts):
        yield replace(history, texts=texts)
    yield from (_with_spec(history, **layers) for layers in _fewer_layers(spec))
    yield from (_with_spec(history, windows=windows) for windows in _smaller_windows(adapter, spec))
    for name, sizes in _shapes(adapter).items():
        now = getattr(spec, name)
        yield from (_with_spec(history, **{name: size}) for size in sorted(sizes) if size < now)
    if spec.dtype != adapter.dtypes[0]:
        yield _with_spec(history, dtype=adapter.dtypes[0])
    for size in sorted(adapter.block_sizes):
        if size < spec.block_size:
            yield _with_blocks_of(size, history)
            yield _with_spec(history, block_size=size)
    for blocks in smaller_numbers(spec.num_blocks, fewest_blocks(spec)):
        yield _with_spec(history, num_blocks=blocks)


def fewest_blocks(spec: CacheSpec) -> int:
    return _FEWEST_BLOCKS * max(1, len({*spec.windows}))


def _with_spec(history: History, **fields: Any) -> History:
    return replace(history, spec=replace(history.spec, **fields))


def _shapes(adapter: type[KVCacheAdapter]) -> dict[str, Any]:
    return {"num_heads": adapter.head_counts, "head_dim": adapter.head_dims}


def _fewer_layers(spec: CacheSpec) -> Iterator[dict[str, Any]]:
    for layers in range(1, spec.num_layers):
        if not spec.windows:
            yield {"num_layers": layers}
        for begin in {0, spec.num_layers - layers} if spec.windows else ():
            yield {"num_layers": layers, "windows": spec.windows[begin : begin + layers]}


def _smaller_windows(
    adapter: type[KVCacheAdapter], spec: CacheSpec
) -> Iterator[tuple[int | None, ...]]:
    sizes = adapter.windows.sizes
    for window in filter(None, {*spec.windows}):
        allowed = sorted(each for each in sizes if each and each < window)
        for smaller in allowed if sizes else smaller_numbers(window, 1):
            yield tuple(smaller if each == window else each for each in spec.windows)


def _with_blocks_of(size: int, history: History) -> History:
    """Make the blocks smaller, and scale all numbers to end at the same place in a block."""
    change = partial(_as_many_blocks, history.spec.block_size, size)
    steps = tuple(with_numbers(step, change) for step in history.operations)
    return replace(_with_spec(history, block_size=size), operations=steps)


def _as_many_blocks(old: int, new: int, tokens: int) -> int:
    """Return the tokens that fill the same number of blocks, and the last to a similar degree."""
    blocks, rest = divmod(tokens, old)
    last = new - 1 if rest == old - 1 else min(rest, new - 1)
    return blocks * new + (max(1, last) if rest else 0)


_MANY_ROWS = 2 * MAX_SEQUENCES
"""Number of rows that few drawn steps exceed."""


def passes_of_histories(
    adapter: type[KVCacheAdapter],
) -> list[Callable[[History], Iterator[History]]]:
    """Return the shrinking passes for histories of this adapter, the most thorough last."""
    ways = (
        _without_steps_if_large,
        _without_a_sequence,
        _without_steps,
        _with_one_sequence_for_two,
        _with_switches_set_before,
        smaller_caches,
        _with_simpler_steps,
        _with_all_numbers_lower,
        _with_joined_steps,
        _without_two_steps,
        _histories_with_less_room,
        _renamed,
    )
    return [partial(_with_valid_steps, way, adapter) for way in ways]


def _with_valid_steps(
    way: Callable[[type[KVCacheAdapter], History], Iterator[History]],
    adapter: type[KVCacheAdapter],
    history: History,
) -> Iterator[History]:
    for smaller in way(adapter, history):
        valid = keep_valid_steps(adapter, smaller)
        if 0 < valid.size <= history.size:
            yield valid


def keep_valid_steps(adapter: type[KVCacheAdapter], history: History) -> History:
    """Leave out steps that became impossible, and finish operations that are left half done."""
    oracle = _oracle(adapter, history)
    shows_room = "ledger" in adapter.abilities
    valid_steps: list[Operation] = []
    for each in history.operations:
        step = each.fill_in_numbers(oracle)
        if not step.possible(oracle):
            continue
        fits = step.fits(oracle) or not step.allowed(oracle)
        if not (fits or shows_room):
            continue
        step.apply(oracle)
        valid_steps.append(step)
        if not fits and adapter.prefixes.shares == "equal prefixes":
            break  # it may find room after all, and then its contents are unknown
    endings = (each.finishing_steps for each in adapter.capabilities if each.finishing_steps)
    valid_steps += chain.from_iterable(ending(oracle) for ending in endings)
    return replace(history, operations=tuple(valid_steps))


def _oracle(adapter: type[KVCacheAdapter], history: History) -> Oracle:
    return Oracle.of(adapter, history.spec, history.texts)


def _with(history: History, steps: Iterable[Operation]) -> History:
    return replace(history, operations=tuple(steps))


def _without_a_sequence(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    names = {seq: None for step in history.operations for seq in _names(step)}
    for seq in reversed(names):
        remaining = (_without_rows_of(seq, step) for step in history.operations)
        yield _with(history, (step for step in remaining if step))


def _with_one_sequence_for_two(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Merge two sequences, such as a fork and its parent, into one."""
    names = dict.fromkeys(seq for step in history.operations for seq in _names(step))
    for replacement, replaced in combinations(names, 2):
        as_one = {**{seq: seq for seq in names}, replaced: replacement}
        apart = (
            _without_rows_of(replaced, step) if replacement in _names(step) else step
            for step in history.operations
        )
        merged = [_with_names(step, as_one) for step in apart if step]
        yield _with(history, merged)
        if Free(replacement) in merged:
            yield _with(history, (step for step in merged if step != Free(replacement)))


def _without_rows_of(seq: int, step: Operation) -> Operation | None:
    """Return a step without the rows of a sequence; None if nothing remains."""
    if seq not in _names(step):
        return step
    fewer = simpler_steps(step, {})
    return next((each for each in fewer if [*_names(each)] == _other_sequences(seq, step)), None)


def _other_sequences(seq: int, step: Operation) -> list[int]:
    return [name for name in _names(step) if name != seq]


def _names(step: Operation) -> Iterator[int]:
    for name in NAMING:
        value = getattr(step, name, ())
        named = value if isinstance(value, tuple) else (value,)
        yield from (seq for seq in named if seq is not None)


def _without_steps(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Leave out consecutive steps: half of all, then fewer, starting at the end."""
    steps, many = history.operations, history.size
    while many := many // 2:
        for end in range(len(steps), many - 1, -many):
            yield _with(history, (*steps[: end - many], *steps[end:]))


def _without_steps_if_large(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Leave out steps first if steps have many rows, since each try then takes long."""
    if any(len(step.rows()) > _MANY_ROWS for step in history.operations):
        yield from _without_steps(adapter, history)


def _without_two_steps(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    steps = history.operations
    for pair in combinations(reversed(range(len(steps))), 2):
        yield _with(history, (step for at, step in enumerate(steps) if at not in pair))


def _histories_with_less_room(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Leave out steps together with their blocks, for failures that need a nearly full cache."""
    free = _free(adapter, history)
    for way in (_without_a_sequence, _without_steps, _without_two_steps, _with_simpler_steps):
        for candidate in way(adapter, history):
            smaller = keep_valid_steps(adapter, candidate)
            blocks = smaller.spec.num_blocks - _free(adapter, smaller) + free
            if fewest_blocks(smaller.spec) <= blocks < smaller.spec.num_blocks:
                yield replace(smaller, spec=replace(smaller.spec, num_blocks=blocks))


def _free(adapter: type[KVCacheAdapter], history: History) -> int:
    """Count the free blocks at the end of a history."""
    oracle = _oracle(adapter, history)
    for step in history.operations:
        step.apply(oracle)
    return oracle.pages_free()


def _with_switches_set_before(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Set a step's switches when the cache is made, and leave out the step."""
    steps = history.operations
    for at, step in enumerate(steps):
        if isinstance(step, SetOptions):
            spec = replace(history.spec, options=step.options)
            yield _with(replace(history, spec=spec), (*steps[:at], *steps[at + 1 :]))


def _with_joined_steps(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Replace a writing step by a plain append, or two writing steps by one."""
    steps = history.operations
    writing = {at: dict(step.rows()) for at, step in enumerate(steps) if isinstance(step, Write)}
    for at, rows in writing.items():
        if {*rows.values()} == {1}:
            yield _with(history, (*steps[:at], Append(tuple(rows)), *steps[at + 1 :]))
    for first, second in combinations(writing, 2):
        rows = Counter(writing[first]) + Counter(writing[second])
        between, after = steps[first + 1 : second], steps[second + 1 :]
        for joined in _writes(rows):
            if joined.needs <= adapter.abilities:
                yield _with(history, (*steps[:first], joined, *between, *after))


def _writes(rows: Mapping[int, int]) -> Iterator[Operation]:
    """List the steps that write these numbers of tokens to sequences."""
    if {*rows.values()} == {1}:
        yield Append(tuple(rows))
    if len(rows) == 1:
        yield from (Prefill(seq, count) for seq, count in rows.items())
    for names in dict.fromkeys([tuple(rows), tuple(reversed(rows))]):
        yield AppendMany(names, tuple(rows[seq] for seq in names))


def _with_simpler_steps(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    steps = history.operations
    for at in reversed(range(len(steps))):
        for simpler in simpler_steps(steps[at], usual):
            yield _with(history, (*steps[:at], simpler, *steps[at + 1 :]))


def _with_all_numbers_lower(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Lower all numbers at once, by some blocks or by one, to keep their relations."""
    size = history.spec.block_size
    for less in (4 * size, size, 1):
        lowered = (with_numbers(step, partial(_less, less)) for step in history.operations)
        yield _with(history, lowered)


def _less(less: int, number: int) -> int:
    return number - less if number > less else number


def _renamed(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Yield the history with its sequences numbered in order of appearance."""
    names = dict.fromkeys(seq for step in history.operations for seq in _names(step))
    numbers = {seq: number for number, seq in enumerate(names)}
    yield _with(history, (_with_names(step, numbers) for step in history.operations))


def _with_names(step: Operation, numbers: dict[int, int]) -> Operation:
    for name in NAMING:
        value = getattr(step, name, ())
        if isinstance(value, int):
            step = replace_field(step, name, numbers[value])
        elif value:
            step = replace_field(
                step, name, tuple(None if seq is None else numbers[seq] for seq in value)
            )
    return step


# Smaller mixes of requests: fewer requests, or smaller ones.
#
# The cache always has room for the largest request, which an engine may refuse otherwise.


def passes_of_mixes(
    adapter: type[EngineAdapter],
) -> list[Callable[[RequestMix], Iterator[RequestMix]]]:
    """Return the shrinking passes for mixes of this adapter, the most thorough last."""
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    return [
        _without_requests,
        _with_shorter_texts,
        partial(_with_a_plainer_engine, usual, min(adapter.block_sizes)),
        _mixes_with_less_room,
        _with_simpler_requests,
        _with_a_shorter_wait,
        _with_all_sooner,
    ]


def _without_requests(mix: RequestMix) -> Iterator[RequestMix]:
    """Leave out requests: half of all, then fewer, starting at the end."""
    specs, many = mix.requests, mix.size
    while many := many // 2:
        for end in range(mix.size, many - 1, -many):
            before, after = specs[: end - many], specs[end:]
            yield from _with_requests(mix, (*before, *after))
            # The removed requests may have delayed the later ones.
            yield from _with_requests(mix, (*before, *map(_a_step_later, after)))


def _a_step_later(spec: RequestSpec) -> RequestSpec:
    """Let a request arrive a step later, and its events, such as a cancel, happen early."""
    soon = {name: min(1, number) for name, number in _own_numbers(spec).items()}
    return change(spec, arrival=spec.arrival + 1, **soon)


def _with_shorter_texts(mix: RequestMix) -> Iterator[RequestMix]:
    """Shorten all prompts at the end or the start, or all outputs."""
    longest = max(len(each.prompt) for each in mix.requests)
    for length in smaller_numbers(longest, 1):
        yield from _with_requests(mix, (_cut_prompt(each, length) for each in mix.requests))
    for gone in (4, 1):
        yield from _with_requests(mix, (_begun_later(each, gone) for each in mix.requests))
    max_new_tokens = max(each.sampling.max_new_tokens for each in mix.requests)
    for new in smaller_numbers(max_new_tokens, 1):
        yield from _with_requests(mix, (_generating(each, new) for each in mix.requests))


def _with_a_plainer_engine(
    usual: dict[str, Any], smallest_block: int, mix: RequestMix
) -> Iterator[RequestMix]:
    yield from (
        replace(mix, options=options) for options in nearer_default_options(mix.options, usual)
    )
    for size in smaller_numbers(mix.block_size, smallest_block):
        yield replace(mix, block_size=size)


def _mixes_with_less_room(mix: RequestMix) -> Iterator[RequestMix]:
    min_tokens = _least_room(mix)
    for room in smaller_numbers(mix.cache_tokens, min_tokens):
        yield replace(mix, cache_tokens=room)


def _with_simpler_requests(mix: RequestMix) -> Iterator[RequestMix]:
    for at in reversed(range(mix.size)):
        for simpler in _simpler_requests(mix.requests[at]):
            yield from _with_requests(mix, (*mix.requests[:at], simpler, *mix.requests[at + 1 :]))


def _with_a_shorter_wait(mix: RequestMix) -> Iterator[RequestMix]:
    """Shorten an output, and let the events of all requests come as many steps sooner."""
    for at, spec in enumerate(mix.requests):
        for tokens in smaller_numbers(spec.sampling.max_new_tokens, 1):
            steps = spec.sampling.max_new_tokens - tokens
            specs = [_with_events_sooner(each, steps) for each in mix.requests]
            specs[at] = _generating(specs[at], tokens)
            yield from _with_requests(mix, specs)


def _with_events_sooner(spec: RequestSpec, steps: int) -> RequestSpec:
    sooner = {name: max(min(1, n), n - steps) for name, n in _own_numbers(spec).items()}
    return change(spec, **sooner)


def _with_all_sooner(mix: RequestMix) -> Iterator[RequestMix]:
    """Let all requests arrive a step sooner, except those of step 0."""
    sooner = (replace(each, arrival=max(0, each.arrival - 1)) for each in mix.requests)
    yield from _with_requests(mix, sooner)


def _simpler_requests(spec: RequestSpec) -> Iterator[RequestSpec]:
    sampling = spec.sampling
    if (simple := plain(spec)) != spec:
        yield simple
    yield from _plainer(spec, fields(spec)[len(fields(RequestCore)) :])
    for plainer in _plainer(sampling, fields(sampling)):
        yield replace(spec, sampling=plainer)
    yield from (_cut_prompt(spec, length) for length in smaller_numbers(len(spec.prompt), 1))
    if len(spec.prompt) > 1:
        yield replace(spec, prompt=spec.prompt[1:])
    new = smaller_numbers(sampling.max_new_tokens, 1)
    yield from (_generating(spec, tokens) for tokens in new)
    yield from (replace(spec, arrival=step) for step in smaller_numbers(spec.arrival, 0))
    for name, number in _own_numbers(spec).items():
        yield from (change(spec, **{name: fewer}) for fewer in smaller_numbers(number, 0))


def _own_numbers(spec: RequestSpec) -> dict[str, int]:
    """Return the numbers among a request's capability fields, without the core fields."""
    extra = fields(spec)[len(fields(RequestCore)) :]
    values = {each.name: getattr(spec, each.name) for each in extra}
    return {name: number for name, number in values.items() if type(number) is int}


def _plainer(case: Any, names: Sequence[Field[Any]]) -> Iterator[Any]:
    """Set each of these fields to its default, or keep only one element of it."""
    changed = [each for each in names if getattr(case, each.name) != each.default]
    yield from (replace(case, **{each.name: each.default}) for each in changed)
    for name in (each.name for each in changed):
        elements = getattr(case, name)
        if isinstance(elements, tuple) and len(elements) > 1:
            yield from (replace(case, **{name: (element,)}) for element in elements)


def _with_requests(mix: RequestMix, specs: Iterable[RequestSpec]) -> Iterator[RequestMix]:
    """Yield the mix with other requests, in the same cache and in one without the freed room."""
    smaller = replace(mix, requests=tuple(specs))
    yield smaller
    if num_removed := _tokens(mix) - _tokens(smaller):
        room = max(_least_room(smaller), mix.cache_tokens - num_removed)
        yield replace(smaller, cache_tokens=room)


def _tokens(mix: RequestMix) -> int:
    return sum(each.max_tokens for each in mix.requests)


def _least_room(mix: RequestMix) -> int:
    return max(each.max_tokens for each in mix.requests)


def _cut_prompt(spec: RequestSpec, length: int) -> RequestSpec:
    return replace(spec, prompt=spec.prompt[:length])


def _begun_later(spec: RequestSpec, num_removed: int) -> RequestSpec:
    return replace(spec, prompt=spec.prompt[num_removed:] or spec.prompt[-1:])


def _generating(spec: RequestSpec, tokens: int) -> RequestSpec:
    fewer = min(tokens, spec.sampling.max_new_tokens)
    return replace(spec, sampling=replace(spec.sampling, max_new_tokens=fewer))
