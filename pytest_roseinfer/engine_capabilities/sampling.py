"""Sampling: the tokens that a request gets alone, and those that its parameters allow.

What an engine may choose is computed in numpy from a model's logits and nothing else. The order is
that of transformers: repetition penalty, temperature, top-k, top-p, min-p. OpenAI's two penalties
come right after the first, as in vLLM, and then the adjustments of other capabilities.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.answers import (
    are_floats,
    are_tokens,
    floats,
    is_truth,
    returns,
)
from pytest_roseinfer.capabilities.capability import Traits, optional
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    RequestCore,
    SamplingCore,
    capabilities_of_fields,
    change,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import Floats, ServedRequest

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
else:
    from pytest_roseinfer.capabilities import numpy as np
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True)
class SamplingFields(SamplingCore):
    """The parameters by which tokens are chosen."""

    temperature: float = 0.0
    """Divisor of the logits; 0 takes the argmax."""
    top_k: int = 0
    """Number of tokens of the highest logits that may be chosen; 0 for all."""
    top_p: float = 1.0
    """Probability of the nucleus: the fewest tokens that have it together may be chosen."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits of tokens before, and factor of the negative ones."""
    seed: int = 0
    """Seed of the tokens that are drawn."""
    min_p: float = 0.0
    """Part of the top probability; tokens below it are dropped."""
    presence_penalty: float = 0.0
    """Number that is subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Number that is subtracted from it for each time that the token was generated."""


@dataclass(frozen=True, kw_only=True)
class EarlyEndFields(RequestCore):
    """The end of a request by the model itself."""

    ends_early: bool = False
    """True if its seed is the next one with which the model ends the text before the last token."""


@dataclass(frozen=True)
class SamplingTraits(Traits):
    """The parameters that an engine takes."""

    greedy_only: bool = False
    """True if every request gets the argmax of the logits, so that nothing but its length and
    ``ignore_eos`` is drawn; ``logits`` will then do for ``generate_alone``."""
    min_p: bool = False
    """True if requests may set ``min_p``."""
    presence_and_frequency: bool = False
    """True if requests may set ``presence_penalty`` and ``frequency_penalty``."""


class SamplingMethods:
    """The methods that say which tokens are right."""

    sampling: ClassVar[SamplingTraits] = SamplingTraits()
    """Parameters that it takes."""
    eos_token: ClassVar[int | None] = None
    """Token that ends a text, for an adapter without an ``generate_alone`` of its own; None if none
    does."""
    rounding: ClassVar[float] = 3e-5
    """Difference between the engine's logits and ``logits``, at most, relative to the largest."""

    @optional
    @returns(are_tokens, "a list of tokens")
    def generate_alone(self: Any, prompt: Sequence[int], sampling: Any, mix: Any) -> list[int]:
        """Return what the slow twin generates: this request alone, on no fast path.

        Only where ``sampling.greedy_only`` is True may it be left out: then each token is the
        argmax of ``logits``. It gets no ``stop`` that was drawn: the harness cuts what it returns
        after the token that completes a stop string.
        """
        new: list[int] = []
        goes_on = sampling.ignore_eos
        while len(new) < sampling.max_new_tokens and (goes_on or self.eos_token not in new):
            logits = self.logits([*prompt, *new], mix)
            new.append(max(range(len(logits)), key=logits.__getitem__))
        return new

    @optional
    @returns(is_truth, "True or False")
    def is_near_tie(self: Any, tokens: Sequence[int], sampling: Any, mix: Any) -> bool:  # noqa: ARG002
        """Return True if rounding could change the token after these.

        It is called where a token differs from ``generate_alone``; if True, the rest of that
        request is not compared with it. Where ``sampling.greedy_only`` is True it may be left out:
        then two logits within ``rounding`` could be swapped.
        """
        if not (self.sampling.greedy_only and self.defines("logits")):
            return False
        *_, second, first = sorted(logits := self.logits(tokens, mix))
        return bool(first - second < 2 * self.rounding * max(map(abs, logits)))

    @optional
    @returns(
        are_floats,
        "a list of numbers, one for each token, of which there are {least} or more",
        least="vocabulary",
    )
    def logits(self, tokens: Sequence[int], mix: Any) -> Sequence[float]:
        """Return the logits of the token after these, by the model alone.

        Each token of a request must then be one that its parameters allow, by a sampling of the
        harness's own.
        """


# The twin of sampling.


_SUM_ERROR = 1e-6
"""Error of a sum of probabilities in 32 bits."""


def log_probabilities(logits: Floats) -> Floats:
    """Return the logarithm of each token's probability by the model alone."""
    below = logits - logits.max()
    shifted: Floats = below - np.log(np.exp(below).sum())
    return shifted


def distribution(logits: Floats, sampling: Any, tokens: Sequence[int], prompted: int) -> Floats:
    """Return the log-probability that each token is drawn with; -infinity for one that is not."""
    scaled = _scaled(logits, sampling, tokens, prompted)
    kept = _kept(scaled, sampling, room=0.0)
    if sampling.temperature == 0:
        kept = np.arange(len(scaled)) == scaled.argmax()  # the first of several
    return log_probabilities(np.where(kept, scaled, -np.inf))


def may_be_chosen(
    logits: Floats, sampling: Any, tokens: Sequence[int], prompted: int, rounding: float
) -> Mask:
    """Mark the tokens that may come after ``tokens``, the first of which are the prompt.

    The engine's logits may differ from these by ``rounding`` times the largest, so a token that
    is as close to a bound may lie on either side of it. Of tokens that tie, each may be chosen.
    """
    scaled = _scaled(logits, sampling, tokens, prompted)
    return _kept(scaled, sampling, room=2 * rounding * float(np.abs(scaled).max()))


def _scaled(logits: Floats, sampling: Any, tokens: Sequence[int], prompted: int) -> Floats:
    """Adjust logits as each capability does, and divide them by the temperature."""
    scaled = np.array(logits, dtype=np.float64)
    for capability in capabilities_of_fields(type(sampling)):
        if capability.adjust:
            scaled = capability.adjust(scaled, sampling, tokens, prompted)
    divided: Floats = scaled / (sampling.temperature or 1.0)
    return divided


def penalise(
    logits: Floats,
    sampling: SamplingFields,
    tokens: Sequence[int],
    prompted: int,
) -> Floats:
    """Return logits that are lower for tokens before, the first of which are the prompt."""
    logits, before = logits.copy(), np.unique(np.asarray(tokens, dtype=np.int64))
    penalty = sampling.repetition_penalty
    logits[before] = np.where(
        logits[before] > 0, logits[before] / penalty, logits[before] * penalty
    )
    for token, count in Counter(tokens[prompted:]).items():
        logits[token] -= sampling.presence_penalty
        logits[token] -= count * sampling.frequency_penalty
    return logits


def _kept(scaled: Floats, sampling: SamplingFields, *, room: float) -> Mask:
    """Mark the tokens that no bound excludes, by ``room`` or more; the argmax always stays."""
    argmax: Mask = scaled >= scaled.max() - room
    if sampling.temperature == 0:
        return argmax
    kept: Mask = np.ones(len(scaled), dtype=np.bool_)
    if 0 < sampling.top_k < len(scaled):
        kept = scaled >= np.sort(scaled)[-sampling.top_k] - room
    if sampling.top_p < 1:
        kept &= _within_top_p(np.where(kept, scaled, -np.inf), sampling.top_p, room)
    if sampling.min_p > 0:
        kept &= scaled >= scaled.max() + np.log(sampling.min_p) - room
    kept |= argmax
    return kept


def _within_top_p(scaled: Floats, top_p: float, room: float) -> Mask:
    """Mark the tokens of the nucleus.

    Of tokens that are as likely but for rounding, any may come first.
    """
    descending = np.sort(scaled)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(np.exp(log_probabilities(descending)))])
    clearly_above = np.searchsorted(-descending, -(scaled + room), side="left")
    slack = _SUM_ERROR if room else 0.0
    within: Mask = sums[clearly_above] * np.exp(-2 * room) - slack < top_p
    return within


def logits_of(adapter: Any, tokens: Sequence[int], mix: Any) -> Floats:
    """Return the logits of the token after these, by the adapter's model."""
    return floats(adapter.logits(tokens, mix))


class ChosenTokens(MixObserver):
    """Holds each token to those that the parameters of its request allow."""

    any_of = ("logits",)

    def judge(self, served: ServedRequest) -> str:
        prompt, sampling = served.spec.prompt, served.spec.sampling
        for at in served.new_tokens:
            before, token = [*prompt, *served.tokens[:at]], served.tokens[at]
            logits = logits_of(self.run.adapter, before, self.run.mix)
            rounding = self.run.adapter.rounding
            allowed = may_be_chosen(logits, sampling, before, len(prompt), rounding)
            if not (0 <= token < len(allowed) and allowed[token]):
                choices = np.flatnonzero(allowed).tolist()
                return (
                    f"{served.name}, token {at}: {token}, which its parameters rule out: "
                    f"they allow {choices}"
                )
        return ""


# Drawing requests, describing them, and settling their seeds.


HOTTEST = 30.0
"""Temperature at which unlikely tokens are drawn too, since nothing leaves them out."""
_NUCLEI = ((0, 1.0), (1, 1.0), (5, 1.0), (5, 0.8), (0, 0.8))
"""Pairs of top-k and top-p."""
_PENALTIES: tuple[dict[str, float], ...] = (
    *({},) * 6,
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"presence_penalty": -1.0, "frequency_penalty": 2.0},
)
_SEEDS = 24
"""Seeds that are tried for one with which a text ends early."""


def draw_parameters(draw: st.DrawFn, most: int) -> dict[str, Any]:
    """Draw the parameters of a request that gets up to ``most`` tokens."""
    temperature = draw(st.sampled_from((0.0, 0.0, 1.0, 3.0, HOTTEST)))
    top_k, top_p = draw(st.sampled_from(_NUCLEI)) if temperature < HOTTEST else (0, 1.0)
    return {
        # With one new token, the blocks of the prompt alone are left.
        "max_new_tokens": draw(st.one_of(st.just(1), st.integers(1, most))),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": draw(st.sampled_from((1.0, 1.0, 1.5, 4.0))),
        "seed": draw(st.integers(0, 3)),
        "ignore_eos": draw(st.booleans()),
    }


def draw_more(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    """Add the parameters that only some engines take."""
    if adapter.sampling.min_p and 0 < spec.sampling.temperature < HOTTEST:
        spec = change(spec, min_p=draw(st.sampled_from((0.0, 0.05, 0.4))))
    if adapter.sampling.presence_and_frequency:
        spec = change(spec, **draw(st.sampled_from(_PENALTIES)))
    return spec


def restrict_to_greedy(adapter: type[Any], spec: Any) -> Any:
    """Return a greedy request, for an engine that takes no other."""
    if not adapter.sampling.greedy_only:
        return spec
    greedy = {name: getattr(SamplingFields, name) for name in get_annotations(SamplingFields)}
    return change(spec, ends_early=False, **greedy)


def words(spec: Any) -> Iterator[str]:
    sampling: SamplingFields = spec.sampling
    if sampling.temperature:
        yield f"drawn at temperature {sampling.temperature} from seed {sampling.seed}"
    if sampling.top_k > 0:
        yield f"top_k {sampling.top_k}"
    if sampling.top_p < 1:
        yield f"top_p {sampling.top_p}"
    if sampling.repetition_penalty != 1:
        yield f"repetition penalty {sampling.repetition_penalty}"
    if sampling.min_p > 0:
        yield f"min_p {sampling.min_p}"
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, name):
            yield f"{name.replace('_', ' ')} {value}"
    if spec.ends_early:
        yield "with the next seed that ends the text early"


def settle_seed(adapter: Any, spec: Any, expected: list[int], mix: Any) -> tuple[Any, list[int]]:
    """Take the next seed with which the text ends early, where a request is to have one."""
    for _ in range(_SEEDS if spec.ends_early else 0):
        if 1 < len(expected) < spec.sampling.max_new_tokens:
            break
        spec = change(spec, seed=spec.sampling.seed + 1)
        expected = [*adapter.generate_alone(spec.prompt, spec.sampling, mix)]
    return change(spec, ends_early=False), expected


def refuse_no_twin(adapter: type[Any]) -> None:
    by_logits = "logits" in adapter.abilities and adapter.sampling.greedy_only
    if not by_logits and "generate_alone" not in adapter.abilities:
        raise TypeError(
            f"{adapter.__name__} must define generate_alone, or logits where "
            "sampling.greedy_only is True"
        )


SAMPLING = EngineCapability(
    methods=SamplingMethods,
    renamed={
        "alone": "generate_alone(prompt, sampling, mix)",
        "undecided": "is_near_tie(tokens, sampling, mix)",
        "takes_sampling": "sampling = SamplingTraits(greedy_only=True) for False, else nothing",
        "takes_min_p": "sampling = SamplingTraits(min_p=True)",
        "takes_counted_penalties": "sampling = SamplingTraits(presence_and_frequency=True)",
        "end": "eos_token",
    },
    fields=(SamplingFields, EarlyEndFields),
    draw=draw_more,
    restrict=restrict_to_greedy,
    words=words,
    settle=settle_seed,
    adjust=penalise,
    observers=(ChosenTokens,),
    refuse=(refuse_no_twin,),
)
