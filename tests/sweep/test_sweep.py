"""The sweep: outcomes of classes, detection of wrong engines, and the command."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.models.causal import CausalModel
from roseinfer.models.families.llama import FusedLlama
from tests import warm_process
from tests.python_process import ROOT
from tests.sweep import command, run, table
from tests.sweep.check import check
from tests.sweep.outcome import Kind, Outcome
from tests.sweep.prompts import NEW_TOKENS
from tests.sweep.reference import Reference
from tests.sweep.subject import Subject, every_class
from tests.sweep.variants import every_variant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

RESULTS_PAGE = ROOT / "docs" / "lab" / "models.md"
"""Page of all outcomes, which the command writes."""
SUMMARY_PAGE = ROOT / "docs" / "reference" / "models.md"
"""Page of the figures and the options, for users."""


@pytest.mark.slow
def test_random_tenth_has_the_outcomes_of_the_page() -> None:
    """``--roseinfer-seed`` draws the same tenth again."""
    seed = str(settings.current().seed)
    arguments = [
        "-m",
        "tests.sweep",
        "--tenth",
        seed,
        "--jobs",
        "2",
        "--against-docs",
        str(RESULTS_PAGE),
    ]
    done = warm_process.run(arguments, cwd=ROOT, environment=os.environ)
    assert done.returncode == 0, f"with seed {seed}:\n{done.stdout}\n{done.stderr}"
    assert re.search(r"^\w+ +\w.* +agrees to", done.stdout, re.M), "expected a subject that agrees"


def test_subjects_have_unique_names() -> None:
    subjects = [*every_class(), *every_variant()]
    assert len(subjects) > 300
    assert len({*map(str, subjects)}) == len(subjects)


def test_page_has_an_entry_for_every_subject() -> None:
    """Else: ``python -m tests.sweep --write-docs docs/lab/models.md``."""
    if not table.is_of_these_versions(RESULTS_PAGE):
        pytest.skip("the page is of other versions")
    nothing = Outcome(Kind.AGREES)
    agreeing = dict.fromkeys([*every_class(), *every_variant()], nothing)
    differences = table.differences(RESULTS_PAGE, agreeing)
    assert [line for line in differences if "has 'nothing'" in line] == []
    assert "WRONG" not in RESULTS_PAGE.read_text()


def test_summary_has_the_results() -> None:
    """Else update docs/reference/models.md from docs/lab/models.md."""
    page = SUMMARY_PAGE.read_text()
    agree = {
        subject.partition(" by ")[0]
        for subject, outcome in table.outcomes_of(RESULTS_PAGE, table.CLASSES).items()
        if outcome.startswith(Kind.AGREES)
    }
    section = page.partition("## Classes that agree")[2].partition("## ")[0]
    assert re.findall(r"`(\w+)`", section) == sorted(agree)
    rows = re.findall(r"^\| (classes|variants) [^|]*\| ([\d |]+) \|$", page, re.M)
    assert [kind for kind, _ in rows] == [table.CLASSES, table.VARIANTS]
    for kind, counts in rows:
        outcomes = table.outcomes_of(RESULTS_PAGE, kind).values()
        kinds = (Kind.AGREES, Kind.REFUSED, Kind.NOT_BUILT)
        each = [sum(outcome.startswith(name) for outcome in outcomes) for name in kinds]
        assert list(map(int, counts.split(" | "))) == [len(outcomes), *each]


def test_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    offered = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.M)
    named = re.findall(r"^\| `(--[\w-]+)", SUMMARY_PAGE.read_text(), re.M)
    assert len(offered) > 3
    assert sorted(named) == sorted(offered)


# ------------------------------------------------------------ detection of wrong engines


def _another_token(logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(1, -1)


def _lower_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Decrease log-probabilities a little, without a change of the argmax."""
    return logits * 0.999


def _torch_error(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1, 5)


@pytest.mark.parametrize(
    ("break_logits", "message"),
    [
        (_another_token, r"^after \d+ tokens, \d+ instead of \d+"),
        (_lower_logprobs, r"its log-probability is off by 0\.00\d"),
        (_torch_error, "^when it ran, RuntimeError: shape .* is invalid for input of size"),
    ],
)
def test_wrong_engine_is_found(
    monkeypatch: pytest.MonkeyPatch,
    break_logits: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    """Breaks the engine after the check of the model at its load."""
    right = CausalModel.logits

    def broken_logits(self: CausalModel, *args: Any) -> torch.Tensor:
        logits = right(self, *args)
        return break_logits(logits) if hasattr(self, "traits") else logits

    monkeypatch.setattr(CausalModel, "logits", broken_logits)
    outcome = check(Subject("gpt2"))
    assert outcome.kind is Kind.WRONG
    assert re.search(message, outcome.why)


@pytest.mark.slow
@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled, and do not run on a CPU")
def test_wrong_fused_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks logits after the check of the model at its load, which has four tokens."""
    right = FusedLlama.logits

    def broken_logits(self: FusedLlama, tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        logits = right(self, tokens, *args)
        return logits if len(tokens) == 4 else logits.roll(1, -1)

    assert check(Subject("qwen2")).kind is Kind.AGREES
    monkeypatch.setattr(FusedLlama, "logits", broken_logits)
    outcome = check(Subject("qwen2"))
    assert outcome.kind is Kind.WRONG
    assert outcome.why.startswith("on fused kernels, after ")


def _other_tokens(*_: Any) -> list[int]:
    return [7] * NEW_TOKENS


def _no_tokens(*_: Any) -> list[int]:
    raise NotImplementedError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (_other_tokens, "its own `generate` differs from its plain forward pass"),
        (_no_tokens, "its own `generate` fails: NotImplementedError"),
    ],
)
def test_forward_pass_counts_if_generate_disagrees_with_it(
    monkeypatch: pytest.MonkeyPatch, generate: Any, message: str
) -> None:
    monkeypatch.setattr(Reference, "generated", generate)
    outcome = check(Subject("gpt2"))
    assert (outcome.kind, outcome.why) == (Kind.AGREES, message)


def test_foreign_exception_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("head_dim")

    monkeypatch.setattr("roseinfer.models.loading.CausalModel", fail)
    assert check(Subject("gpt2")) == Outcome(Kind.WRONG, "KeyError: 'head_dim'")


def test_refusal_without_a_name_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from roseinfer import UnsupportedModel

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModel("values of another size")

    monkeypatch.setattr("roseinfer.models.loading.CausalModel", refuse)
    assert check(Subject("gpt2")) == Outcome(Kind.WRONG, "without a name, values of another size")


def test_model_that_cannot_be_built_does_not_agree() -> None:
    outcome = check(Subject("gpt2", "an unknown field", {"no_such_field": 1}))
    assert outcome == Outcome(Kind.NOT_BUILT, "GPT2Config has no no_such_field")
    assert check(Subject("no such type")).kind is Kind.NOT_BUILT


# -------------------------------------------------------------- a process for each subject


def _crash() -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)  # pytest would print a trace for SIGSEGV
    raise AssertionError


def _hang() -> Outcome:
    time.sleep(60)
    raise AssertionError


def _fail() -> Outcome:
    raise LookupError("not an error of the engine")


ENDS = {
    "crash": (_crash, r"WRONG: it crashed: SIGKILL"),
    "hang": (_hang, r"WRONG: timed out after 1 s"),
    "fail": (_fail, r"(?s)WRONG: the check itself failed: .*LookupError: not an error of the"),
    "agree": (lambda: Outcome(Kind.AGREES, difference=2e-6), r"agrees to 2e-06"),
}


def test_crash_or_hang_does_not_affect_other_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "check", lambda subject: ENDS[subject.kind][0]())
    results = dict(run.run([*map(Subject, ENDS)], processes=2, seconds=1))
    assert {subject.kind for subject in results} == ENDS.keys()
    for subject, outcome in results.items():
        assert re.fullmatch(ENDS[subject.kind][1] + r".*", str(outcome), re.S)


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """Replace checks by outcomes by model type; subjects without an outcome agree."""
    outcomes: dict[str, Outcome] = {}

    def stub_run(subjects: list[Subject], **_: Any) -> Any:
        for subject in reversed(subjects):
            yield subject, outcomes.get(subject.kind, Outcome(Kind.AGREES, difference=1e-6))

    monkeypatch.setattr(command, "run", stub_run)
    return outcomes


def test_wrong_outcome_fails_the_command(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["llama"]) == 0
    outcomes["llama"] = Outcome(Kind.WRONG, "KeyError: 1")
    assert command.main(["llama"]) == 1
    assert "LlamaForCausalLM by LlamaConfig: WRONG: KeyError: 1" in capsys.readouterr().out


def test_sweep_that_builds_too_little_fails(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes["bloom"] = outcomes["gpt2"] = Outcome(Kind.NOT_BUILT, "KeyError")
    assert command.main(["bloom", "gpt2", "llama"]) == 1
    assert "extend tests/sweep/tiny_configs.py" in capsys.readouterr().out
    assert command.main(["bloom"]) == 1


def test_seed_selects_a_tenth(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcomes == {}

    def drawn(seed: int) -> str:
        assert command.main(["--tenth", str(seed)]) == 0
        return capsys.readouterr().out

    assert drawn(1) == drawn(1) != drawn(2)
    everything = len(every_class()) + len(every_variant())
    assert drawn(3).count("agrees to") == -(-everything // 10)


def test_page_is_written_and_compared(
    outcomes: dict[str, Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "models.md"
    page.write_text(
        re.sub(r"(<!-- \w+ -->\n).*?(<!-- end)", r"\1\2", RESULTS_PAGE.read_text(), flags=re.S)
    )
    outcomes["bloom"] = Outcome(Kind.REFUSED, "Bloom\nattends | otherwise")
    assert command.main(["--write-docs", str(page)]) == 0
    entry = "\n- BloomForCausalLM by BloomConfig: refused: Bloom attends / otherwise\n"
    assert entry in page.read_text()
    against = ["--against-docs", str(page)]
    assert command.main(against) == 0
    outcomes["bloom"] = Outcome(Kind.AGREES)
    capsys.readouterr()
    assert command.main(["bloom", *against]) == 1
    difference = (
        "BloomForCausalLM by BloomConfig: models.md has 'refused: Bloom attends / otherwise', and"
    )
    assert difference in capsys.readouterr().out
    page.write_text(page.read_text().replace("with transformers ", "with transformers 0"))
    assert command.main(["bloom", *against]) == 0, "expected no comparison with other versions"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_model"], "no subject has a name like no_such_model"),
        (["llama", "--write-docs", str(RESULTS_PAGE)], "a page needs all subjects"),
        (["--against-docs", str(ROOT / "README.md")], "README.md: no section versions"),
        (["--tenth", "x"], "--tenth"),
    ],
)
def test_invalid_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert message in capsys.readouterr().err
