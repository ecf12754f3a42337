"""Check of the engine against transformers on one subject."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roseinfer import LLM, AppendPolicy, RoseinferError, SamplingParams
from roseinfer.kernels.runtime import unusable_reason
from roseinfer.models.families import fused_family
from tests.sweep.build import NotBuilt, build
from tests.sweep.compare import compare
from tests.sweep.outcome import Kind, Outcome
from tests.sweep.prompts import NEW_TOKENS, prompts, with_shared_prefix
from tests.sweep.reference import Reference

if TYPE_CHECKING:
    from roseinfer import RequestOutput
    from tests.sweep.subject import Subject

_HALVES = ("bfloat16", "float16")


class _Wrong(Exception):
    """The engine neither agreed nor refused."""


def check(subject: Subject) -> Outcome:
    """Build the subject, serve it, and compare every token with transformers'."""
    try:
        model = build(subject)
    except NotBuilt as error:
        return Outcome(Kind.NOT_BUILT, str(error))
    try:
        llm = _load(model, subject)
    except RoseinferError as error:
        return _refusal(model, error)
    except Exception as error:  # of any type, because only roseinfer's are refusals
        return Outcome(Kind.WRONG, f"{type(error).__name__}: {error}")
    try:
        outputs = _serve(llm, subject)
    except Exception as error:  # roseinfer's too, because it comes too late to be a refusal
        return Outcome(Kind.WRONG, f"when it ran, {type(error).__name__}: {error}")
    reference = Reference(model, subject.dtype)
    outcome = compare(outputs, reference)
    if outcome.kind is not Kind.AGREES:
        return outcome
    return _on_fused_kernels(model, subject, reference) or _in_halves(model, subject) or outcome


def _refusal(model: Any, error: RoseinferError) -> Outcome:
    """Return a refusal; one that names no class of the model's modules is wrong."""
    message = str(error)
    if any(type(module).__name__ in message for module in model.modules()):
        return Outcome(Kind.REFUSED, message)
    return Outcome(Kind.WRONG, f"without a name, {message}")


def _load(model: Any, subject: Subject, *, fused: bool = False) -> LLM:
    return LLM(
        deepcopy(model),
        device="cpu",
        dtype=subject.dtype,
        max_length=subject.max_length,
        block_size=4,
        kv_cache_tokens=400,
        max_batch_size=8,
        prefill_max_tokens=24,
        attention_backend="reference",
        append_policy=AppendPolicy(triton=False),
        resident_decode=True,
        fused_model=fused,
    )


def _serve(llm: LLM, subject: Subject) -> list[RequestOutput]:
    """Run prompts together; then again without logprobs, which residents do not have."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    tokens = prompts(subject.max_length)
    outputs = llm.generate(tokens, replace(greedy, logprobs=True), progress=False)
    outputs += llm.generate(with_shared_prefix(tokens), greedy, progress=False)
    for output in outputs:
        if output.error is not None or len(output.token_ids) != NEW_TOKENS:
            raise _Wrong(f"{output.finish_reason} after {output.token_ids}: {output.error}")
    return outputs


def _on_fused_kernels(model: Any, subject: Subject, reference: Reference) -> Outcome | None:
    """Return the error when fused kernels serve the model; None if there are none for it.

    Tests that compile kernels for a GPU have no interpreter, and cannot run kernels on a CPU.
    """
    if fused_family(model) is None or unusable_reason(model.device):
        return None
    try:
        outcome = compare(_serve(_load(model, subject, fused=True), subject), reference)
    except Exception as error:  # roseinfer's too, because its own modules served the model
        outcome = Outcome(Kind.WRONG, f"{type(error).__name__}: {error}")
    if outcome.kind is Kind.AGREES:
        return None
    return Outcome(Kind.WRONG, f"on fused kernels, {outcome.why}")


def _in_halves(model: Any, subject: Subject) -> Outcome | None:
    """Return the error or refusal when the model is loaded in 16 bits; None if it loads."""
    for dtype in _HALVES:
        try:
            _load(model, replace(subject, dtype=dtype))
        except RoseinferError as error:
            return Outcome(Kind.REFUSED, f"in {dtype} alone, {error}")
        except Exception as error:
            return Outcome(Kind.WRONG, f"in {dtype}, {type(error).__name__}: {error}")
    return None
