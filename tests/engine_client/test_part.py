"""Parts: several updates as one, and the same on the other side of a wire."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

from roseinfer import LLM, SamplingParams
from roseinfer.engine_client.protocol import OutputDelta
from roseinfer.engine_client.subprocess_client import MessageDecoder, frame_message
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


def merged(updates: list[Update]) -> OutputDelta:
    part = OutputDelta()
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
        assert part.top_logprobs == request.top_logprobs
        assert part.prefill_stats is not None
        assert part.prefill_stats.logprobs == request.prompt_logprobs
        assert part.prefill_stats.queued_s >= 0 < part.prefill_stats.prefill_s
        assert (part.finish_reason, part.is_final) == ("length", True)


def test_it_is_the_same_when_it_comes_in_pieces_and_packed() -> None:
    rng = random.Random(3)
    for params in ASKED * 5:
        updates = updates_of(params)
        whole = OutputDelta()
        cuts = sorted(rng.sample(range(1, len(updates)), 3))
        for first, end in zip([0, *cuts], [*cuts, None], strict=True):
            part = OutputDelta()
            for update in updates[first:end]:
                part.add(update)
            if not first:
                part.begin(update.request)
            whole.extend(OutputDelta(*pickle.loads(pickle.dumps(part.to_tuple()))))
        assert whole == merged(updates)


def test_an_error_comes_with_what_was_written_before() -> None:
    (first, *_) = updates_of(ASKED[1])
    part = OutputDelta()
    part.add(first)
    part.error = StepFailed(MemoryError("no room"))
    read = OutputDelta(*pickle.loads(pickle.dumps(part.to_tuple())))
    assert read.tokens == [first.token_id]
    assert str(read.error) == str(part.error)
    assert read.is_final


def test_messages_come_out_as_they_went_in_however_bytes_are_cut() -> None:
    rng = random.Random(3)
    messages: list[Any] = [[rng.randrange(1000)] * rng.randrange(300) for _ in range(50)]
    data = b"".join(map(frame_message, messages))
    frames = MessageDecoder()
    found: list[Any] = []
    while data:
        size = rng.randrange(1, 700)
        found += frames.feed(data[:size])
        data = data[size:]
    assert found == messages
