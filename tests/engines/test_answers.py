"""Answers of an engine's model, which are kept between mixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling
from pytest_roseinfer.engines.run import Answers, run_mix
from tests.engine_capabilities.engines.toy_engine import ToyAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

MIX = RequestMix(
    (RequestSpec((1, 2), Sampling(3, ignore_eos=True)),),
    options={name: values[0] for name, values in ToyAdapter.option_choices.items()},
)


def counting(num_replays: int = 1) -> tuple[type[ToyAdapter], Counter[tuple[int, ...]]]:
    """Return an adapter class, and the number of its own computations by prompt."""
    computed: Counter[tuple[int, ...]] = Counter()

    class Counting(ToyAdapter):
        replays = num_replays

        def generate_alone(
            self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix
        ) -> list[int]:
            computed[tuple(prompt)] += 1
            return super().generate_alone(prompt, sampling, mix)

    return Counting, computed


def test_answer_is_computed_once_for_all_mixes() -> None:
    adapter, computed = counting()
    run_mix(adapter, MIX)
    once = computed[1, 2]
    run_mix(adapter, replace(MIX, cache_tokens=MIX.cache_tokens + 4, requests=MIX.requests * 2))
    assert once == computed[1, 2] == 1


@pytest.mark.parametrize(
    "changes",
    [{"block_size": 2}, {"requests": (RequestSpec((1, 2), Sampling(2, ignore_eos=True)),)}],
)
def test_answer_for_other_arguments_is_computed(changes: dict[str, object]) -> None:
    adapter, computed = counting()
    run_mix(adapter, MIX)
    run_mix(adapter, replace(MIX, **changes))  # type: ignore[arg-type]
    assert computed[1, 2] == 2


def test_answers_of_a_server_are_not_kept() -> None:
    adapter, computed = counting(num_replays=2)
    run_mix(adapter, MIX)
    run_mix(adapter, MIX)
    assert computed[1, 2] == 2


def test_oldest_answers_are_dropped() -> None:
    answers = Answers(max_numbers=2 * 101)
    for key in (1, 2, 1, 3):
        answers.get(key, lambda key=key: [key])  # type: ignore[misc]
    assert [[*answers.get(key, lambda: [0.0])] for key in (1, 3)] == [[1], [3]]
    assert answers.get(2, lambda: [0.0]) == [0.0]
