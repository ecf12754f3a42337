"""Speculation, and requests with a long tail of lengths."""

from __future__ import annotations

from statistics import median
from time import process_time
from typing import TYPE_CHECKING

import pytest

from roseinfer import EnginePath, SamplingParams
from tests.real_models.texts import SPECULATED, long_tail, percentiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer import RequestOutput
    from tests.real_models.real_model import RealModel

_REQUESTS = 100


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_speculation(smollm2: RealModel, figure: Callable[[str], None]) -> None:
    """Completions stay greedy, and most drafts of code, which repeats itself, are accepted."""
    params = SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True, logprobs=True)
    engines = {
        speculation: smollm2.llm(kv_cache_tokens=2048, speculation=speculation)
        for speculation in ("ngram", None)
    }
    for name, prompt in SPECULATED.items():
        counts = engines["ngram"].engine.path_counts
        before = counts[EnginePath.DRAFTED], counts[EnginePath.ACCEPTED]
        seconds: dict[str | None, list[float]] = {each: [] for each in engines}
        outputs: dict[str | None, RequestOutput] = {}
        for _ in range(3):
            for speculation, llm in engines.items():
                start = process_time()
                (outputs[speculation],) = llm.generate(prompt, params)
                seconds[speculation].append(process_time() - start)
        smollm2.compare(outputs.values())
        drafted = counts[EnginePath.DRAFTED] - before[0]
        accepted = counts[EnginePath.ACCEPTED] - before[1]
        rates = {each: 64 / median(times) for each, times in seconds.items()}
        figure(
            f"speculation on {name}: {accepted} of {drafted} drafts accepted, "
            f"{rates['ngram']:.1f} tokens per second of processor time, {rates[None]:.1f} without"
        )
        if name == "code":
            assert accepted > drafted / 2


@pytest.mark.slow
@pytest.mark.xdist_group("gemma")
def test_100_requests_with_a_long_tail(gemma: RealModel, figure: Callable[[str], None]) -> None:
    """Most are short, a few are ten times as long, and the cache has no room for all at once."""
    prompts, params = long_tail(gemma.encode, _REQUESTS)
    llm = gemma.llm(kv_cache_tokens=1024, block_size=16, max_batch_size=32)
    start = process_time()
    outputs = llm.generate(prompts, params)
    seconds = process_time() - start
    difference = gemma.compare(outputs)
    figure(
        f"{_REQUESTS} requests of {percentiles(map(len, prompts))} prompt tokens and "
        f"{percentiles(len(each.token_ids) for each in outputs)} new ones (median, 90 %, most): "
        f"{difference.tokens / seconds:.1f} tokens per second of processor time; {difference}"
    )
