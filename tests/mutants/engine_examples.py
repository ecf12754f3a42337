"""What the search over mixes is compared with: the engine's tests as one would write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer import LLM, SamplingParams, tiny_gpt2
from tests.mutants.examples import first_to_fail

if TYPE_CHECKING:
    from tests.mutants.hunt import Found
    from tests.mutants.tally import Tally

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. "


def run(tally: Tally) -> Found | None:
    """The first example that fails."""
    return first_to_fail(EXAMPLES, tally)


def _llm(**config: Any) -> LLM:
    return LLM("tiny", device="cpu", **{"block_size": 16, "kv_cache_tokens": 1024, **config})


def _tokens(llm: LLM, *prompts: str, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(list(prompts), params, progress=False)]


def one_prompt_as_transformers_does() -> None:
    tiny = tiny_gpt2()
    ids = tiny.tokenizer(LONG, return_tensors="pt").input_ids
    found = tiny.model.generate(
        ids, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=256
    )
    assert _tokens(_llm(), LONG) == [found[0, ids.shape[1] :].tolist()]


def a_batch_equals_its_prompts_alone() -> None:
    prompts = ["Hello", "What is the time?", LONG]
    assert _tokens(_llm(), *prompts) == [_tokens(_llm(), prompt)[0] for prompt in prompts]


def a_prompt_again_gets_the_same() -> None:
    llm = _llm()
    assert _tokens(llm, LONG) == _tokens(llm, LONG)


def a_shared_beginning_changes_nothing() -> None:
    llm = _llm()
    prompts = [LONG + "Who?", LONG + "When?"]
    assert [_tokens(llm, prompt)[0] for prompt in prompts] == _tokens(
        _llm(prefix_cache=False), *prompts
    )


def chunks_change_nothing() -> None:
    assert _tokens(_llm(prefill_max_tokens=16), LONG) == _tokens(_llm(), LONG)


def a_small_cache_serves_all() -> None:
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
    one_prompt_as_transformers_does,
    a_batch_equals_its_prompts_alone,
    a_prompt_again_gets_the_same,
    a_shared_beginning_changes_nothing,
    chunks_change_nothing,
    a_small_cache_serves_all,
    a_seed_is_reproducible,
    a_cancelled_request_frees_its_blocks,
)
