"""Bad calls: caches that refuse them pass, and others fail with a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    KVCacheAdapter,
    Oracle,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.cache_data import BadCall
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.misuse import MisuseState, standard_bad_calls
from pytest_roseinfer.capabilities.payload import Payload
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.run import coverage
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager, PerLayerManager
from tests.capabilities.caches.careless_caches import (
    CarefulCache,
    CountsHoldersTooLate,
    ReadsPastTheEnd,
    TakesAnyBlock,
    TakesAnyName,
    TakesAnyTokens,
)
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.text_cache import TextCache
from tests.interpreted import interpreted
from tests.mutants.kernel_caches import CompactedKernels, StridedKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

HISTORY = History(CacheSpec(), (Append((0, 1)), Append((0,))))


class StrictCache(PagedCache):
    """Refuses to free an unknown sequence."""

    def bad_calls(self) -> Iterable[BadCall]:
        yield BadCall("free of an unknown sequence", lambda: self.free(99), (KeyError,))


class LenientCache(StrictCache):
    def free(self, seq: int) -> None:
        if seq in self.tables:
            super().free(seq)


class RaisesTheWrongError(StrictCache):
    def free(self, seq: int) -> None:
        raise RuntimeError(f"not {seq} today")


class LeakyCache(StrictCache):
    def free(self, seq: int) -> None:
        self.unused.pop()
        super().free(seq)


class ScribblingCache(StrictCache):
    def free(self, seq: int) -> None:
        self.keys[0, -1] = 1.0
        super().free(seq)


class LeavesAChangeCache(StrictCache):
    """Makes a valid call that should undo its own change, and does not."""

    def bad_calls(self) -> Iterable[BadCall]:
        yield BadCall("giving a block away and taking it back", lambda: self.unused.pop())


class TidyCache(StrictCache):
    def bad_calls(self) -> Iterable[BadCall]:
        yield BadCall(
            "giving a block away and taking it back",
            lambda: self.unused.append(self.unused.pop()),
        )


class WithoutArenaCache(StrictCache):
    """Does not show its storage."""

    arena = KVCacheAdapter.arena


class LeakyTextCache(TextCache):
    standard_bad_calls = ("free_unknown", "free_twice")
    bad_call_errors = (KeyError,)

    def free(self, seq: int) -> None:
        if seq not in self.tables:
            self.unused.pop()
        super().free(seq)


def test_omitted_steps_stay_omitted_for_later_bad_calls() -> None:
    """A cache with prefix reuse may have no sequence 7, where the drawn history had one."""
    steps = (Append((0, 1)), Free(7), Free(0))
    with pytest.raises(Divergence, match="free of a sequence that never was changed the books"):
        run_history(LeakyTextCache, History(CacheSpec(), steps, texts=((0, 0),)))


@pytest.mark.parametrize("cache", [StrictCache, TidyCache, WithoutArenaCache])
def test_cache_that_refuses_bad_calls_passes(cache: type[KVCacheAdapter]) -> None:
    run_history(cache, HISTORY)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (LenientCache, "free of an unknown sequence went through; it must raise KeyError"),
        (RaisesTheWrongError, "free of an unknown sequence raised RuntimeError: not 99 today"),
        (LeakyCache, "free of an unknown sequence changed the books"),
        (ScribblingCache, "free of an unknown sequence changed what is stored in K"),
        (LeavesAChangeCache, "giving a block away and taking it back changed the books"),
    ],
)
def test_cache_that_accepts_bad_calls_fails(cache: type[KVCacheAdapter], message: str) -> None:
    with pytest.raises(Divergence, match=message):
        run_history(cache, HISTORY)


@pytest.mark.parametrize(
    ("target", "least"),
    [
        (PerLayerManager, 30),
        (GroupedManager, 25),
        pytest.param(StridedKernels, 5, marks=interpreted),
    ],
)
def test_shipped_targets_offer_distinct_bad_calls(target: type[KVCacheAdapter], least: int) -> None:
    adapter = target()
    options = {name: values[0] for name, values in target.option_choices.items()}
    spec = CacheSpec(num_layers=2, num_blocks=2, options=options)
    adapter.make(spec)
    adapter.append([0, 1], *Payload(spec).all_layers([0, 1]))
    oracle = Oracle(spec.block_size, spec.num_blocks)
    oracle.append([(0, 1), (1, 1)], [0, 1])
    standard = standard_bad_calls(MisuseState(adapter, spec, oracle))
    words = [bad.description for bad in (*standard, *adapter.bad_calls())]
    assert len(words) >= least
    assert len(set(words)) == len(words)


@interpreted
@pytest.mark.parametrize("layout", ["plain", "pairs", "tokens_first", "gaps", "slow_dims"])
@pytest.mark.parametrize("target", [StridedKernels, CompactedKernels])
def test_kernel_targets_pass_on_every_layout(target: type[KVCacheAdapter], layout: str) -> None:
    options = {"keys": layout, "values": "pairs", "index": "int32", "gather": True}
    spec = CacheSpec(num_layers=2, num_heads=3, head_dim=5, options=options)
    run_history(target, History(spec, (Append((0, 1, 2)), Append((2, 0)))))


# ------------------------------------------------------------------------------ the catalogue


@pytest.fixture
def searching() -> Iterator[Callable[[int], None]]:
    """Set up a short search with a given seed."""
    previous_settings, previous_coverage = settings.current(), coverage.current()

    def set_up(seed: int) -> None:
        settings.set_current(settings.Settings(seed=seed, examples=10))
        coverage.set_current(coverage.Coverage())

    yield set_up
    settings.set_current(previous_settings)
    coverage.set_current(previous_coverage)


@pytest.mark.parametrize("seed", range(2))
def test_cache_that_refuses_every_standard_bad_call_passes(
    seed: int, searching: Callable[[int], None]
) -> None:
    searching(seed)
    conformance(CarefulCache)().test_histories()


WRONG: dict[type[KVCacheAdapter], set[str]] = {
    TakesAnyName: {"free of a sequence that was freed", "gather of a sequence that never was"},
    TakesAnyTokens: {"append of two keys and one value"},
    CountsHoldersTooLate: {
        "decref_blocks of a free block, last in the list,",
        "decref_blocks of a block once more than it is held",
    },
    ReadsPastTheEnd: {
        "gather_blocks of one token more than is stored",
        "gather_blocks of -1 tokens",
    },
    TakesAnyBlock: {
        "incref_blocks of the scratch block, last in the list,",
        "incref_blocks of a free block, last in the list,",
        "gather_blocks of a free block, last in the list,",
    },
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cache", WRONG)
def test_failure_names_every_accepted_bad_call(
    cache: type[KVCacheAdapter], seed: int, searching: Callable[[int], None]
) -> None:
    searching(seed)
    with pytest.raises(Divergence) as caught:
        conformance(cache)().test_histories()
    message = str(caught.value)
    assert [words for words in WRONG[cache] if words not in message] == []


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (("free_twice", "free_thrice"), "names 'free_thrice': choose from 'gather_unknown', "),
        (("gather_freed",), "names 'gather_freed', which needs gather$"),
    ],
)
def test_invalid_names_of_standard_bad_calls_are_refused(
    named: tuple[str, ...], message: str
) -> None:
    class Misnamed(PagedCache):
        standard_bad_calls: ClassVar[Sequence[str]] = named

    with pytest.raises(TypeError, match=message):
        conformance(Misnamed)


@pytest.mark.parametrize("kind", [GroupedManager, PerLayerManager])
def test_empty_truncated_sequence_is_not_read_past_its_end(kind: type[KVCacheAdapter]) -> None:
    """The bad call then uses the list of another sequence, which may be longer."""
    options = {name: values[-1] for name, values in kind.option_choices.items()}
    steps = (Append((0, 1)), Append((0,)), Truncate(1, 0))
    run_history(kind, History(CacheSpec(options={**options, "triton": False}), steps))
