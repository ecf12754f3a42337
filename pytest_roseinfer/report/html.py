"""HTML report of a run in one file: verdict, coverage and findings."""

from __future__ import annotations

import math
from base64 import b64encode
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pytest_roseinfer.findings.frame import DRAWN, PALETTE, title
from pytest_roseinfer.findings.svg import draw, words
from pytest_roseinfer.findings.timeline import describe_timeline, draw_timeline
from pytest_roseinfer.report.verdict import NOT_SEARCHED, RARELY, largest_of, pairs, searches_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.findings.frame import Frame
    from pytest_roseinfer.findings.timeline import FindingRecord, Timeline
    from pytest_roseinfer.report.verdict import Target, Verdict

_TYPES = {".json": "application/json", ".py": "text/x-python", ".svg": "image/svg+xml"}
_NAMES = {".json": "trace", ".py": "script", ".svg": "drawing"}
_TONES = {"equal": "good", "met": "good", "not searched": "faint", RARELY: "faint"}
"""Style class by verdict; all others are ``bad``."""


def page(verdict: Verdict, files: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """Return the page; ``files`` are downloads by path, and ``figures`` more SVG by title."""
    template = _environment().get_template("page.html")
    return template.render(run=verdict, files=files, figures=figures, style=STYLE, script=SCRIPT)


def findings_html(findings: Sequence[FindingRecord], files: Mapping[str, str]) -> str:
    """Return the section of findings; ``files`` are the contents of downloads by path."""
    template: Any = _environment().get_template("findings.html").module
    return str(template.section(findings, files))


def _environment() -> Environment:
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
    )
    environment.globals |= {
        "downloads": _downloads,
        "facts_of": _facts,
        "pairs": pairs,
        "plot": plot,
        "steps": _steps,
        "timeline_image": _timeline_image,
        "title": title,
        "tones": _TONES,
    }
    return environment


def _steps(finding: FindingRecord) -> Iterator[tuple[Frame, dict[str, str]]]:
    """Yield each frame to show, with the images before and after its step."""
    frames, layer = finding["frames"], f" (layer {finding['layer']})" * bool(finding["layer"])
    drawn = draw(frames, finding["block_size"])
    images = [each.as_image(words(frame)) for frame, each in zip(frames, drawn, strict=True)]
    if len(frames) == 1:
        images = ["", *images]
    for at, frame in enumerate(frames[1:] or frames):
        yield frame, {f"before{layer}": images[at], f"after{layer}": images[at + 1]}


def _timeline_image(timeline: Timeline) -> str:
    return draw_timeline(timeline).as_image(describe_timeline(timeline))


def _downloads(finding: FindingRecord, files: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the data URL and the title of each downloadable file."""
    for path in filter(files.get, (finding["trace"], finding["script"], finding["drawing"])):
        suffix, data = PurePath(path).suffix, b64encode(files[path].encode()).decode()
        yield PurePath(path).name, f"data:{_TYPES[suffix]};base64,{data}", _NAMES[suffix]


def _facts(target: Target) -> dict[str, str]:
    """Return facts on a target's tests, in words."""
    state = NOT_SEARCHED
    if target["searched"]:
        searches = searches_of(target["kind"])
        state = f"{target['histories']} {searches} in {target['seconds']:.0f} s"
        state += f", {target['compiled']} kernels compiled" if target["compiled"] else ""
    failed = "a check failed, see above" if target["failed"] else ""
    states = filter(None, [state, largest_of(target["largest"]), target["cut_short"], failed])
    return {
        "searched": "; ".join(states),
        "tested": pairs(target["tested"]),
        "not offered": ", ".join(target["not_offered"]),
        "checked": pairs({name: n for name, n in target["checked"].items() if n}),
        "batches": pairs(target["batches"]) if target["searched"] else "",
    }


# Style of the page, and the script that steps through a history.


STYLE = f"""{PALETTE}{DRAWN}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
main {{ max-width: 64rem; margin: 0 auto; padding: 2rem 1rem 4rem; }}
h1 {{ font-size: 1.5rem; line-height: 1.3; margin: 0 0 .3rem; }}
h2 {{ font-size: 1.15rem; line-height: 1.4; margin: 0 0 .2rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .5rem; }}
code, pre, .name {{ font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
.badge {{ padding: .1rem .7rem; border-radius: 1rem; margin-left: .5rem; font-size: .95rem;
  vertical-align: middle; white-space: nowrap; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }} .faint {{ color: var(--faint); }}
.badge.good {{ background: var(--good); color: var(--paper); }}
.badge.bad {{ background: var(--bad); color: var(--paper); }}
section {{ margin-top: 3rem; }}
article {{ margin-top: 2rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }}
p {{ margin: .4rem 0; }}
table {{ border-collapse: collapse; margin: .8rem 0; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0;
  border-bottom: 1px solid var(--line); }}
th {{ color: var(--faint); font-weight: 500; overflow-wrap: normal; }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.scrolls, figure {{ margin: .8rem 0; overflow-x: auto; }}
figure svg {{ display: block; }}
figcaption {{ color: var(--faint); font-size: .9rem; }}
dl.beside {{ display: flex; flex-wrap: wrap; gap: .6rem; margin: .8rem 0; }}
dl.beside > div {{ flex: 1 1 16rem; padding: .5rem .8rem; background: var(--soft);
  border-left: 3px solid var(--line); }}
dl.beside > .is {{ border-color: var(--bad); }}
dt {{ color: var(--faint); font-size: .85rem; }} dd {{ margin: 0; }}
.strip {{ margin: 1rem 0; padding: .8rem .6rem; border: 1px solid var(--line);
  border-radius: 6px; }}
.strip:focus-visible, button:focus-visible, a:focus-visible {{ outline: 2px solid var(--shade);
  outline-offset: 2px; }}
.steps {{ display: flex; flex-wrap: wrap; align-items: center; gap: .6rem; }}
.history {{ position: relative; list-style: none; margin: .6rem 0; padding: 0;
  max-height: 18rem; overflow-y: auto; }}
@media (max-width: 40rem) {{ .keys {{ display: none; }} }}
button {{ font: inherit; color: inherit; cursor: pointer; background: var(--soft);
  border: 1px solid var(--line); border-radius: 4px; padding: .2rem .8rem; min-height: 2rem; }}
button:disabled {{ color: var(--faint); cursor: default; opacity: .6; }}
.history button {{ display: block; width: 100%; text-align: left; background: none;
  border: 0; border-left: 3px solid transparent; border-radius: 0; padding: .15rem .6rem; }}
.history button[aria-current] {{ background: var(--soft); border-color: var(--shade); }}
.frames {{ list-style: none; margin: 0; padding: 0; }}
.frame + .frame {{ margin-top: 1.2rem; }}
.states {{ display: flex; flex-wrap: wrap; gap: 0 2rem; }}
.states figure {{ max-width: 100%; margin: .3rem 0; }}
[hidden] {{ display: none !important; }}
details {{ margin: .6rem 0; }} summary {{ cursor: pointer; color: var(--faint); }}
pre {{ background: var(--soft); padding: .8rem; overflow-x: auto; overflow-wrap: normal; }}
a {{ color: var(--shade); }} ul {{ margin: .3rem 0; padding-left: 1.2rem; }}
svg .cell {{ fill: var(--shade); }} svg .empty {{ fill: none; stroke: var(--line); }}
svg text.dark {{ fill: var(--paper); }}
"""
SCRIPT = """
for (const strip of document.querySelectorAll(".strip")) {
  const frames = [...strip.querySelectorAll(".frame")];
  const picks = [...strip.querySelectorAll(".history button")];
  const [back, next] = strip.querySelectorAll(".steps button");
  let at = 0;
  const show = (to) => {
    at = Math.max(0, Math.min(to, frames.length - 1));
    frames.forEach((frame, step) => { frame.hidden = step !== at; });
    picks.forEach((pick, step) => pick.toggleAttribute("aria-current", step === at));
    strip.querySelector(".at").textContent = `step ${at + 1} of ${frames.length}`;
    picks[at].closest("ol").scrollTop = picks[at].offsetTop - 40;
    back.disabled = at === 0;
    next.disabled = at === frames.length - 1;
  };
  picks.forEach((pick, step) => pick.addEventListener("click", () => show(step)));
  back.addEventListener("click", () => show(at - 1));
  next.addEventListener("click", () => show(at + 1));
  strip.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) { event.preventDefault(); show(at + way); }
  });
  strip.querySelectorAll(".scripted").forEach((part) => { part.hidden = false; });
  show(frames.length - 1);
}
"""
"""Script of the step view, which starts at the last step, the failure.

Without scripting, the page shows all frames.
"""


# Plot of paths x conditions: how often each path ran while each condition was met.


_WIDTH, _HEIGHT, _NAME = 48, 26, 20
"""Width and height of a cell, and height of a path's name above its row.

To the left of the row, names would leave no room for the cells on a phone.
"""
_CHARACTER = 7.3
"""Width of a label's character, in pixels."""
_SLANT = 35
"""Slope of the column names, in degrees."""


def plot(target: Target) -> str:
    """Draw inline SVG: a row per path, a column of its runs and a column per condition.

    Shades are logarithmic, so that a count of three is still visible.
    """
    paths = list(target["times"])
    conditions = [row["name"] for row in target["rows"] if row["kind"] == "condition"]
    columns = ["times run", *conditions]
    row = _NAME + _HEIGHT
    longest, slant = _CHARACTER * max(map(len, columns)), math.radians(_SLANT)
    top = 16 + longest * math.sin(slant)
    cells = _WIDTH * len(columns) + longest * math.cos(slant)
    width = max(cells, _CHARACTER * max(map(len, paths)))
    height = top + row * len(paths) + 6
    max_count = max([1, *target["times"].values()])
    marks = []
    for at, name in enumerate(columns):
        x, y = _WIDTH * (at + 0.5), top - 10
        marks.append(_text(x, y, name, f'transform="rotate(-{_SLANT} {x:.0f} {y:.0f})"'))
    for at, path in enumerate(paths):
        y = top + row * at
        marks.append(_text(2, y + _NAME / 2, path, ""))
        counts = {f"{path} ran": target["times"][path]} | {
            f"{path} while {name}: steps": target["together"][path][name] for name in conditions
        }
        for column, (label, count) in enumerate(counts.items()):
            marks.append(_cell(_WIDTH * column, y + _NAME, count, max_count, label))
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="paths x conditions reached">{"".join(marks)}</svg>'
    )


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" dy="0.32em" {attributes}>{escape(text)}</text>'


def _cell(x: float, y: float, count: int, max_count: int, label: str) -> str:
    shade = 0.12 + 0.88 * math.log1p(count) / math.log1p(max_count) if count else 0
    box = (
        f'<rect x="{x + 2:.0f}" y="{y + 2:.0f}" width="{_WIDTH - 4}" height="{_HEIGHT - 4}" '
        f'rx="3" class="{"cell" if count else "empty"}" fill-opacity="{shade:.2f}"/>'
    )
    tone = f'text-anchor="middle" class="{"dark" if shade > 0.65 else "light"}"'
    number = _text(x + _WIDTH / 2, y + _HEIGHT / 2, str(count), tone)
    return f"<g><title>{escape(label)} {count}</title>{box}{number}</g>"
