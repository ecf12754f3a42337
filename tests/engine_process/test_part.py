"""Parts: several updates as one, and the same on the other side of a wire."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

from roseinfer import LLM, SamplingParams
from roseinfer.engine_client.protocol import Part
from roseinfer.engine_client.subprocess_client import Frames, framed
from roseinfer.errors import StepFailed

if TYPE_CHECKING:
    from roseinfer.engine.engine import Update

ASKED = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=9, logprobs=True),
    SamplingParams(max_new_tokens=9, top_logprobs=3, prompt_logprobs=True),
]


def updates_of(params: SamplingParams) -> list[Update]:
    return [*LLM("tiny", device="cpu").stream("Once", params)]


def merged(updates: list[Update]) -> Part:
    part = Part()
    for update in updates:
        part.add(update)
    part.begin(updates[0].request)
    return part


def test_a_part_says_all_that_its_updates_say() -> None:
    for params in ASKED:
        updates = updates_of(params)
        part, request = merged(updates), updates[0].request
        assert part.count == len(updates)
        assert part.tokens == request.token_ids
        assert part.text == "".join(update.text for update in updates)
        assert part.logprobs == request.logprobs
        assert part.likeliest == request.top_logprobs
        assert part.start is not None
        assert part.start.logprobs == request.prompt_logprobs
        assert part.start.queued_s >= 0 < part.start.prefill_s
        assert (part.finish_reason, part.last) == ("length", True)


def test_it_is_the_same_when_it_comes_in_pieces_and_packed() -> None:
    rng = random.Random(3)
    for params in ASKED * 5:
        updates = updates_of(params)
        whole = Part()
        cuts = sorted(rng.sample(range(1, len(updates)), 3))
        for first, end in zip([0, *cuts], [*cuts, None], strict=True):
            part = Part()
            for update in updates[first:end]:
                part.add(update)
            if not first:
                part.begin(update.request)
            whole.extend(Part(*pickle.loads(pickle.dumps(part.packed()))))
        assert whole == merged(updates)


def test_an_error_comes_with_what_was_written_before() -> None:
    (first, *_) = updates_of(ASKED[1])
    part = Part()
    part.add(first)
    part.error = StepFailed(MemoryError("no room"))
    read = Part(*pickle.loads(pickle.dumps(part.packed())))
    assert read.tokens == [first.token_id]
    assert str(read.error) == str(part.error)
    assert read.last


def test_messages_come_out_as_they_went_in_however_bytes_are_cut() -> None:
    rng = random.Random(3)
    messages: list[Any] = [[rng.randrange(1000)] * rng.randrange(300) for _ in range(50)]
    data = b"".join(map(framed, messages))
    frames = Frames()
    found: list[Any] = []
    while data:
        size = rng.randrange(1, 700)
        found += frames.feed(data[:size])
        data = data[size:]
    assert found == messages
