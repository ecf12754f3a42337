"""Promises of the project: its commands, its files, its types."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / ".github").rglob("*.md"))]
PAGES.append(ROOT / "README.md")
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "roseinfer",
    "pytest_roseinfer",
    "tests",
    "docs",
    "LICENSE",
}


def readme_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block.strip() for block in blocks]


def test_readme_has_one_command_to_verify_and_one_to_test() -> None:
    verify, test = readme_commands()
    assert verify.endswith("roseinfer verify")
    assert "pytest" in test


def test_readme_is_a_first_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 90


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"\btests/(?!v1/)[\w/]+\.(?:py|h|json)\b", text)  # vLLM has a tests/v1/
    modules = [name.replace(".", "/") for name in re.findall(r"-m (tests[\w.]*)\b", text)]
    missing = {name for name in files if not (ROOT / name).is_file()}
    missing |= {
        name
        for name in modules
        if not (ROOT / f"{name}.py").is_file() and not (ROOT / name / "__main__.py").is_file()
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_and_headings_lead_somewhere(page: Path) -> None:
    text = without_code(page)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"^\[[^]]+\]:\s+(\S+)", text, re.M)
    inside = [target.partition("#") for target in targets if not re.match(r"\w+:", target)]
    broken = []
    for name, _, anchor in inside:
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{name}#{anchor}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    named = set()
    for heading in re.findall(r"^#+ (.*)", without_code(page), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        named.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return named


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert readme_commands()[1] in lines


def test_ci_installs_what_builds_the_site() -> None:
    """The group is not named by .ci/run, since the pip of a new environment may not know groups."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    names = " ".join(re.split(r"[<>=]", each)[0] for each in groups["docs"])
    script = (ROOT / ".ci" / "run").read_text()
    assert f"pip install -q -c .ci/constraints.txt {names}\n" in script


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`((?:roseinfer|pytest_roseinfer)/[\w/]+\.py)`", text)
    assert len(files) >= 8
    assert [name for name in files if not (ROOT / name).is_file()] == []
    for name, file in re.findall(r"`(\w+)` in `([\w/]+\.py)`", text):
        assert re.search(rf"(class|def) {name}\b", (ROOT / file).read_text()), name


def test_workflow_runs_the_ci_script() -> None:
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_top_level_has_only_known_files() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {path.split("/")[0] for path in tracked.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} == TOP_LEVEL


@pytest.mark.parametrize("package", ["roseinfer", "pytest_roseinfer"])
def test_packages_ship_their_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("package", ["roseinfer", "pytest_roseinfer"])
def test_layout_names_every_room(package: str) -> None:
    layout = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rooms = [f"{each.parent.name}/" for each in (ROOT / package).glob("*/__init__.py")]
    files = [file.name for file in (ROOT / package).glob("*.py") if "__" not in file.name]
    assert rooms
    missing = [name for name in rooms + files if not re.search(rf"^ .*\b{name}", layout, re.M)]
    assert not missing


def test_version_is_written_down_once() -> None:
    """It is ``roseinfer.__version__``, which hatch reads and a release's tag must equal."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "roseinfer/__init__.py"
    assert not re.search(r"^version:", (ROOT / "docs" / "CITATION.cff").read_text(), re.M)


def test_every_constraint_is_exact() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert any(pin.startswith("torch==") for pin in pins)
    assert [pin for pin in pins if not re.match(r"^[\w.-]+==[\w.]+(; .*)?$", pin)] == []


def test_upper_bounds_have_a_reason() -> None:
    """A bound without a reason excludes newer versions for nothing."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    requirements = [line for line in lines if re.match(r' +"[\w.-]+ *[<>=!~]', line)]
    assert any("torch>=" in line for line in requirements)
    assert [
        line for line in requirements if re.search(r"<|==\d|~=", line) and "#" not in line
    ] == []
