"""Answers are made in parts, of the same bytes as at once, and others have turns between them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import tiny_gpt2
from roseinfer.server import streaming
from roseinfer.server.generation import ChoiceDelta, Usage
from roseinfer.server.schemas import choices
from roseinfer.server.schemas.chat import ChatBody, ChatCompletion
from roseinfer.server.schemas.choices import TokenTexts
from roseinfer.server.schemas.completions import (
    Completion,
    CompletionBody,
    PromptOffsets,
    TextOffsets,
)
from roseinfer.server.streaming import send_json
from tests.server.test_text_offsets import tokenizer_of_words

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from roseinfer.server.schemas.choices import ChoicesResponse

TEXTS = (
    "Röslein",
    "玫瑰 🌹",
    'a "quoted" \\ word\n',
    "\N{REPLACEMENT CHARACTER}",
    "\x00\x7f\u2028",
    "",
)
END = 256


class Drawn:
    """A generation of random texts, with whose pieces an answer is made."""

    finished = False

    def __init__(self, rng: random.Random, body: Any, prompts: list[list[int]], most: int) -> None:
        self.usage = Usage(7, 5, 3)
        self._body = body
        self._rng = rng
        self.vocabulary = max(map(max, [[1], *prompts])) + 1
        self.pieces = [
            self._piece(number, prompts[number // body.num_choices], rng.randint(0, most))
            for number in range(len(prompts) * body.num_choices)
        ]

    def _piece(self, number: int, prompt: list[int], count: int) -> ChoiceDelta:
        rng, wanted = self._rng, self._body.logprob_params(0)
        piece = ChoiceDelta(number, rng.choice(TEXTS), finish_reason=rng.choice(("stop", "length")))
        piece.tokens = [self._token() for _ in range(count)]
        if wanted.get("logprobs"):
            piece.logprobs = [-rng.expovariate(1) for _ in piece.tokens]
            tops = wanted.get("top_logprobs", 0)
            piece.top_logprobs = [
                [(self._token(), -rng.expovariate(1)) for _ in range(tops)]
                for _ in piece.tokens
                if tops
            ]
        if wanted.get("prompt_logprobs"):
            values = random.Random(number // self._body.num_choices)
            piece.echoed_tokens = [(token, -values.expovariate(1)) for token in prompt]
            piece.echoed_tokens[0] = prompt[0], None
        return piece

    def _token(self) -> int:
        return self._rng.randrange(self.vocabulary)

    async def collect_choices(self) -> list[ChoiceDelta]:
        return self.pieces

    async def bursts(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        for burst in self.parts():
            yield burst
            self.finished = True

    def parts(self) -> Iterator[list[ChoiceDelta]]:
        """Yield what comes first of all choices, and then the rest of all."""
        for last in (False, True):
            yield [self._part(piece, last=last) for piece in self.pieces]

    @staticmethod
    def _part(piece: ChoiceDelta, *, last: bool) -> ChoiceDelta:
        cut = len(piece.tokens) // 3
        at = slice(cut, None) if last else slice(cut)
        return replace(
            piece,
            text="" if last else piece.text,
            tokens=piece.tokens[at],
            logprobs=piece.logprobs[at],
            top_logprobs=piece.top_logprobs[at],
            echoed_tokens=[] if last else piece.echoed_tokens,
            finish_reason=piece.finish_reason if last else None,
        )


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Plain:
    """Makes the choices of a completion at once, each by itself."""

    def __init__(self, body: CompletionBody, texts: TokenTexts, echoed: list[str]) -> None:
        self._body, self._texts, self._echoed = body, texts, echoed
        self._offsets: dict[int, TextOffsets] = {}

    def choice(self, piece: ChoiceDelta) -> dict[str, Any] | None:
        echoed = self._echoed[piece.choice // self._body.num_choices]
        before = "" if piece.choice in self._offsets else echoed
        offsets = self._offsets.setdefault(piece.choice, TextOffsets(self._texts, len(echoed)))
        logprobs = None
        if self._body.logprobs is not None:
            tokens = [token for token, _ in piece.echoed_tokens]
            values = [*(value for _, value in piece.echoed_tokens), *piece.logprobs]
            tops = [*([] for _ in tokens), *piece.top_logprobs]
            begins = PromptOffsets(self._texts, echoed).of(tokens) + offsets.of(piece.tokens)
            tokens += piece.tokens
            logprobs = {
                "tokens": [self._texts[token][0] for token in tokens],
                "token_logprobs": values,
                "top_logprobs": [
                    None
                    if value is None
                    else {self._texts[each][0]: own for each, own in (*top, (token, value))}
                    for token, value, top in zip(tokens, values, tops, strict=True)
                ]
                if self._body.logprobs
                else None,
                "text_offset": begins,
            }
        elif not (piece.text or before or piece.finish_reason):
            return None
        return {
            "index": piece.choice,
            "text": before + piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


def plain_message(texts: TokenTexts, wants: bool) -> Callable[[ChoiceDelta], dict[str, Any]]:
    def told(token: int, value: float) -> dict[str, Any]:
        return {"token": texts[token][0], "logprob": value, "bytes": texts[token][1]}

    def choice(piece: ChoiceDelta) -> dict[str, Any]:
        content = [
            told(token, value) | {"top_logprobs": [told(*each) for each in top]}
            for token, value, top in zip(
                piece.tokens,
                piece.logprobs,
                piece.top_logprobs or [[]] * len(piece.tokens),
                strict=wants,
            )
        ]
        said: dict[str, Any] = {
            "role": "assistant",
            "content": piece.text,
            "refusal": None,
            "annotations": [],
        }
        return {
            "index": piece.choice,
            "message": said,
            "logprobs": {"content": content, "refusal": None} if wants else None,
            "finish_reason": piece.finish_reason,
        }

    return choice


async def sent_of(answer: ChoicesResponse) -> bytes:
    """Return the body that a client gets of a whole answer."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await send_json(send, await answer.json_parts())
    start, *bodies = messages
    body = b"".join(each["body"] for each in bodies)
    assert start["headers"][0] == (b"content-length", str(len(body)).encode())
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]
    return body


async def events_of(answer: ChoicesResponse) -> bytes:
    return b"".join([data async for data in answer.events()])


@pytest.fixture(scope="module")
def tokenizers() -> list[Any]:
    return [tiny_gpt2().tokenizer, tokenizer_of_words()]


@pytest.fixture(params=[1, 7, 256])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have the limits of slices be so small."""
    for module in (streaming, choices):
        monkeypatch.setattr(module, "LOGPROBS_PER_TURN", request.param)
        monkeypatch.setattr(module, "BYTES_PER_TURN", 100 * request.param)
    return int(request.param)


def drawn_completion(
    rng: random.Random, tokenizer: Any, stream: bool
) -> tuple[CompletionBody, list[list[int]], list[str]]:
    vocabulary, texts = len(tokenizer), [text for text in TEXTS if text]
    given: list[Any] = [
        rng.choice(texts) * rng.randint(1, 3)
        if rng.random() < 0.5 and vocabulary > END
        else [rng.randrange(vocabulary) for _ in range(rng.randint(1, 20))]
        for _ in range(rng.randint(1, 3))
    ]
    asked = {"n": rng.randint(1, 4), "logprobs": rng.choice((None, 0, 1, 5)), "stream": stream}
    asked["echo"] = rng.random() < 0.7
    asked["max_tokens"] = rng.choice((0, 9)) if asked["echo"] else 9
    body = CompletionBody.model_validate(asked | {"model": "tiny", "prompt": given})
    tokens = [tokenizer.encode(each) if isinstance(each, str) else each for each in given]
    shown = [each if isinstance(each, str) else tokenizer.decode(each) for each in given]
    return body, tokens, shown if asked["echo"] else [""] * len(given)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_the_bytes_of_one_made_at_once(
    stream: bool, tokenizers: list[Any]
) -> None:
    rng, echoes = random.Random(11), 0
    for at in range(60):
        tokenizer = tokenizers[at % 2]
        body, tokens, echoed = drawn_completion(rng, tokenizer, stream)
        generation: Any = Drawn(rng, body, tokens, 0 if body.prefill_only else 9)
        texts = TokenTexts(tokenizer)
        plain = Plain(body, texts, echoed)
        answer = Completion(body, generation, texts, echoed)
        echoes += any(each.echoed_tokens for each in generation.pieces)
        if stream:
            found = asyncio.run(events_of(answer))
            parts = [
                part
                for burst in generation.parts()
                for piece in burst
                if (part := plain.choice(piece)) is not None
            ]
            due = [b"data: " + dumped(answer._head | {"choices": [each]}) for each in parts]
            assert found == b"\n\n".join([*due, streaming.DONE])
        else:
            whole = answer._head | {"choices": [*map(plain.choice, generation.pieces)]}
            assert asyncio.run(sent_of(answer)) == dumped(whole | {"usage": answer._usage()})
    assert echoes > 15


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("top_logprobs", [None, 0, 1, 20])
def test_a_chat_has_the_bytes_of_one_made_at_once(
    top_logprobs: int | None, tokenizers: list[Any]
) -> None:
    rng = random.Random(12)
    for tokenizer in tokenizers * 4:
        asked = {"n": rng.randint(1, 4), "logprobs": top_logprobs is not None}
        asked |= {"top_logprobs": top_logprobs} if top_logprobs else {}
        messages = [{"role": "user", "content": "x"}]
        body = ChatBody.model_validate(asked | {"model": "tiny", "messages": messages})
        generation: Any = Drawn(rng, body, [[len(tokenizer) - 1]], 30)
        texts = TokenTexts(tokenizer)
        answer = ChatCompletion(body, generation, texts)
        choice = plain_message(texts, wants=top_logprobs is not None)
        whole = answer._head | {"choices": [*map(choice, generation.pieces)]}
        assert asyncio.run(sent_of(answer)) == dumped(whole | {"usage": answer._usage()})


class Work:
    """What is done between two turns of the loop, at the most."""

    def __init__(self) -> None:
        self.turns = 0
        self.most: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self._now: Counter[str] = Counter()

    def add(self, kind: str, amount: int) -> None:
        self._now[kind] += amount
        self.total[kind] += amount
        self.most[kind] = max(self.most[kind], self._now[kind])

    async def count_turns(self) -> None:
        while True:
            self.turns += 1
            self._now.clear()
            await asyncio.sleep(0)


class CountedTexts(TokenTexts):
    def __init__(self, tokenizer: Any, work: Work) -> None:
        super().__init__(tokenizer)
        self._work = work

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        self._work.add("texts", 1)
        return super().__getitem__(token)


ECHO = {"echo": True, "max_tokens": 5}
LARGE: dict[str, dict[str, Any]] = {
    "a prompt": {"prompt": [[5] * 4000], "logprobs": 1, "n": 128} | ECHO,
    "many prompts": {"prompt": [[5] * 100] * 40, "logprobs": 0, "n": 16} | ECHO,
    "texts": {"prompt": "x", "logprobs": 5, "n": 128},
    "chats": {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 20, "n": 64},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_others_have_turns_while_a_large_answer_is_made(
    name: str, stream: bool, tokenizers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is told of a prompt is made once for all its choices."""
    work, tokenizer, asked = Work(), tokenizers[0], LARGE[name] | {"model": "tiny"}
    for module in (choices, streaming):
        for encoder in {"encode_any", "encode_finite"} & {*vars(module)}:
            monkeypatch.setattr(module, encoder, counted(getattr(module, encoder), work))
    texts, rng = CountedTexts(tokenizer, work), random.Random(13)
    answer: ChoicesResponse
    echoed = 0
    if name == "chats":
        chat = ChatBody.model_validate(asked | {"logprobs": True})
        drawn: Any = Drawn(rng, chat, [[END]], 60)
        answer = ChatCompletion(chat, drawn, texts)
    else:
        body = CompletionBody.model_validate(asked)
        prompts = [each if isinstance(each, list) else [END] for each in body.prompt]
        drawn = Drawn(rng, body, prompts, 5 if body.echo else 40)
        shown = [tokenizer.decode(each) if body.echo else "" for each in prompts]
        echoed = sum(map(len, shown))
        answer = Completion(body, drawn, texts, shown)

    async def made() -> None:
        async def send(message: Any) -> None:
            work.add("sent", len(message.get("body", b"")))

        turning = asyncio.ensure_future(work.count_turns())
        if stream:
            async for data in answer.events():
                work.add("sent", len(data))
        else:
            await send_json(send, await answer.json_parts())
        turning.cancel()

    asyncio.run(made())
    logprobs = echoed + sum(
        len(each.tokens) + sum(map(len, each.top_logprobs)) for each in drawn.pieces
    )
    assert logprobs > 12 * streaming.LOGPROBS_PER_TURN
    assert work.turns > logprobs / streaming.LOGPROBS_PER_TURN / 2
    assert work.total["texts"] < 4 * logprobs
    assert work.most["texts"] < 8 * streaming.LOGPROBS_PER_TURN
    assert work.total["sent"] > 8 * streaming.BYTES_PER_TURN
    assert work.most["sent"] < 8 * streaming.BYTES_PER_TURN
    assert work.most["encoded"] < streaming.BYTES_PER_TURN


def counted(encode: Callable[[Any], str], work: Work) -> Callable[[Any], str]:
    def encode_and_count(value: Any) -> str:
        text = encode(value)
        work.add("encoded", len(text))
        return text

    return encode_and_count
