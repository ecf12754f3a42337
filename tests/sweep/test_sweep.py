"""Every class agrees or is refused, and the sweep would say so if one did not."""

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

PAGE = ROOT / "docs" / "models.md"


@pytest.mark.takes_long
def test_a_tenth_agrees_or_is_refused_as_the_page_says() -> None:
    """``--roseinfer-seed`` draws the same tenth again."""
    seed = str(settings.current().seed)
    arguments = ["-m", "tests.sweep", "--tenth", seed, "--jobs", "2", "--against-docs", str(PAGE)]
    done = warm_process.run(arguments, cwd=ROOT, environment=os.environ)
    assert done.returncode == 0, f"with seed {seed}:\n{done.stdout}\n{done.stderr}"
    assert re.search(r"^\w+ +\w.* +agrees to", done.stdout, re.M), "none was served"


def test_every_subject_has_a_name_of_its_own() -> None:
    subjects = [*every_class(), *every_variant()]
    assert len(subjects) > 300
    assert len({*map(str, subjects)}) == len(subjects)


def test_the_page_has_a_row_for_every_subject() -> None:
    """Else: ``python -m tests.sweep --write-docs docs/models.md``."""
    if not table.is_of_these_versions(PAGE):
        pytest.skip("the page is of other versions")
    nothing = Outcome(Kind.AGREES)
    found = dict.fromkeys([*every_class(), *every_variant()], nothing)
    assert [said for said in table.differences(PAGE, found) if "has 'nothing'" in said] == []
    assert "WRONG" not in PAGE.read_text()


def test_the_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    offered = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.M)
    named = re.findall(r"^\| `(--[\w-]+)", PAGE.read_text(), re.M)
    assert len(offered) > 3
    assert sorted(named) == sorted(offered)


# -------------------------------------------------------------------- what must be noticed


def _another_token(logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(1, -1)


def _somewhat_less_sure(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token stays so, and is a little less likely."""
    return logits * 0.999


def _an_error_of_torch(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1, 5)


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (_another_token, r"^behind \d+ tokens comes \d+ instead of \d+"),
        (_somewhat_less_sure, r"its log-probability is off by 0\.00\d"),
        (_an_error_of_torch, "^when it ran, RuntimeError: shape .* is invalid for input of size"),
    ],
)
def test_an_engine_that_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    """It breaks when it has passed the trial."""
    right = CausalModel.logits

    def broken(self: CausalModel, *told: Any) -> torch.Tensor:
        logits = right(self, *told)
        return breaks(logits) if hasattr(self, "traits") else logits

    monkeypatch.setattr(CausalModel, "logits", broken)
    outcome = check(Subject("gpt2"))
    assert outcome.kind is Kind.WRONG
    assert re.search(said, outcome.why)


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled, and so none runs on a CPU")
def test_fused_kernels_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute other logits only once they have passed the trial, which is of four tokens."""
    right = FusedLlama.logits

    def broken(self: FusedLlama, tokens: torch.Tensor, *told: Any) -> torch.Tensor:
        logits = right(self, tokens, *told)
        return logits if len(tokens) == 4 else logits.roll(1, -1)

    assert check(Subject("qwen2")).kind is Kind.AGREES
    monkeypatch.setattr(FusedLlama, "logits", broken)
    outcome = check(Subject("qwen2"))
    assert outcome.kind is Kind.WRONG
    assert outcome.why.startswith("on fused kernels, behind ")


def _other_tokens(*_: Any) -> list[int]:
    return [7] * NEW_TOKENS


def _no_tokens(*_: Any) -> list[int]:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("generate", "said"),
    [
        (_other_tokens, "its own `generate` differs from its plain forward pass"),
        (_no_tokens, "its own `generate` fails: NotImplementedError"),
    ],
)
def test_where_transformers_disagrees_with_itself_the_forward_pass_counts(
    monkeypatch: pytest.MonkeyPatch, generate: Any, said: str
) -> None:
    monkeypatch.setattr(Reference, "generated", generate)
    outcome = check(Subject("gpt2"))
    assert (outcome.kind, outcome.why) == (Kind.AGREES, said)


def test_another_exception_than_ours_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("head_dim")

    monkeypatch.setattr("roseinfer.models.loading.CausalModel", fail)
    assert check(Subject("gpt2")) == Outcome(Kind.WRONG, "KeyError: 'head_dim'")


def test_a_refusal_without_a_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from roseinfer import UnsupportedModel

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModel("values of another size")

    monkeypatch.setattr("roseinfer.models.loading.CausalModel", refuse)
    assert check(Subject("gpt2")) == Outcome(Kind.WRONG, "without a name, values of another size")


def test_a_model_that_cannot_be_built_is_no_agreement() -> None:
    outcome = check(Subject("gpt2", "a field that is not there", {"never_heard_of": 1}))
    assert outcome == Outcome(Kind.NOT_BUILT, "GPT2Config has no never_heard_of")
    assert check(Subject("no such type")).kind is Kind.NOT_BUILT


# --------------------------------------------------------------------- each in its process


def _crash() -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)  # of SIGSEGV, pytest would print a trace
    raise AssertionError


def _hang() -> Outcome:
    time.sleep(60)
    raise AssertionError


def _fail() -> Outcome:
    raise LookupError("this is not of the engine")


ENDS = {
    "crash": (_crash, r"WRONG: it crashed: SIGKILL"),
    "hang": (_hang, r"WRONG: it had not ended after 1 s"),
    "fail": (_fail, r"(?s)WRONG: the check itself failed: .*LookupError: this is not of the"),
    "agree": (lambda: Outcome(Kind.AGREES, apart=2e-6), r"agrees to 2e-06"),
}


def test_one_that_crashes_or_hangs_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "check", lambda subject: ENDS[subject.kind][0]())
    found = dict(run.run([*map(Subject, ENDS)], processes=2, seconds=1))
    assert {subject.kind for subject in found} == ENDS.keys()
    for subject, outcome in found.items():
        assert re.fullmatch(ENDS[subject.kind][1] + r".*", str(outcome), re.S)


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What the command finds of subjects by their types, instead of looking; else they agree."""
    told: dict[str, Outcome] = {}

    def said(subjects: list[Subject], **_: Any) -> Any:
        for subject in reversed(subjects):
            yield subject, told.get(subject.kind, Outcome(Kind.AGREES, apart=1e-6))

    monkeypatch.setattr(command, "run", said)
    return told


def test_a_third_outcome_fails_the_command(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["llama"]) == 0
    outcomes["llama"] = Outcome(Kind.WRONG, "KeyError: 1")
    assert command.main(["llama"]) == 1
    assert "LlamaForCausalLM by LlamaConfig: WRONG: KeyError: 1" in capsys.readouterr().out


def test_a_sweep_that_builds_nothing_fails(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes["bloom"] = outcomes["gpt2"] = Outcome(Kind.NOT_BUILT, "KeyError")
    assert command.main(["bloom", "gpt2", "llama"]) == 1
    assert "knows too little" in capsys.readouterr().out
    assert command.main(["bloom"]) == 1


def test_a_seed_draws_a_tenth(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcomes == {}

    def drawn(seed: int) -> str:
        assert command.main(["--tenth", str(seed)]) == 0
        return capsys.readouterr().out

    assert drawn(1) == drawn(1) != drawn(2)
    everything = len(every_class()) + len(every_variant())
    assert drawn(3).count("agrees to") == -(-everything // 10)


def test_a_page_is_written_and_held_to(
    outcomes: dict[str, Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "models.md"
    page.write_text(re.sub(r"(<!-- \w+ -->\n).*?(<!-- end)", r"\1\2", PAGE.read_text(), flags=re.S))
    outcomes["bloom"] = Outcome(Kind.REFUSED, "Bloom\nattends | otherwise")
    assert command.main(["--write-docs", str(page)]) == 0
    assert re.search(
        r"^\| BloomForCausalLM +\| BloomConfig +\| refused: Bloom attends / other",
        page.read_text(),
        re.M,
    )
    against = ["--against-docs", str(page)]
    assert command.main(against) == 0
    outcomes["bloom"] = Outcome(Kind.AGREES)
    capsys.readouterr()
    assert command.main(["bloom", *against]) == 1
    said = (
        "BloomForCausalLM by BloomConfig: models.md has 'refused: Bloom attends / otherwise', and"
    )
    assert said in capsys.readouterr().out
    page.write_text(page.read_text().replace("with transformers ", "with transformers 0"))
    assert command.main(["bloom", *against]) == 0, "it is of another version"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["never_heard_of"], "nothing is named like never_heard_of"),
        (["llama", "--write-docs", str(PAGE)], "a page is written with everything"),
        (["--against-docs", str(ROOT / "README.md")], "README.md: no section versions"),
        (["--tenth", "x"], "--tenth"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert said in capsys.readouterr().err
