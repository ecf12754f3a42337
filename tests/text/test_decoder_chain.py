"""Text by any model and decoders of ``tokenizers``: what these make of all tokens, or a refusal."""

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

from roseinfer import LLM, UnsupportedModel, tiny_gpt2
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
"""Beyond the vocabulary, as the padding of a model's own can be."""
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
def made(model: str) -> Any:
    backend = tokenizers.Tokenizer(MODELS[model]())
    backend.add_tokens(list(ADDED))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def tokenizer_with(decoder: Any, model: str = "WordLevel") -> Any:
    tokenizer = made(model)
    tokenizer.backend_tokenizer.decoder = decoder
    return tokenizer


def whole(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def outcome(decoded: Any) -> str:
    """The text, or the name of what was raised: some texts make the tokenizers panic."""
    try:
        return str(decoded())
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f"raises {type(error).__name__}"


def shared_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    same = (at for at in range(len(first) + 1) if not last.startswith(first[:at]))
    return first[: next(same, len(first) + 1) - 1]


def streamed(tokenizer: Any, tokens: Sequence[int]) -> str:
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


def refusable(decoder: Any) -> bool:
    """Whether a decoder is one of those that may change all of a text that was shown."""
    if not isinstance(decoder, decoders.Sequence):
        return False
    chain = json.loads(decoder.__getstate__())["decoders"]
    joined = False
    for each in chain:
        opaque = each["type"] in ("ByteLevel", "ByteFallback") or "Regex" in each.get("pattern", "")
        if joined and (opaque or each.get("pattern") == {"String": ""}):
            return True
        joined = joined or each["type"] in ("Fuse", "ByteLevel")
    return False


@settings(deadline=None, database=None, max_examples=150)
@given(model=st.sampled_from(sorted(MODELS)), decoder=ANY_DECODER, tokens=ANY_TOKENS)
def test_any_decoder(model: str, decoder: Any, tokens: list[int]) -> None:
    tokenizer = tokenizer_with(decoder, model)
    if refusable(decoder):
        with pytest.raises(UnsupportedModel, match="the tokenizer has"):
            new_detokenizer_factory(tokenizer)
        return
    expected = outcome(partial(whole, tokenizer, tokens))
    assert outcome(partial(streamed, tokenizer, tokens)) == expected


LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
KNOWN: dict[str, Any] = {
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
    "BERT, as it is written": decoders.WordPiece(cleanup=False),
    "GPT-1": decoders.BPEDecoder(),
    "wav2vec 2": decoders.CTC(),
    "wav2vec 2, as it is written": decoders.CTC(cleanup=False),
    "byte fallback": decoders.ByteFallback(),
    "fused words": decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse()]),
    "fused bytes": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]
    ),
    "replaced when fused": decoders.Sequence([decoders.Fuse(), decoders.Replace("aab", "!")]),
    "stripped when fused": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 2)]),
    "stripped bytes": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_known_decoders_at_every_token(kind: str) -> None:
    tokenizer = tokenizer_with(KNOWN[kind])
    for tokens in ([], [*TOKENS], *([first, last] for first in TOKENS for last in TOKENS[::7])):
        expected = outcome(partial(whole, tokenizer, tokens))
        assert outcome(partial(streamed, tokenizer, tokens)) == expected, tokens


@pytest.mark.parametrize("kind", KNOWN)
def test_text_comes_as_soon_as_no_token_can_change_it(kind: str) -> None:
    """What was shown is the longest beginning that all texts share which may come of the tokens."""
    tokenizer = tokenizer_with(KNOWN[kind])
    ways = [[], *([token] for token in TOKENS), *RUNS, *TAILS]

    @settings(deadline=None, database=None, max_examples=4)
    @given(ANY_TOKENS.filter(bool))
    @example([VOCABULARY[text] for text in ("aab", "a", "ab", "b")])
    def check(tokens: list[int]) -> None:
        detokenizer = new_detokenizer_factory(tokenizer)()
        shown = ""
        for at, token in enumerate(tokens[:6], 1):
            shown += detokenizer.add(token)
            futures = [outcome(partial(whole, tokenizer, tokens[:at] + way)) for way in ways]
            possible = [text for text in futures if not text.startswith("raises")]
            assert shown == shared_beginning(possible), tokens[:at]

    check()


def pieces(tokenizer: Any, written: Sequence[str]) -> list[str]:
    detokenizer = new_detokenizer_factory(tokenizer)()
    return [*(detokenizer.add(VOCABULARY[token]) for token in written), detokenizer.flush()]


def test_a_run_of_byte_tokens_comes_when_it_ends() -> None:
    """One byte that is no text would replace those before it too."""
    tokenizer = tokenizer_with(LLAMA)
    e_acute = ["<0xC3>", "<0xA9>"]
    assert pieces(tokenizer, ["The", *e_acute, "s"]) == ["The", "", "", "és", ""]
    assert pieces(tokenizer, ["The", *e_acute]) == ["The", "", "", "é"]
    assert pieces(tokenizer, [*e_acute, "<0xFF>", "<0xC3>", "s"]) == ["", "", R * 3, R, "s", ""]


class Shouts:
    """A decoder in Python."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return ["".join(tokens).upper()]


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        (decoders.Decoder.custom(Shouts()), "a decoder in Python"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), "ByteLevel after"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]), "ByteFallback after"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "b")]), "Replace after"),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Replace("", "b")]),
            "Replace of an empty text after",
        ),
    ],
)
def test_a_decoder_that_may_change_all_of_a_text_is_refused_by_name(
    decoder: Any, said: str
) -> None:
    tiny = tiny_gpt2()
    tiny.tokenizer.backend_tokenizer.decoder = decoder
    with pytest.raises(UnsupportedModel, match=f"the tokenizer has {said}"):
        LLM(tiny.model, tokenizer=tiny.tokenizer, device="cpu", kv_cache_tokens=64)
