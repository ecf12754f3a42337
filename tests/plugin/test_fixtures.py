"""The plugin's fixtures for other tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import Path

if TYPE_CHECKING:
    from pytest_roseinfer import CacheSpec
    from roseinfer import KVBlockManager, TinyGPT2
    from tests.project import Project

PROMPTS = ("The quick brown fox", "a", "KV cache", "ü" * 30, "0123456789" * 12, "0123456789" * 100)


@pytest.fixture(scope="session")
def roseinfer_device(device: str) -> str:
    """Return the device of all tests, as the plugin's own fixture would choose the interpreter."""
    return device


def test_fixtures_are_documented(project: Project) -> None:
    output = project.pytest("--fixtures").stdout.str()
    for name, words in {
        "roseinfer_device [session scope]": "Device of the caches under test",
        "roseinfer_spec": "Shape of the fixtures' caches",
        "roseinfer_manager": "Empty ``roseinfer.KVBlockManager``",
        "roseinfer_reference": "token by token",
        "roseinfer_tiny_gpt2 [session scope]": "Small random GPT-2 and its byte-level tokenizer",
    }.items():
        heading, _, text = output.partition(f"{name} -- ")[2].partition("\n")
        assert "fixtures.py" in heading, name
        assert words in text.partition("\n\n")[0], name


def test_manager_fixture_equals_the_reference_on_a_fast_path(
    roseinfer_spec: CacheSpec,
    roseinfer_manager: KVBlockManager,
    roseinfer_reference: KVBlockManager,
) -> None:
    both = (roseinfer_manager, roseinfer_reference)
    tables: list[list[list[int]]] = [[[], [], []] for _ in both]
    for step in range(roseinfer_spec.block_size + 1):
        shape = (2, 3, roseinfer_spec.num_heads, roseinfer_spec.head_dim)
        new = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        key, value = new.to(roseinfer_spec.device)
        for manager, rows in zip(both, tables, strict=True):
            manager.append_token_batch(1, rows, key, value)
    assert tables[0] == tables[1]
    for row in tables[0]:
        pairs = zip(*(manager.gather_sequence(1, row) for manager in both), strict=True)
        assert all(torch.equal(fast, slow) for fast, slow in pairs)
    assert not roseinfer_manager.path_counts[Path.PER_TOKEN]
    assert set(+roseinfer_reference.path_counts) & set(Path) == {Path.PER_TOKEN}


def test_spec_fixture_can_be_overridden(project: Project) -> None:
    project.write(
        conftest="""
            import pytest
            from pytest_roseinfer import CacheSpec

            @pytest.fixture
            def roseinfer_spec(roseinfer_device):
                return CacheSpec(num_layers=3, num_blocks=5, dtype="float16",
                                 device=roseinfer_device)
        """,
        test_mine="""
            import torch

            def test_mine(roseinfer_device, roseinfer_manager, roseinfer_reference):
                assert roseinfer_device == "cpu"
                for manager in (roseinfer_manager, roseinfer_reference):
                    assert manager.keys.shape[0] == 3
                    assert manager.num_free_blocks(0) == 5
                    assert manager.keys.dtype == torch.float16
        """,
    )
    project.pytest().assert_outcomes(passed=1)


# ------------------------------------------------------------------------------ the tiny model


@pytest.mark.parametrize("text", ["hello", "Grüße, 世界\n\t☃", "  two  spaces ", "\x00\x7f"])
def test_tiny_tokenizer_encodes_bytes(roseinfer_tiny_gpt2: TinyGPT2, text: str) -> None:
    tokenizer = roseinfer_tiny_gpt2.tokenizer
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_tiny_tokenizer_decodes_any_tokens(roseinfer_tiny_gpt2: TinyGPT2) -> None:
    """A random model generates bytes that are mostly not UTF-8."""
    assert (
        roseinfer_tiny_gpt2.tokenizer.decode([0xC3, 0x28, 0xFF, 256]).count(
            "\N{REPLACEMENT CHARACTER}"
        )
        == 2
    )


def greedy(tiny: TinyGPT2, prompt: str, count: int) -> tuple[list[int], list[float]]:
    """Return greedy tokens computed without a cache, and each one's margin over the next logit."""
    tokens = tiny.tokenizer(prompt, return_tensors="pt")["input_ids"].to(tiny.model.device)
    margins: list[float] = []
    for _ in range(count):
        best = tiny.model(tokens).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        tokens = torch.cat([tokens, best.indices[None, :1]], dim=1)
    return tokens[0, -count:].tolist(), margins


def test_greedy_tokens_of_the_tiny_model_are_no_ties(roseinfer_tiny_gpt2: TinyGPT2) -> None:
    """Another order of additions changes a logit by less than 1e-4, which changes no token."""
    runs = [greedy(roseinfer_tiny_gpt2, prompt, 24) for prompt in PROMPTS]
    assert min(margin for _, margins in runs for margin in margins) > 1e-3
    # Completions are neither repetitive nor equal for different prompts.
    assert all(len(set(tokens)) > 5 for tokens, _ in runs)
    assert len({tuple(tokens) for tokens, _ in runs}) == len(PROMPTS)


def test_logits_of_the_tiny_model_depend_on_every_token(roseinfer_tiny_gpt2: TinyGPT2) -> None:
    """A cache that loses or repeats the first token changes the logits."""
    model = roseinfer_tiny_gpt2.model
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(model.device)
    expected = model(tokens).logits[0, -1]
    for at in (0, 1, 20, 38):
        changed = tokens.clone()
        changed[0, at] = (changed[0, at] + 1) % 256
        assert (model(changed).logits[0, -1] - expected).abs().max() > 1e-3


def test_tiny_model_is_deterministic_and_keeps_the_random_state(
    roseinfer_tiny_gpt2: TinyGPT2, roseinfer_device: str
) -> None:
    from roseinfer import tiny_gpt2

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    second_model = tiny_gpt2(roseinfer_device).model
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = zip(roseinfer_tiny_gpt2.model.parameters(), second_model.parameters(), strict=True)
    assert all(torch.equal(parameter, other_parameter) for parameter, other_parameter in weights)


@pytest.mark.slow
def test_tiny_model_needs_no_network(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no cache of earlier downloads either, as the home folder is empty."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    project.cold_start = True  # imports must run
    project.write(
        test_tiny="""
            import socket

            def refuse(*_):
                raise AssertionError("something wants a network")

            socket.socket.connect = refuse

            def test_tiny(roseinfer_tiny_gpt2):
                tokens = roseinfer_tiny_gpt2.tokenizer("offline", return_tensors="pt")
                assert roseinfer_tiny_gpt2.model(**tokens).logits.shape == (1, 7, 257)
        """
    )
    project.pytest("-W", "error").assert_outcomes(passed=1)
