"""Baseline of the search over mixes: tests of the engine by example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer import LLM, SamplingParams, tiny_gpt2
from tests.mutants.examples import first_to_fail

if TYPE_CHECKING:
    from tests.mutants.hunt import Failure
    from tests.mutants.tally import Tally

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. "


def run(tally: Tally) -> Failure | None:
    """Return the first example that fails."""
    return first_to_fail(EXAMPLES, tally)


def _llm(**config: Any) -> LLM:
    return LLM("tiny", device="cpu", **{"block_size": 16, "kv_cache_tokens": 1024, **config})


def _tokens(llm: LLM, *prompts: str, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(list(prompts), params, progress=False)]


def one_prompt_equals_transformers() -> None:
    tiny = tiny_gpt2()
    ids = tiny.tokenizer(LONG, return_tensors="pt").input_ids
    expected = tiny.model.generate(
        ids, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=256
    )
    assert _tokens(_llm(), LONG) == [expected[0, ids.shape[1] :].tolist()]


def a_batch_equals_single_prompts() -> None:
    prompts = ["Hello", "What is the time?", LONG]
    assert _tokens(_llm(), *prompts) == [_tokens(_llm(), prompt)[0] for prompt in prompts]


def a_repeated_prompt_gets_the_same_tokens() -> None:
    llm = _llm()
    assert _tokens(llm, LONG) == _tokens(llm, LONG)


def a_shared_prefix_changes_nothing() -> None:
    llm = _llm()
    prompts = [LONG + "Who?", LONG + "When?"]
    assert [_tokens(llm, prompt)[0] for prompt in prompts] == _tokens(
        _llm(prefix_cache=False), *prompts
    )


def chunks_change_nothing() -> None:
    assert _tokens(_llm(prefill_max_tokens=16), LONG) == _tokens(_llm(), LONG)


def a_small_cache_serves_all_prompts() -> None:
    prompts = [LONG, LONG[::-1], LONG.upper()]
    assert _tokens(_llm(kv_cache_tokens=160), *prompts) == _tokens(_llm(), *prompts)


def a_seed_is_reproducible() -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_new_tokens=8)
    assert _tokens(_llm(), LONG, params=params) == _tokens(_llm(), LONG, params=params)


def a_cancelled_request_frees_its_blocks() -> None:
    llm = _llm(prefix_cache=False)
    kv = llm.engine.sequence_runner.kv
    free = kv.num_free_blocks(0)
    request = llm.engine.submit(LONG, GREEDY)
    llm.engine.step()
    llm.engine.cancel(request)
    assert kv.num_free_blocks(0) == free


EXAMPLES = (
    one_prompt_equals_transformers,
    a_batch_equals_single_prompts,
    a_repeated_prompt_gets_the_same_tokens,
    a_shared_prefix_changes_nothing,
    chunks_change_nothing,
    a_small_cache_serves_all_prompts,
    a_seed_is_reproducible,
    a_cancelled_request_frees_its_blocks,
)
