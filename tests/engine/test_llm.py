"""What users see: prompts in, texts out, and a clear word where that cannot be."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import (
    LLM,
    BadArgument,
    ConfigError,
    EnginePath,
    NoDistribution,
    RequestTooLarge,
    SamplingParams,
    UnsupportedModel,
    tiny_gpt2,
)
from roseinfer.attention.batch import AttentionBatch
from tests.engine.families import CONFIGS, tiny
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from roseinfer import RequestOutput

TEXTS = ["Once upon a time", "a", "The answer: 42", "Once upon a dime", "zü\n"]
END = 256
"""The token that ends a text of the tiny model."""


def greedy(count: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, **more)


def small_llm(device: str, model: Any = "tiny", **config: Any) -> LLM:
    sizes = {"block_size": 4, "kv_cache_tokens": 400} | config
    return LLM(model, device=device, dtype="float32", **sizes)


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate([prompt], params, progress=False)
    return output


@cache
def original(device: str) -> Any:
    return tiny_gpt2(device)


def by_transformers(device: str, prompt: str | list[int], count: int, **how: Any) -> list[int]:
    """Its greedy continuation, whatever tokens that end a text come up."""
    model, tokenizer = original(device).model, original(device).tokenizer
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    row = torch.tensor([ids], device=device)
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": END} | how
    tokens = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=count, **how)
    continuation: list[int] = tokens[0, len(ids) :].tolist()
    return continuation


def text_of(device: str, tokens: list[int]) -> str:
    text: str = original(device).tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


# --------------------------------------------------------------------------------- generate


def test_texts_are_continued_as_transformers_does(device: str) -> None:
    llm = LLM(
        "tiny",
        device=device,
        dtype="float32",
        max_batch_size=64,
        block_size=64,
        kv_cache_tokens=None,
        prefix_cache=True,
    )
    params = SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=None,
        max_new_tokens=16,
        stop=(),
        ignore_eos=False,
    )
    outputs = llm.generate(TEXTS, params, progress=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        want = by_transformers(device, text, 16)
        assert output.prompt == text
        assert output.token_ids == want
        assert output.text == text_of(device, want)
        assert output.finish_reason == "length"
        assert output.error is None
    assert_no_block_is_lost(llm)


def test_token_ids_are_as_good_as_the_text(device: str) -> None:
    llm = small_llm(device)
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    by_text = llm.generate(TEXTS, greedy(), progress=False)
    by_ids = llm.generate(ids, greedy(), progress=False)
    mixed = llm.generate([TEXTS[0], *ids[1:]], greedy(), progress=False)
    tokens = [output.token_ids for output in by_text]
    assert [output.token_ids for output in by_ids] == tokens
    assert [output.token_ids for output in mixed] == tokens
    assert [output.text for output in by_ids] == [output.text for output in by_text]


def test_outputs_come_in_the_order_of_the_prompts(device: str) -> None:
    llm = small_llm(device, max_batch_size=2)
    lengths = [9, 1, 5, 2, 7]
    outputs = llm.generate(TEXTS, [greedy(length) for length in lengths], progress=False)
    assert [output.prompt for output in outputs] == TEXTS
    assert [len(output.token_ids) for output in outputs] == lengths
    for text, length, output in zip(TEXTS, lengths, outputs, strict=True):
        assert output.token_ids == by_transformers(device, text, length)


@pytest.mark.parametrize("prompt", ["Once", [79, 110, 99, 101]], ids=["text", "token ids"])
def test_a_prompt_that_stands_alone_is_one_prompt(device: str, prompt: Any) -> None:
    (output,) = small_llm(device).generate(prompt, greedy(4), progress=False)
    assert output.token_ids == by_transformers(device, "Once", 4)


def test_no_prompts_give_no_outputs(device: str) -> None:
    assert small_llm(device).generate([], progress=False) == []


def test_the_same_prompt_many_times(device: str) -> None:
    llm = small_llm(device, kv_cache_tokens=64)
    outputs = llm.generate([TEXTS[0]] * 12, greedy(6), progress=False)
    assert [output.token_ids for output in outputs] == [by_transformers(device, TEXTS[0], 6)] * 12
    assert_no_block_is_lost(llm)


def test_parameters_for_another_number_of_prompts(device: str) -> None:
    llm = small_llm(device)
    with pytest.raises(BadArgument, match="2 sampling parameters for 3 prompts"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()], progress=False)
    assert not llm.engine.has_work


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_where_it_is_asked_for(
    device: str, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = small_llm(device)
    capsys.readouterr()
    llm.generate(["a", "b", ""], greedy(1), progress=shown)
    assert ("generating: 100%" in capsys.readouterr().err) == shown


def test_a_model_that_was_loaded_already(device: str) -> None:
    model = tiny_gpt2()
    llm = small_llm(device, model.model, tokenizer=model.tokenizer)
    assert one(llm, TEXTS[0], greedy()).text == text_of(
        device, by_transformers(device, TEXTS[0], 16)
    )


def test_half_precision_chooses_among_the_likeliest(device: str) -> None:
    """Its logits are rounded to about a twentieth, and differently so."""
    llm = LLM("tiny", device=device, dtype="bfloat16", kv_cache_tokens=128)
    assert llm.engine.sessions.kv.keys.dtype == torch.bfloat16
    with torch.no_grad():
        row = torch.tensor([llm.tokenizer.encode(TEXTS[0])], device=device)
        logits = original(device).model(row).logits[0, -1]
    likeliest = (logits > logits.max() - 1).nonzero()[:, 0].tolist()
    assert len(likeliest) < 10
    (token,) = one(llm, TEXTS[0], greedy(1)).token_ids
    assert token in likeliest


# -------------------------------------------------------------------------------- memory


def test_a_prompt_as_large_as_the_cache_which_holds_its_beginning(device: str) -> None:
    """The beginning ends within a block. To keep it and to write behind it takes a block more
    than there is."""
    llm = small_llm(device, kv_cache_tokens=8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    one(llm, prompt[:6], greedy(1, ignore_eos=True))
    output = one(llm, prompt, greedy(1, ignore_eos=True))
    assert output.token_ids == by_transformers(device, prompt, 1)
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_requests_that_run_out_of_blocks_end_as_if_there_were_enough(
    device: str, prefix_cache: bool
) -> None:
    llm = small_llm(device, kv_cache_tokens=48, prefix_cache=prefix_cache)
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    outputs = llm.generate(prompts, greedy(20, ignore_eos=True), progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == by_transformers(device, prompt, 20)
        assert output.text == text_of(device, output.token_ids)
    assert llm.engine.path_counts[EnginePath.RESUMED] > 0
    assert_no_block_is_lost(llm)


def test_what_fits_just_so_is_served_and_one_token_more_is_refused(device: str) -> None:
    """The last token is never stored: 8 blocks of 4 hold 32 tokens, and the request has 33."""
    llm = small_llm(device, kv_cache_tokens=32)
    fits, too_large = llm.generate(
        [[1] * 20, [1] * 20], [greedy(13, ignore_eos=True), greedy(14)], progress=False
    )
    assert fits.token_ids == by_transformers(device, [1] * 20, 13)
    assert too_large.finish_reason == "error"
    assert too_large.error is not None
    assert re.search(
        "20 tokens and 14 new ones take 9 blocks of 4 tokens, and the KV cache has 8",
        too_large.error,
    )


def test_the_models_positions_end_a_request(device: str) -> None:
    llm = small_llm(device, max_length=20)
    output = one(llm, [1] * 17, greedy(16, ignore_eos=True))
    assert output.token_ids == by_transformers(device, [1] * 17, 3)
    assert output.finish_reason == "length"


# -------------------------------------------------------------- errors of one request alone


BAD_PROMPTS = {
    "empty text": ("", "an empty prompt"),
    "no ids": ([], "an empty prompt"),
    "too long": ([1] * 1025, "a prompt of 1025 tokens for a model of 1024 positions"),
    "no room": ([1] * 1024, "a prompt of 1024 tokens leaves no room for a new one"),
    "too large": ([1] * 500, "a prompt of 500 tokens and 16 new ones take 129 blocks"),
    "unknown": ([1, 257], "token ids must lie in 0..256"),
    "negative": ([-1], "token ids must lie in 0..256"),
    "fraction": ([1, 1.5], "token ids"),
    "words": (["Once", "upon"], "token ids"),
    "nothing": (None, "prompt"),
    "a number": (5, "prompt"),
    "half a character": ("a\ud800", "prompt"),
}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(("bad", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_told_why_and_the_others_go_on(
    device: str, bad: Any, message: str, at: int
) -> None:
    llm = small_llm(device)
    prompts: list[Any] = [TEXTS[0], TEXTS[1]]
    prompts.insert(at, bad)
    outputs = llm.generate(prompts, greedy(), progress=False)
    refused = outputs.pop(at)
    assert refused.prompt == bad
    assert (refused.token_ids, refused.text, refused.finish_reason) == ([], None, "error")
    assert refused.error is not None
    assert message in refused.error
    for text, output in zip(TEXTS, outputs, strict=False):
        assert output.token_ids == by_transformers(device, text, 16)
    assert_no_block_is_lost(llm)


def without_numbers_for(device: str, *tokens: int) -> LLM:
    """A model that breaks on some tokens: all that attends to one of them is NaN."""
    model = tiny_gpt2(device)
    model.model.transformer.wte.weight[list(tokens)] = float("nan")
    return small_llm(device, model.model, tokenizer=model.tokenizer)


@pytest.mark.parametrize("sampled", [False, True])
def test_logits_that_are_not_numbers_end_their_request_only(device: str, sampled: bool) -> None:
    llm = without_numbers_for(device, ord("#"))
    prompts = [TEXTS[0], TEXTS[0] + "#", "####", TEXTS[1]]
    params = [
        greedy(8),
        SamplingParams(1.0, seed=1) if sampled else greedy(8),
        greedy(8),
        greedy(8),
    ]
    for _ in range(2):  # what the first round stored must do no harm to the second
        outputs = llm.generate(prompts, params, progress=False)
        ends = [output.finish_reason for output in outputs]
        assert ends == ["length", "error", "error", "length"]
        for broken in outputs[1:3]:
            assert broken.token_ids == []
            assert broken.error is not None
            assert "NaN" in broken.error
        assert outputs[0].token_ids == by_transformers(device, TEXTS[0], 8)
        assert outputs[3].token_ids == by_transformers(device, TEXTS[1], 8)
    assert_no_block_is_lost(llm)


def test_what_was_generated_before_the_logits_broke_is_kept(device: str) -> None:
    tokens = by_transformers(device, TEXTS[0], 8)
    breaks = next(at for at in range(2, 8) if tokens[at] not in tokens[:at])
    llm = without_numbers_for(device, tokens[breaks])
    output = one(llm, TEXTS[0], greedy(8))
    assert output.finish_reason == "error"
    assert output.token_ids == tokens[: breaks + 1]
    assert output.text == text_of(device, output.token_ids)


def test_a_stream_ends_in_what_went_wrong(device: str) -> None:
    llm = without_numbers_for(device, ord("#"))
    with pytest.raises(NoDistribution, match="NaN"):
        list(llm.stream("a#", greedy()))
    with pytest.raises(RequestTooLarge, match="leaves no room"):
        next(llm.stream([1] * 1024))
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "abacus"}, "device 'abacus' is not one that torch knows"),
        ({"device": "meta"}, "device 'meta': the engine runs on cpu and cuda"),
        ({"device": "cpu:7"}, "device 'cpu:7'"),
        ({"dtype": "int8"}, "dtype 'int8': it must be one of float32, float16, bfloat16"),
        ({"dtype": "torch.float32"}, "dtype 'torch.float32'"),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, not 0"),
        ({"block_size": 2.5}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens"),
        ({"max_length": -1}, "max_length"),
        ({"prefill_max_tokens": 0}, "prefill_max_tokens"),
        ({"prefill_max_batch_size": 0}, "prefill_max_batch_size"),
        ({"prefill_admission_policy": "lifo"}, "it must be fifo or pack"),
    ],
    ids=str,
)
@pytest.mark.parametrize("loaded", [False, True], ids=["by name", "loaded"])
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str, loaded: bool) -> None:
    model = tiny_gpt2().model if loaded else "tiny"
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(model, **{"device": "cpu", "dtype": "float32"} | settings)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        LLM("tiny", device="cuda")


def test_more_positions_than_the_model_has(device: str) -> None:
    with pytest.raises(UnsupportedModel, match="max_length=1025: the model has 1024 positions"):
        small_llm(device, max_length=1025)


# ------------------------------------------------------------------------------ checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The tiny model and its tokenizer, saved."""
    saved = tiny_gpt2()
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("as_text", [True, False])
def test_a_directory_is_served_as_the_model_saved_in_it(
    device: str, checkpoint: Path, as_text: bool
) -> None:
    output = one(small_llm(device, str(checkpoint) if as_text else checkpoint), "Once", greedy())
    assert output.token_ids == by_transformers(device, "Once", 16)
    assert output.text == text_of(device, output.token_ids)


@pytest.mark.parametrize("family", CONFIGS)
def test_without_a_tokenizer_there_are_token_ids_and_no_texts(
    device: str, tmp_path: Path, family: str
) -> None:
    tiny(family, "cpu").save_pretrained(tmp_path)
    llm = small_llm(device, tmp_path)
    prompts: list[Any] = [[1, 2, 3], "text", [1, 2, 3]]
    params = [greedy(3, ignore_eos=True), greedy(3), greedy(3, stop=("x",))]
    outputs = llm.generate(prompts, params, progress=False)
    assert len(outputs[0].token_ids) == 3
    assert outputs[0].text is None
    missing = ["a text prompt needs a tokenizer", "stop strings need a tokenizer"]
    for refused, message in zip(outputs[1:], missing, strict=True):
        assert refused.finish_reason == "error"
        assert refused.error is not None
        assert message in refused.error
    first = next(llm.stream([1, 2, 3], greedy(3)))
    assert (first.token_id, first.text) == (outputs[0].token_ids[0], "")


def truncate(name: str, length: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:length])

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def lose_a_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def pickle_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(tiny_gpt2().model.state_dict(), directory / "pytorch_model.bin")


def claim_another_shape(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.update(n_embd=32))


def claim_an_unknown_type(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.update(model_type="abacus"))


def remove_everything(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights cut short": (truncate("model.safetensors", 100_000), "cannot be loaded"),
    "weights cut in the header": (truncate("model.safetensors", 100), "cannot be loaded"),
    "empty weights": (truncate("model.safetensors", 0), "cannot be loaded"),
    "no weights": (remove("model.safetensors"), "cannot be loaded.*safetensors"),
    "pickled weights": (pickle_weights, "cannot be loaded.*safetensors"),
    "a weight less": (lose_a_weight, "lacks 1 weights, transformer.h.1.mlp.c_fc.weight among"),
    "weights of another shape": (claim_another_shape, "cannot be loaded"),
    "config cut short": (truncate("config.json", 30), "cannot be loaded.*config"),
    "no config": (remove("config.json"), "cannot be loaded"),
    "unknown type": (claim_an_unknown_type, "cannot be loaded.*abacus"),
    "tokenizer cut short": (truncate("tokenizer.json", 100), "tokenizer"),
    "nothing there": (remove_everything, "cannot be loaded"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_broken_checkpoint_is_refused_by_name(
    checkpoint: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(UnsupportedModel, match=f"(?s){message}") as refused:
        small_llm("cpu", checkpoint)
    assert str(checkpoint) in str(refused.value)


# ------------------------------------------------------------------------- how a text ends


def ending_with(checkpoint: Path, generation: list[int], model: int, tokenizer: str) -> None:
    """Say in three places which tokens end a text."""
    edit(
        checkpoint / "generation_config.json",
        lambda config: config.update(eos_token_id=generation),
    )
    edit(checkpoint / "config.json", lambda config: config.update(eos_token_id=model))
    edit(checkpoint / "tokenizer_config.json", lambda config: config.update(eos_token=tokenizer))


def first_places(tokens: list[int]) -> list[int]:
    """Where a token stands that was not there before."""
    return [at for at, token in enumerate(tokens) if token not in tokens[:at]]


@pytest.mark.parametrize("which", range(4))
def test_every_token_that_is_said_to_end_a_text_does(
    device: str, checkpoint: Path, which: int
) -> None:
    """In turn two of a list, the model's own and the tokenizer's; the other three never come."""
    (prompt, tokens, place) = next(
        (text, tokens, place)
        for text in [*TEXTS, *"bcdefgh"]
        for tokens in [by_transformers(device, text, 8)]
        for place in first_places(tokens)
        if place > 1 and chr(tokens[place]).isalnum() and tokens[place] < 128
    )
    ends = [token for token in range(200, 240) if token not in tokens][:4]
    ends[which] = tokens[place]
    plain = original(device).tokenizer.convert_ids_to_tokens(ends[3])
    ending_with(checkpoint, ends[:2], ends[2], plain)
    llm = small_llm(device, checkpoint)
    output = one(llm, prompt, greedy(8))
    assert output.token_ids == tokens[: place + 1]
    assert output.finish_reason == "stop"
    assert output.text == text_of(device, tokens[:place])
    through = one(llm, prompt, greedy(8, ignore_eos=True))
    assert (through.token_ids, through.finish_reason) == (tokens, "length")


@cache
def readable(device: str, count: int = 24) -> tuple[str, list[int], str]:
    """A prompt whose continuation has three printable characters in a row, and those."""
    for text in [*TEXTS, *map(chr, range(ord("a"), ord("z")))]:
        tokens = by_transformers(device, text, count)
        whole = text_of(device, tokens)
        found = re.search(r"[!-~]{3}", whole[2:])
        if found and END not in tokens:
            return text, tokens, found[0]
    raise AssertionError("the tiny model writes nothing that can be read")


def test_a_stop_string_of_several_tokens(device: str) -> None:
    prompt, tokens, stop = readable(device)
    output = one(small_llm(device), prompt, greedy(len(tokens), stop=("never", stop)))
    whole = text_of(device, tokens)
    needed = next(n for n in range(len(tokens)) if stop in text_of(device, tokens[:n]))
    assert output.text == whole[: whole.index(stop)]
    assert output.token_ids == tokens[:needed]
    assert output.finish_reason == "stop"


def test_no_piece_of_a_stop_string_is_streamed(device: str) -> None:
    prompt, tokens, stop = readable(device)
    llm = small_llm(device)
    updates = list(llm.stream(prompt, greedy(len(tokens), stop=(stop,))))
    whole = text_of(device, tokens)
    assert "".join(update.text for update in updates) == whole[: whole.index(stop)]
    assert [update.token_id for update in updates] == tokens[: len(updates)]
    assert updates[-1].request.finish_reason == "stop"


def test_the_beginning_of_a_stop_string_is_text_if_the_rest_never_comes(device: str) -> None:
    prompt, tokens, stop = readable(device)
    needed = next(n for n in range(len(tokens)) if stop in text_of(device, tokens[:n]))
    output = one(small_llm(device), prompt, greedy(needed - 1, stop=(stop,)))
    assert output.text == text_of(device, tokens[: needed - 1])
    assert output.finish_reason == "length"


def test_stop_strings_are_each_requests_own(device: str) -> None:
    prompt, tokens, stop = readable(device)
    count = len(tokens)
    stopped, other = small_llm(device).generate(
        [prompt, prompt], [greedy(count, stop=(stop,)), greedy(count)], progress=False
    )
    assert (stopped.finish_reason, other.finish_reason) == ("stop", "length")
    assert other.token_ids == tokens


# --------------------------------------------------------------------- how tokens are chosen


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_models_logits(device: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=40, seed=3, logprobs=True)
    asked, unasked = small_llm(device).generate(
        [TEXTS[0], TEXTS[1]], [params, greedy()], progress=False
    )
    prompt = original(device).tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        row = torch.tensor([prompt + asked.token_ids], device=device)
        logits = original(device).model(row).logits[0, len(prompt) - 1 : -1]
    want = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
    assert asked.logprobs is not None
    torch.testing.assert_close(
        torch.tensor(asked.logprobs, device=device), want, atol=1e-3, rtol=1e-3
    )
    assert len(asked.logprobs) == len(asked.token_ids)
    assert unasked.logprobs is None


def test_logprobs_survive_preemption(device: str) -> None:
    params = greedy(20, ignore_eos=True, logprobs=True)
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    scarce, plenty = small_llm(device, kv_cache_tokens=48), small_llm(device)
    got = scarce.generate(prompts, params, progress=False)
    want = plenty.generate(prompts, params, progress=False)
    assert scarce.engine.path_counts[EnginePath.RESUMED] > 0
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def test_a_repetition_penalty_is_transformers(device: str) -> None:
    """The prompt's tokens count too. Neighbours without one are left alone."""
    llm = small_llm(device)
    penalties = [1.5, 1.0, 3.0]
    prompts = ["abcabcabc"] * 3
    outputs = llm.generate(
        prompts,
        [greedy(repetition_penalty=penalty, ignore_eos=True) for penalty in penalties],
        progress=False,
    )
    for penalty, output in zip(penalties, outputs, strict=True):
        want = by_transformers(device, prompts[0], 16, repetition_penalty=penalty)
        assert output.token_ids == want
    assert outputs[0].token_ids != outputs[1].token_ids


def sampled(seed: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=1.2, top_k=50, top_p=0.98, seed=seed, max_new_tokens=20, ignore_eos=True
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_cache_tokens": 48},
        {"kv_cache_tokens": 48, "prefix_cache": False},
        {"max_batch_size": 1},
        {"prefill_max_tokens": 3},
        {"prefill_admission_policy": "pack", "prefill_max_tokens": 20},
    ],
    ids=str,
)
def test_a_seed_draws_the_same_whatever_it_is_batched_with(
    device: str, config: dict[str, Any]
) -> None:
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    alone = [
        one(small_llm(device), prompt, sampled(seed)).token_ids
        for seed, prompt in enumerate(prompts)
    ]
    llm = small_llm(device, **config)
    params = [sampled(seed) for seed in range(len(prompts))]
    together = llm.generate(prompts, params, progress=False)
    assert [output.token_ids for output in together] == alone
    backwards = llm.generate(prompts[::-1], params[::-1], progress=False)
    assert [output.token_ids for output in backwards] == alone[::-1]


def test_seeds_differ_and_so_do_requests_without_one(device: str) -> None:
    llm = small_llm(device)
    hot = [
        SamplingParams(temperature=5.0, seed=seed, ignore_eos=True) for seed in (1, 2, None, None)
    ]
    outputs = llm.generate(["Once"] * 4, hot, progress=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_every_token_is_drawn_anew(device: str) -> None:
    """So hot that all tokens are about as likely, whatever stands before them."""
    hot = SamplingParams(temperature=1000.0, seed=5, max_new_tokens=30, ignore_eos=True)
    assert len(set(one(small_llm(device), "Once", hot).token_ids)) > 20


# ------------------------------------------------------------------------------ interruptions


class Interrupter:
    """Raises at the n-th call of something, once."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def interrupt(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, where: str, error: BaseException, step: int = 3
) -> None:
    """Have a step break off: before anything, between two layers, or with everything stored."""
    interrupter = Interrupter(error, step)
    if where == "between layers":
        attend = AttentionBatch.attend

        def broken_attend(self: AttentionBatch, layer: int, *args: Any) -> Any:
            if layer == 1:
                interrupter.count()
            return attend(self, layer, *args)

        monkeypatch.setattr(AttentionBatch, "attend", broken_attend)
        return
    sessions = llm.engine.sessions
    extend = sessions.extend

    def broken_extend(each: Sequence[Any], counts: Any = None) -> Any:
        if where == "before":
            interrupter.count()
        logits = extend(each, counts)
        if where == "after":
            interrupter.count()
        return logits

    monkeypatch.setattr(sessions, "extend", broken_extend)


PLACES = ["before", "between layers", "after"]


@pytest.mark.parametrize("per_layer_kv", [False, True])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=repr)
def test_a_call_that_is_interrupted_leaves_nothing_behind(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    per_layer_kv: bool,
    error: BaseException,
) -> None:
    llm = small_llm(device, per_layer_kv=per_layer_kv, max_batch_size=3, resident_decode=False)
    for step in (1, 3):  # in a prompt's step, and in one of decoding
        interrupt(monkeypatch, llm, where, error, step)
        with pytest.raises(type(error)):
            llm.generate(TEXTS, greedy(), progress=False)
        monkeypatch.undo()
        assert not llm.engine.has_work
        for text, output in zip(TEXTS, llm.generate(TEXTS, greedy(), progress=False), strict=True):
            assert output.token_ids == by_transformers(device, text, 16)
        assert not llm.engine.has_work
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize("per_layer_kv", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_a_stream_survives_a_call_that_is_interrupted(
    device: str, monkeypatch: pytest.MonkeyPatch, where: str, per_layer_kv: bool
) -> None:
    llm = small_llm(device, per_layer_kv=per_layer_kv, resident_decode=False)
    stream = llm.stream(TEXTS[0], greedy())
    tokens = [next(stream).token_id]
    interrupt(monkeypatch, llm, where, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS[1], greedy(), progress=False)
    monkeypatch.undo()
    tokens += [update.token_id for update in stream]
    assert tokens == by_transformers(device, TEXTS[0], 16)
    assert_no_block_is_lost(llm)


# ------------------------------------------------------------------------------------ streams


def test_a_stream_is_generate_in_pieces(device: str) -> None:
    llm = small_llm(device)
    for text in TEXTS:
        updates = list(llm.stream(text, greedy(ignore_eos=True)))
        assert [update.token_id for update in updates] == by_transformers(device, text, 16)
        joined = "".join(update.text for update in updates)
        assert joined == one(llm, text, greedy(ignore_eos=True)).text
        assert updates[-1].request.finish_reason == "length"


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_leaving_a_stream_early_frees_what_it_held(device: str, taken: int) -> None:
    llm = small_llm(device)
    for at, update in enumerate(llm.stream(TEXTS[0], greedy()), 1):
        request = update.request
        if at == taken:
            break
    assert request.finish_reason == "cancelled"
    assert request.num_generated == taken
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)


def test_a_stream_nobody_reads_asks_for_nothing(device: str) -> None:
    llm = small_llm(device)
    stream = llm.stream(TEXTS[0], greedy())
    assert not llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work


def test_streams_in_turns(device: str) -> None:
    llm = small_llm(device)
    streams = [llm.stream(text, greedy()) for text in TEXTS[:3]]
    got: list[list[int | None]] = [[] for _ in streams]
    for _ in range(16):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream).token_id)
    assert [next(stream, None) for stream in streams] == [None] * 3
    assert got == [by_transformers(device, text, 16) for text in TEXTS[:3]]
    assert llm.engine.path_counts[EnginePath.BATCHED] > 10
    assert_no_block_is_lost(llm)


def test_a_stream_that_waits_misses_nothing(device: str) -> None:
    """The other runs to its end first, which takes this one along."""
    llm = small_llm(device)
    waits, runs = llm.stream(TEXTS[0], greedy(6)), llm.stream(TEXTS[1], greedy(12))
    tokens = [next(waits).token_id]
    assert [update.token_id for update in runs] == by_transformers(device, TEXTS[1], 12)
    tokens += [update.token_id for update in waits]
    assert tokens == by_transformers(device, TEXTS[0], 6)


def test_generate_within_the_loop_of_a_stream(device: str) -> None:
    llm = small_llm(device)
    tokens = []
    for update in llm.stream(TEXTS[0], greedy()):
        tokens.append(update.token_id)
        if len(tokens) in (1, 4):
            (output,) = llm.generate(TEXTS[1], greedy(6), progress=False)
            assert output.token_ids == by_transformers(device, TEXTS[1], 6)
    assert tokens == by_transformers(device, TEXTS[0], 16)
    assert_no_block_is_lost(llm)


def test_cancelled_once_is_cancelled_for_good(device: str) -> None:
    llm = small_llm(device)
    first, second = (llm.engine.submit(text, greedy()) for text in TEXTS[:2])
    llm.engine.step()
    for _ in range(2):
        llm.engine.cancel(first)
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.cancel(second)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
    assert second.token_ids == by_transformers(device, TEXTS[1], 16)
    assert llm.engine.path_counts[EnginePath.CANCELLED] == 1
    assert_no_block_is_lost(llm)
