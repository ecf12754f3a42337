"""Output deltas: merged updates, and their form on the wire."""

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

PARAMS = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=9, logprobs=True),
    SamplingParams(max_new_tokens=9, top_logprobs=3, prompt_logprobs=True),
]


def updates_of(params: SamplingParams) -> list[Update]:
    return [*LLM("tiny", device="cpu").stream("Once", params)]


def merge_updates(updates: list[Update]) -> OutputDelta:
    part = OutputDelta()
    for update in updates:
        part.add(update)
    part.set_prefill_stats(updates[0].request)
    return part


def test_merged_delta_has_all_data_of_its_updates() -> None:
    for params in PARAMS:
        updates = updates_of(params)
        part, request = merge_updates(updates), updates[0].request
        assert part.count == len(updates)
        assert part.tokens == request.token_ids
        assert part.text == "".join(update.text for update in updates)
        assert part.logprobs == request.logprobs
        assert part.top_logprobs == request.top_logprobs
        assert part.prefill_stats is not None
        assert part.prefill_stats.logprobs == request.prompt_logprobs
        assert part.prefill_stats.queued_s >= 0 < part.prefill_stats.prefill_s
        assert (part.finish_reason, part.is_final) == ("length", True)


def test_pickled_deltas_extend_to_the_merged_one() -> None:
    rng = random.Random(3)
    for params in PARAMS * 5:
        updates = updates_of(params)
        whole = OutputDelta()
        cuts = sorted(rng.sample(range(1, len(updates)), 3))
        for first, end in zip([0, *cuts], [*cuts, None], strict=True):
            part = OutputDelta()
            for update in updates[first:end]:
                part.add(update)
            if not first:
                part.set_prefill_stats(update.request)
            whole.extend(OutputDelta(*pickle.loads(pickle.dumps(part.to_tuple()))))
        assert whole == merge_updates(updates)


def test_error_of_a_delta_keeps_its_tokens() -> None:
    (first, *_) = updates_of(PARAMS[1])
    part = OutputDelta()
    part.add(first)
    part.error = StepFailed(MemoryError("no room"))
    unpickled = OutputDelta(*pickle.loads(pickle.dumps(part.to_tuple())))
    assert unpickled.tokens == [first.token_id]
    assert str(unpickled.error) == str(part.error)
    assert unpickled.is_final


def test_messages_are_decoded_from_bytes_cut_anywhere() -> None:
    rng = random.Random(3)
    messages: list[Any] = [[rng.randrange(1000)] * rng.randrange(300) for _ in range(50)]
    data = b"".join(map(frame_message, messages))
    frames = MessageDecoder()
    decoded: list[Any] = []
    while data:
        size = rng.randrange(1, 700)
        decoded += frames.feed(data[:size])
        data = data[size:]
    assert decoded == messages
