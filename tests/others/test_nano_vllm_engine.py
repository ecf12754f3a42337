"""nano-vllm's engine gives each request what its text asks for, and a broken one does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import MixDivergence
from pytest_roseinfer.targets.nano_vllm_engine import NanoVllmEngine
from tests.others.engine_search import verdicts_of
from tests.others.test_nano_vllm import THERE, needs_it

if TYPE_CHECKING:
    from pytest_roseinfer import RequestMix

pytestmark = [
    needs_it,
    # What torch says of itself when the runner is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]
WRONG_TOKEN = r"request \d, token \d+: \d+; alone it (gets \d+|has ended by then)"


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(THERE)


class ForgetsWhatCameBefore(NanoVllmEngine):
    """Blocks are found by their own tokens alone, whatever precedes them."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        manager = self.engine.scheduler.block_manager
        manager.compute_hash = lambda tokens, _=-1: hash(tuple(tokens))


class StoresATokenTooEarly(NanoVllmEngine):
    """A step that decodes writes over the token before, at the end of a block."""

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


class KeepsABlock(NanoVllmEngine):
    """Who is preempted leaves a block behind that is held for ever."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        manager = self.engine.scheduler.block_manager
        right = manager.deallocate

        def wrong(sequence: Any) -> None:
            right(sequence)
            if not sequence.is_finished:
                manager.used_block_ids.add(-1)

        manager.deallocate = wrong


def test_it_conforms() -> None:
    assert verdicts_of(NanoVllmEngine, examples=30) == ["equal"] * 3


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (ForgetsWhatCameBefore, WRONG_TOKEN),
        (StoresATokenTooEarly, WRONG_TOKEN),
        (KeepsABlock, "every request has ended, and the engine still holds 1 blocks"),
    ],
)
def test_a_planted_bug_is_caught(broken: type[NanoVllmEngine], said: str) -> None:
    with pytest.raises(MixDivergence, match=said):
        verdicts_of(broken, examples=60)
