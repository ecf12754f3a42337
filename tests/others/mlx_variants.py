"""Variants of the mlx-lm adapters that find one defect each, or pass over those that are known."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from tests.others.mlx_engine import MlxBatchEngine, MlxSerialEngine, model_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import RequestMix, Sampling


class RecomputesTheLastToken(MlxBatchEngine):
    """Leaves the last token of a prompt that is stored as a whole for the batch to compute."""

    def fetch(self, prompt: Sequence[int]) -> tuple[Any, list[int]]:
        found, rest = super().fetch(prompt)
        if rest:
            return found, rest
        found, rest = super().fetch(prompt[:-1])
        return found, [*rest, prompt[-1]]


class BatchesMamba(RecomputesTheLastToken):
    kinds = ("mamba",)


class BatchesMambaAndAttention(RecomputesTheLastToken):
    kinds = ("mamba and attention",)


class BatchesTheDeltaRule(RecomputesTheLastToken):
    kinds = ("delta rule",)


class BatchesSoftCaps(RecomputesTheLastToken):
    kinds = ("soft cap",)


class SeesAWindowAndItself(RecomputesTheLastToken):
    kinds = ("window and itself",)


class BoundsTheCache(RecomputesTheLastToken):
    """Keeps a limited number of tokens; the slow twin does so without a batch."""

    kinds = ("full",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RecomputesTheLastToken.option_choices,
        "max_kv_size": (8,),
    }

    def generate_alone(
        self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix
    ) -> list[int]:
        mx, generate = import_module("mlx.core"), import_module("mlx_lm.generate")
        model = model_of(mix.options["model"])
        steps = generate.generate_step(
            mx.array(prompt), model, max_tokens=sampling.max_new_tokens, max_kv_size=8
        )
        return [token for token, _ in steps]


class ReusesNothing(MlxSerialEngine):
    """Serves each request with an empty prompt cache."""

    def step(self) -> None:
        self.prompts.trim_to(n_sequences=0)
        super().step()


class DraftsInAWindow(ReusesNothing):
    kinds = ("window",)


class KeepsChunks(MlxSerialEngine):
    kinds = ("chunks",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **MlxSerialEngine.option_choices,
        "draft": (False,),
    }
