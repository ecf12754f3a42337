"""Streamed detokenization by decoders of ``tokenizers``: the text of all tokens, or a rejection."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models
from transformers import PreTrainedTokenizerFast

from roseinfer import LLM, SamplingParams, tiny_gpt2
from roseinfer.text.completion_text import new_detokenizer_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = "\N{REPLACEMENT CHARACTER}"
PIECES = (
    *("<s>", "▁", "▁▁", "▁the", "a▁b", "a", "The", "s", "ab", "aab", "b", "\n", R, " ", "  ", ""),
    *("the</w>", "</w>", "x</w>y</w>", "</", "w>", "##s", "##", "##n't", "a##", "##.", "."),
    *("n't", "'", "'s", " ' ", "'re", "do not", " do", " not", "?", "<pad>", "a<pad>", "|", "a|b"),
    *("Ġa", "Ã", "©", "âĤ", "¬", "é", "好", "😀", "<0x+9>", "<0x4>", "<0xGG>", "<0xc3>"),
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in "aé€😀 ".encode() + b"\xff")
VOCABULARY = {text: at for at, text in enumerate(PIECES + BYTES)}
ADDED = ("<tool>", " spaced ", "é€", "▁added", "added</w>", AddedToken("<|end|>", special=True))
UNKNOWN = 1_000_000
"""Token beyond the vocabulary, as the padding of a model can have."""
TOKENS = (*range(len(VOCABULARY) + len(ADDED)), UNKNOWN)
RUNS = [
    [VOCABULARY[f"<0x{byte:02X}>"] for byte in run]
    for run in ("é".encode(), "€".encode(), "😀".encode(), b"a\xe2\x82", b"\xff", b"\xc3")
]
TAILS = [run[at:] for run in RUNS[:3] for at in range(1, len(run))]
TAILS.append([VOCABULARY["¬"]] * 2)
MODELS: dict[str, Callable[[], Any]] = {
    "WordLevel": lambda: models.WordLevel(VOCABULARY, unk_token="<s>"),
    "WordPiece": lambda: models.WordPiece(VOCABULARY, unk_token="<s>"),
    "BPE": lambda: models.BPE(VOCABULARY, []),
    "BPE with byte fallback": lambda: models.BPE(VOCABULARY, [], byte_fallback=True),
    "Unigram": lambda: models.Unigram([(text, -1.0) for text in VOCABULARY], 0, False),
    "Unigram with byte fallback": lambda: models.Unigram(
        [(text, -1.0) for text in VOCABULARY], 0, True
    ),
}


@cache
def build(model: str) -> Any:
    backend = tokenizers.Tokenizer(MODELS[model]())
    backend.add_tokens(list(ADDED))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def tokenizer_with(decoder: Any, model: str = "WordLevel") -> Any:
    tokenizer = build(model)
    tokenizer.backend_tokenizer.decoder = decoder
    return tokenizer


def decode_whole(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def outcome(decode: Any) -> str:
    """Return the text, or the name of the exception: some texts make the tokenizers panic."""
    try:
        return str(decode())
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f"raises {type(error).__name__}"


def common_prefix(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    same = (at for at in range(len(first) + 1) if not last.startswith(first[:at]))
    return first[: next(same, len(first) + 1) - 1]


def decode_streamed(tokenizer: Any, tokens: Sequence[int]) -> str:
    detokenizer = new_detokenizer_factory(tokenizer)()
    text = "".join([detokenizer.add(token) for token in tokens]) + detokenizer.flush()
    assert detokenizer.flush() == ""
    return text


TEXTS = st.sampled_from(["▁", "a", "ab", "aab", " ", "  ", "</w>", "##", "好", "", "'", "e"])
SINGLE = st.one_of(
    st.just(decoders.ByteLevel()),
    st.just(decoders.ByteFallback()),
    st.just(decoders.ByteFallback()),
    st.just(decoders.Fuse()),
    st.builds(decoders.BPEDecoder, st.sampled_from(["</w>", "b", "</"])),
    st.builds(decoders.WordPiece, st.sampled_from(["##", "a", ""]), st.booleans()),
    st.builds(decoders.Metaspace, st.just("▁"), st.sampled_from(["always", "never", "first"])),
    st.builds(decoders.CTC, st.sampled_from(["<pad>", "a"]), st.just("|"), st.booleans()),
    st.builds(decoders.Replace, TEXTS, TEXTS),
    st.builds(decoders.Replace, st.sampled_from([Regex("a+b?"), Regex("^ ")]), TEXTS),
    st.builds(decoders.Strip, st.sampled_from(" a▁"), st.integers(0, 3), st.integers(0, 1)),
)
ANY_DECODER = st.one_of(
    st.none(), SINGLE, st.lists(SINGLE, min_size=1, max_size=4).map(decoders.Sequence)
)
ANY_TOKENS = st.lists(
    st.sampled_from(TOKENS).map(lambda token: [token]) | st.sampled_from(RUNS), max_size=24
).map(lambda groups: [token for group in groups for token in group])


def is_unsupported(decoder: Any) -> bool:
    """Return True for decoders that may change text that was already streamed."""
    if not isinstance(decoder, decoders.Sequence):
        return False
    chain = json.loads(decoder.__getstate__())["decoders"]
    fused = False
    for each in chain:
        opaque = each["type"] in ("ByteLevel", "ByteFallback") or "Regex" in each.get("pattern", "")
        if fused and (opaque or each.get("pattern") == {"String": ""}):
            return True
        fused = fused or each["type"] in ("Fuse", "ByteLevel")
    return False


@settings(deadline=None, database=None, max_examples=150)
@example("BPE", decoders.Sequence([*[decoders.ByteLevel()] * 2, decoders.Strip(" ", 0, 1)]), [])
@given(model=st.sampled_from(sorted(MODELS)), decoder=ANY_DECODER, tokens=ANY_TOKENS)
def test_random_decoders_match_the_tokenizer(model: str, decoder: Any, tokens: list[int]) -> None:
    tokenizer = tokenizer_with(decoder, model)
    reasons: list[str] = []
    new_detokenizer_factory(tokenizer, reasons.append)
    assert bool(reasons) == is_unsupported(decoder)
    expected = outcome(partial(decode_whole, tokenizer, tokens))
    streamed = outcome(partial(decode_streamed, tokenizer, tokens))
    # Without a token, a stream may be empty where the tokenizer panics.
    panics = not tokens and expected.startswith("raises ")
    assert streamed == expected or (panics and not streamed)


LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
KNOWN_DECODERS: dict[str, Any] = {
    "none": None,
    "GPT-2": decoders.ByteLevel(),
    "Llama 2": LLAMA,
    "Gemma": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "T5": decoders.Metaspace(),
    "T5, legacy": decoders.Metaspace(prepend_scheme="first"),
    "Metaspace without a first space": decoders.Metaspace(prepend_scheme="never"),
    "BERT": decoders.WordPiece(),
    "BERT, uncleaned": decoders.WordPiece(cleanup=False),
    "GPT-1": decoders.BPEDecoder(),
    "wav2vec 2": decoders.CTC(),
    "wav2vec 2, uncleaned": decoders.CTC(cleanup=False),
    "byte fallback": decoders.ByteFallback(),
    "fused words": decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse()]),
    "fused bytes": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]
    ),
    "replaced when fused": decoders.Sequence([decoders.Fuse(), decoders.Replace("aab", "!")]),
    "stripped when fused": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 2)]),
    "stripped bytes": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("kind", KNOWN_DECODERS)
def test_known_decoders_match_the_tokenizer_for_every_token(kind: str) -> None:
    tokenizer = tokenizer_with(KNOWN_DECODERS[kind])
    for tokens in ([], [*TOKENS], *([first, last] for first in TOKENS for last in TOKENS[::7])):
        expected = outcome(partial(decode_whole, tokenizer, tokens))
        assert outcome(partial(decode_streamed, tokenizer, tokens)) == expected, tokens


@pytest.mark.sampled_cases
@pytest.mark.parametrize("kind", KNOWN_DECODERS)
def test_text_is_streamed_as_soon_as_no_token_can_change_it(kind: str) -> None:
    """The streamed text is the longest prefix shared by all possible continuations."""
    tokenizer = tokenizer_with(KNOWN_DECODERS[kind])
    continuations = [[], *([token] for token in TOKENS), *RUNS, *TAILS]

    @settings(deadline=None, database=None, max_examples=4)
    @given(ANY_TOKENS.filter(bool))
    @example([VOCABULARY[text] for text in ("aab", "a", "ab", "b")])
    def check(tokens: list[int]) -> None:
        detokenizer = new_detokenizer_factory(tokenizer)()
        streamed_text = ""
        for at, token in enumerate(tokens[:6], 1):
            streamed_text += detokenizer.add(token)
            futures = [
                outcome(partial(decode_whole, tokenizer, tokens[:at] + continuation))
                for continuation in continuations
            ]
            possible = [text for text in futures if not text.startswith("raises")]
            assert streamed_text == common_prefix(possible), tokens[:at]

    check()


def stream_pieces(tokenizer: Any, tokens_text: Sequence[str]) -> list[str]:
    detokenizer = new_detokenizer_factory(tokenizer)()
    return [*(detokenizer.add(VOCABULARY[token]) for token in tokens_text), detokenizer.flush()]


def test_run_of_byte_tokens_is_streamed_at_its_end() -> None:
    """One byte that is not text would replace the previous ones, too."""
    tokenizer = tokenizer_with(LLAMA)
    e_acute = ["<0xC3>", "<0xA9>"]
    assert stream_pieces(tokenizer, ["The", *e_acute, "s"]) == ["The", "", "", "és", ""]
    assert stream_pieces(tokenizer, ["The", *e_acute]) == ["The", "", "", "é"]
    assert stream_pieces(tokenizer, [*e_acute, "<0xFF>", "<0xC3>", "s"]) == [
        "",
        "",
        R * 3,
        R,
        "s",
        "",
    ]


class UppercaseDecoder:
    """Decoder in Python."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return ["".join(tokens).upper()]


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.Decoder.custom(UppercaseDecoder()), "a decoder in Python"),
        (
            decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
            "ByteLevel after",
        ),
        (
            decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
            "ByteFallback after",
        ),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "b")]),
            "Replace after",
        ),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Replace("", "b")]),
            "Replace of an empty text after",
        ),
    ],
)
def test_text_that_a_later_token_may_change_is_returned_at_its_end(
    decoder: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tiny_gpt2()
    tiny.tokenizer.backend_tokenizer.decoder = decoder
    llm = LLM(tiny.model, tokenizer=tiny.tokenizer, device="cpu", kv_cache_tokens=64)
    (line,) = caplog.messages
    assert line.startswith(
        "texts are shown, and searched for stop strings, at their end alone: the tokenizer has "
        f"{reason}"
    )
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    updates = [*llm.stream("a", params)]
    whole = tiny.tokenizer.decode([update.token_id for update in updates])
    assert [update.text for update in updates] == [*[""] * 5, whole]
