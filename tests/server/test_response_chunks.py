"""Responses built in chunks: the same bytes as at once, and turns for other tasks between."""

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
from tests.server.test_text_offsets import word_tokenizer

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


class RandomGeneration:
    """Random completions in place of a generation."""

    finished = False

    def __init__(
        self, rng: random.Random, body: Any, prompts: list[list[int]], max_tokens: int
    ) -> None:
        self.usage = Usage(7, 5, 3)
        self._body = body
        self._rng = rng
        self.vocabulary = max(map(max, [[1], *prompts])) + 1
        self.pieces = [
            self._piece(number, prompts[number // body.num_choices], rng.randint(0, max_tokens))
            for number in range(len(prompts) * body.num_choices)
        ]

    def _piece(self, number: int, prompt: list[int], count: int) -> ChoiceDelta:
        rng, params = self._rng, self._body.logprob_params(0)
        piece = ChoiceDelta(number, rng.choice(TEXTS), finish_reason=rng.choice(("stop", "length")))
        piece.tokens = [self._token() for _ in range(count)]
        if params.get("logprobs"):
            piece.logprobs = [-rng.expovariate(1) for _ in piece.tokens]
            tops = params.get("top_logprobs", 0)
            piece.top_logprobs = [
                [(self._token(), -rng.expovariate(1)) for _ in range(tops)]
                for _ in piece.tokens
                if tops
            ]
        if params.get("prompt_logprobs"):
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
        """Yield the first part of all choices, then the rest."""
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


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Reference:
    """Reference that builds the choices of a completion at once, each by itself."""

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


def reference_message(
    texts: TokenTexts, with_logprobs: bool
) -> Callable[[ChoiceDelta], dict[str, Any]]:
    def token_logprob(token: int, value: float) -> dict[str, Any]:
        return {"token": texts[token][0], "logprob": value, "bytes": texts[token][1]}

    def choice(piece: ChoiceDelta) -> dict[str, Any]:
        content = [
            token_logprob(token, value) | {"top_logprobs": [token_logprob(*each) for each in top]}
            for token, value, top in zip(
                piece.tokens,
                piece.logprobs,
                piece.top_logprobs or [[]] * len(piece.tokens),
                strict=with_logprobs,
            )
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": piece.text,
            "refusal": None,
            "annotations": [],
        }
        return {
            "index": piece.choice,
            "message": message,
            "logprobs": {"content": content, "refusal": None} if with_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    return choice


async def body_of(answer: ChoicesResponse) -> bytes:
    """Return the body that a client gets of a whole response."""
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
    return [tiny_gpt2().tokenizer, word_tokenizer()]


@pytest.fixture(params=[1, 7, 256])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the limits of slices to this size."""
    for module in (streaming, choices):
        monkeypatch.setattr(module, "LOGPROBS_PER_TURN", request.param)
        monkeypatch.setattr(module, "BYTES_PER_TURN", 100 * request.param)
    return int(request.param)


def draw_completion(
    rng: random.Random, tokenizer: Any, stream: bool
) -> tuple[CompletionBody, list[list[int]], list[str]]:
    vocabulary, texts = len(tokenizer), [text for text in TEXTS if text]
    prompts: list[Any] = [
        rng.choice(texts) * rng.randint(1, 3)
        if rng.random() < 0.5 and vocabulary > END
        else [rng.randrange(vocabulary) for _ in range(rng.randint(1, 20))]
        for _ in range(rng.randint(1, 3))
    ]
    options = {"n": rng.randint(1, 4), "logprobs": rng.choice((None, 0, 1, 5)), "stream": stream}
    options["echo"] = rng.random() < 0.7
    options["max_tokens"] = rng.choice((0, 9)) if options["echo"] else 9
    body = CompletionBody.model_validate(options | {"model": "tiny", "prompt": prompts})
    tokens = [tokenizer.encode(each) if isinstance(each, str) else each for each in prompts]
    echoed_texts = [each if isinstance(each, str) else tokenizer.decode(each) for each in prompts]
    return body, tokens, echoed_texts if options["echo"] else [""] * len(prompts)


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("stream", [False, True])
def test_completion_in_chunks_equals_the_one_built_at_once(
    stream: bool, tokenizers: list[Any]
) -> None:
    rng, echoes = random.Random(11), 0
    for at in range(60):
        tokenizer = tokenizers[at % 2]
        body, tokens, echoed = draw_completion(rng, tokenizer, stream)
        generation: Any = RandomGeneration(rng, body, tokens, 0 if body.prefill_only else 9)
        texts = TokenTexts(tokenizer)
        reference = Reference(body, texts, echoed)
        answer = Completion(body, generation, texts, echoed)
        echoes += any(each.echoed_tokens for each in generation.pieces)
        if stream:
            data = asyncio.run(events_of(answer))
            parts = [
                part
                for burst in generation.parts()
                for piece in burst
                if (part := reference.choice(piece)) is not None
            ]
            expected = [b"data: " + to_json(answer._head | {"choices": [each]}) for each in parts]
            assert data == b"\n\n".join([*expected, streaming.DONE])
        else:
            whole = answer._head | {"choices": [*map(reference.choice, generation.pieces)]}
            assert asyncio.run(body_of(answer)) == to_json(whole | {"usage": answer._usage()})
    assert echoes > 15


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("top_logprobs", [None, 0, 1, 20])
def test_chat_in_chunks_equals_the_one_built_at_once(
    top_logprobs: int | None, tokenizers: list[Any]
) -> None:
    rng = random.Random(12)
    for tokenizer in tokenizers * 4:
        options = {"n": rng.randint(1, 4), "logprobs": top_logprobs is not None}
        options |= {"top_logprobs": top_logprobs} if top_logprobs else {}
        messages = [{"role": "user", "content": "x"}]
        body = ChatBody.model_validate(options | {"model": "tiny", "messages": messages})
        generation: Any = RandomGeneration(rng, body, [[len(tokenizer) - 1]], 30)
        texts = TokenTexts(tokenizer)
        answer = ChatCompletion(body, generation, texts)
        choice = reference_message(texts, with_logprobs=top_logprobs is not None)
        whole = answer._head | {"choices": [*map(choice, generation.pieces)]}
        assert asyncio.run(body_of(answer)) == to_json(whole | {"usage": answer._usage()})


class Work:
    """Maximum amount of work between two turns of the event loop."""

    def __init__(self) -> None:
        self.turns = 0
        self.max_tokens: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self._now: Counter[str] = Counter()

    def add(self, kind: str, amount: int) -> None:
        self._now[kind] += amount
        self.total[kind] += amount
        self.max_tokens[kind] = max(self.max_tokens[kind], self._now[kind])

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


@pytest.mark.sampled_cases
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_event_loop_has_turns_while_a_large_response_is_built(
    name: str, stream: bool, tokenizers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logprobs of a prompt are also built only once for all its choices."""
    work, tokenizer, options = Work(), tokenizers[0], LARGE[name] | {"model": "tiny"}
    for module in (choices, streaming):
        for encoder in {"encode_any", "encode_finite"} & {*vars(module)}:
            monkeypatch.setattr(module, encoder, counted(getattr(module, encoder), work))
    texts, rng = CountedTexts(tokenizer, work), random.Random(13)
    answer: ChoicesResponse
    echoed = 0
    if name == "chats":
        chat = ChatBody.model_validate(options | {"logprobs": True})
        generation: Any = RandomGeneration(rng, chat, [[END]], 60)
        answer = ChatCompletion(chat, generation, texts)
    else:
        body = CompletionBody.model_validate(options)
        prompts = [each if isinstance(each, list) else [END] for each in body.prompt]
        generation = RandomGeneration(rng, body, prompts, 5 if body.echo else 40)
        echoed_texts = [tokenizer.decode(each) if body.echo else "" for each in prompts]
        echoed = sum(map(len, echoed_texts))
        answer = Completion(body, generation, texts, echoed_texts)

    async def build() -> None:
        async def send(message: Any) -> None:
            work.add("sent", len(message.get("body", b"")))

        turning = asyncio.ensure_future(work.count_turns())
        if stream:
            async for data in answer.events():
                work.add("sent", len(data))
        else:
            await send_json(send, await answer.json_parts())
        turning.cancel()

    asyncio.run(build())
    logprobs = echoed + sum(
        len(each.tokens) + sum(map(len, each.top_logprobs)) for each in generation.pieces
    )
    assert logprobs > 12 * streaming.LOGPROBS_PER_TURN
    assert work.turns > logprobs / streaming.LOGPROBS_PER_TURN / 2
    assert work.total["texts"] < 4 * logprobs
    assert work.max_tokens["texts"] < 8 * streaming.LOGPROBS_PER_TURN
    assert work.total["sent"] > 8 * streaming.BYTES_PER_TURN
    assert work.max_tokens["sent"] < 8 * streaming.BYTES_PER_TURN
    assert work.max_tokens["encoded"] < streaming.BYTES_PER_TURN


def counted(encode: Callable[[Any], str], work: Work) -> Callable[[Any], str]:
    def encode_and_count(value: Any) -> str:
        text = encode(value)
        work.add("encoded", len(text))
        return text

    return encode_and_count
