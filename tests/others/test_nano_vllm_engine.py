"""nano-vllm's engine: output that does not depend on the batch, and planted bugs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import MixDivergence
from pytest_roseinfer.targets.nano_vllm_engine import NanoVllmEngine
from tests.others.engine_search import verdicts_of
from tests.others.test_nano_vllm import SOURCES, needs_nano_vllm

if TYPE_CHECKING:
    from pytest_roseinfer import RequestMix

pytestmark = [
    needs_nano_vllm,
    # A warning of torch when the runner is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]
WRONG_TOKEN = r"request \d, token \d+: \d+; alone it (gets \d+|has ended by then)"


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCES)


class HashesBlocksWithoutPrefix(NanoVllmEngine):
    """Hashes a block's own tokens without its prefix."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        manager = self.engine.scheduler.block_manager
        manager.compute_hash = lambda tokens, _=-1: hash(tuple(tokens))


class WritesOneSlotTooEarly(NanoVllmEngine):
    """Overwrites the previous token in decode steps that write the last slot of a block."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        runner = self.engine.model_runner
        right = runner.prepare_decode

        def wrong(sequences: Any) -> Any:
            prepared = right(sequences)
            slots = runner.model.get_context().slot_mapping
            slots[slots % mix.block_size == mix.block_size - 1] -= 1
            return prepared

        runner.prepare_decode = wrong


class LeaksABlockOnPreemption(NanoVllmEngine):
    """Keeps a block in use forever after each preemption."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        manager = self.engine.scheduler.block_manager
        right = manager.deallocate

        def wrong(sequence: Any) -> None:
            right(sequence)
            if not sequence.is_finished:
                manager.used_block_ids.add(-1)

        manager.deallocate = wrong


def test_engine_conforms() -> None:
    assert verdicts_of(NanoVllmEngine, examples=30)[:3] == ["equal"] * 3


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (HashesBlocksWithoutPrefix, WRONG_TOKEN),
        (WritesOneSlotTooEarly, WRONG_TOKEN),
        (LeaksABlockOnPreemption, "every request has ended, and the engine still holds 1 blocks"),
    ],
)
def test_planted_bug_is_caught(broken: type[NanoVllmEngine], message: str) -> None:
    with pytest.raises(MixDivergence, match=message):
        verdicts_of(broken, examples=60)
