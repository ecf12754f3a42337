"""transformers' engine with ``num_return_sequences``, which forks a request at its last token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer.targets.whole_engines.transformers_engine import TransformersEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.mix import Sampling


class ForkingTransformersEngine(TransformersEngine):
    def forked(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        """Fork a request that lasts as long as any is to, and cut each fork to what it asked."""
        self.manager.num_return_sequences = len(samplings)
        most = max(each.max_new_tokens for each in samplings)
        name = self.submit(prompt, replace(samplings[0], max_new_tokens=most, ignore_eos=True))
        names = [name, *(f"{name}__child#{at}" for at in range(len(samplings) - 1))]
        while not all(map(self.ended, names)):
            self.step()
        found = zip(map(self.tokens, names), samplings, strict=True)
        return [_cut(tokens[: own.max_new_tokens], own) for tokens, own in found]


def _cut(new: list[int], sampling: Sampling) -> list[int]:
    ends = TransformersEngine.end in new and not sampling.ignore_eos
    return new[: new.index(TransformersEngine.end) + 1] if ends else new
