"""Examples and lists of docs/how-to/engine.md."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

import roseinfer
from roseinfer import RoseinferError
from roseinfer.cli import main
from tests import settings_pages
from tests.python_process import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "how-to" / "engine.md").read_text()
PRINTED = {
    "Generate completions": r"('|\").*('|\") (length|stop)\n" * 2,
    "Structured output": r'\{(\s*)"old"\s*:\s*(true|false)\s*\}\n',
    "Stream tokens": r"(?s).*(length|stop)\n",
    "Use it from async code": r"(['\"].*['\"]\n){2}'error: an empty prompt: .*'\n",
    "Errors": r"error .*2000.*\n.*leaves no room.*\n",
    "What a step does": r"1\n",
    "The cache alone": r"torch\.Size\(\[4, 21, 64\]\) .*\n",
    "Speculative decoding": r"True\n",
}
"""Pattern of the output of each section's example."""


def blocks(language: str) -> dict[str, str]:
    """Return the code of each section."""
    sections = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:]
    code_by_title: dict[str, str] = {}
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        for code in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL):
            assert title not in code_by_title, f"two examples under {title!r}"
            code_by_title[title] = code
    return code_by_title


EXAMPLES = blocks("python")


@pytest.mark.parametrize("title", EXAMPLES)
def test_example_runs(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[title], f"docs/how-to/engine.md, {title}", "exec"), {})
    assert re.fullmatch(PRINTED[title], capsys.readouterr().out)


def test_every_example_is_collected() -> None:
    assert list(EXAMPLES) == list(PRINTED)
    assert PAGE.count("```python") == len(EXAMPLES)


def test_lists_of_settings_match_the_code() -> None:
    """Regenerate with: ``python -m tests.settings_pages``."""
    for page, sections in settings_pages.PAGES.items():
        for settings in sections.values():
            assert settings_pages.listed(settings) in (ROOT / page).read_text()


def test_documented_errors_are_public() -> None:
    errors = PAGE.partition("\n## Errors\n")[2].partition("\n## ")[0]
    names = re.findall(r"^- `(\w+)`: ", errors, re.MULTILINE)
    assert len(names) == 9
    assert all(issubclass(getattr(roseinfer, name), RoseinferError) for name in names)


@pytest.mark.parametrize("line", blocks("sh")["From a shell"].splitlines())
def test_documented_commands_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run each with the tiny model, and with a prompt in place of piped input."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    words = shlex.split(line.split(" > ")[0].split(" | ")[-1])
    assert words[:3] == ["roseinfer", "generate", "--model"]
    piped = ["--prompt", "x"] if " | " in line else []
    assert main(["generate", *words[4:], *piped]) == 0
