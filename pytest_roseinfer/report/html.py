"""The page of a run: its verdict, coverage and findings, as one HTML file."""

from __future__ import annotations

import math
from base64 import b64encode
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.findings.frame import DRAWN, PALETTE
from pytest_roseinfer.findings.svg import draw, words
from pytest_roseinfer.findings.timeline import draw_timeline, timeline_words
from pytest_roseinfer.report.verdict import NOT_SEARCHED, RARELY, largest_of, pairs, searches_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_roseinfer.findings.frame import Frame
    from pytest_roseinfer.findings.timeline import Found, Timeline
    from pytest_roseinfer.report.verdict import Target, Verdict

# The part of the page that shows what was found: in words, drawn step by step, and as files.


_TYPES = {".json": "application/json", ".py": "text/x-python", ".svg": "image/svg+xml"}
_NAMES = {".json": "trace", ".py": "script", ".svg": "drawing"}
_LEGEND = (
    "Each box is a token, named sequence.token and coloured by the sequence that wrote it; a dark "
    "line is around what this step put there, and a red one around what is wrong. A thick line is "
    "around a block that is shared, a broken one around one that is kept for later texts; a "
    "striped one is free and overwritten with NaN."
)


def findings_html(findings: Sequence[Found], files: Mapping[str, str]) -> str:
    """Return a section; ``files`` are the texts of those that can be downloaded, by path."""
    if not findings:
        return ""
    title = "What was found" if len(findings) > 1 else "What was found: one difference"
    parts = [_finding(at, found, files) for at, found in enumerate(findings, 1)]
    drawn = any(found["frames"] for found in findings)
    legend = f"<details><summary>how to read the drawings</summary><p>{_LEGEND}</p></details>"
    return f"<section><h2>{title}</h2>{legend * drawn}{''.join(parts)}</section>"


def _finding(at: int, found: Found, files: Mapping[str, str]) -> str:
    what = found["what"].partition(": expected ")[0] if found["expected"] else found["what"]
    name = f"finding-{at}"
    return (
        f'<article aria-labelledby="{name}"><h2 id="{name}" class="bad">{escape(what)}</h2>'
        f'<p class="name faint">{escape(found["target"])}</p>'
        f"{_beside(found)}{_strip(found)}{_timeline(found['timeline'])}{_tests(found['tests'])}"
        f"{_downloads((found['trace'], found['script'], found['drawing']), files)}"
        f"<details><summary>the whole message</summary><pre>{escape(found['message'])}</pre>"
        "</details></article>"
    )


def _beside(found: Found) -> str:
    """Show what was expected beside what was found, if one place is known to be wrong."""
    if not found["expected"]:
        return ""
    return (
        f'<dl class="beside"><div><dt>expected</dt><dd>{escape(found["expected"])}</dd></div>'
        f'<div class="is"><dt>found</dt><dd>{escape(found["found"])}</dd></div></dl>'
    )


def _tests(tests: Sequence[str]) -> str:
    listed = "".join(f"<li><code>{escape(test)}</code></li>" for test in tests)
    many = f"{len(tests)} tests met it" if len(tests) > 1 else "met by the test"
    return f"<p>{many}</p><ul>{listed}</ul>" if tests else ""


def _strip(found: Found) -> str:
    frames = found["frames"]
    if not frames:
        return ""
    drawn = draw(frames, found["block_size"])
    images = [drawing.as_image(words(frame)) for frame, drawing in zip(frames, drawn, strict=True)]
    after = frames[1:] or frames
    befores: list[str] = images[:-1] or [""]
    shown = [
        _frame(frame, before, image, f" (layer {found['layer']})" * bool(found["layer"]))
        for frame, before, image in zip(after, befores, images[-len(after) :], strict=True)
    ]
    picks = "".join(f'<li><button type="button">{_words(frame)}</button></li>' for frame in after)
    return (
        f'<div class="strip" tabindex="0" role="group" aria-label="the history, step by step">'
        '<div class="steps scripted" hidden><button type="button" aria-label="one step back">'
        '&#8592;</button><button type="button" aria-label="one step on">&#8594;</button>'
        '<span class="at" aria-live="polite"></span>'
        '<span class="faint keys">or the arrow keys</span></div>'
        f'<ol class="history scripted" hidden>{picks}</ol>'
        f'<ol class="frames">{"".join(shown)}</ol>'
        "</div>"
    )


def _timeline(timeline: Timeline | None) -> str:
    if timeline is None:
        return ""
    requests = "".join(f"<li>{escape(line['words'])}</li>" for line in timeline["requests"])
    image = draw_timeline(timeline).as_image(timeline_words(timeline))
    return f'<ol class="requests" start="0">{requests}</ol><figure>{image}</figure>'


def _frame(frame: Frame, before: str, after: str, layer: str) -> str:
    drawn = {"before": before, "after": after}
    figures = "".join(
        f"<figure><figcaption>{when}{layer}</figcaption>{image}</figure>"
        for when, image in drawn.items()
        if image
    )
    return f'<li class="frame"><h3>{_words(frame)}</h3><div class="states">{figures}</div></li>'


def _words(frame: Frame) -> str:
    number = f"{frame['step']}. " if frame["step"] else ""
    refused = f'; <span class="bad">{escape(frame["refused"])}</span>' if frame["refused"] else ""
    return f"{number}{escape(frame['words'])}{refused}"


def _downloads(paths: Iterable[str], files: Mapping[str, str]) -> str:
    """Link to the files, which the page has within itself."""
    links = []
    for path in filter(files.get, paths):
        suffix, name = PurePath(path).suffix, PurePath(path).name
        data = b64encode(files[path].encode()).decode()
        links.append(
            f'<a download="{escape(name)}" href="data:{_TYPES[suffix]};base64,{data}">'
            f"{_NAMES[suffix]}</a>"
        )
    return f"<p>to download: {', '.join(links)}</p>" if links else ""


# How the page looks, and the few lines of script that step through a strip.


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
"""It begins where the history ends, with what is wrong. Without it all frames are shown."""


# The plot of paths x conditions: how often each path ran while each condition was met.


_WIDTH, _HEIGHT, _NAME = 48, 26, 20
"""The size of a cell, and the height of a path's name, which stands over its row: beside it, a
phone would have no room for the cells."""
_CHARACTER = 7.3
"""The width of a character in a label."""
_SLANT = 35
"""The names of columns rise by so many degrees."""


def plot(target: Target) -> str:
    """Draw inline SVG: a row for each path, a column for all its runs and one for each condition.

    Shades follow the logarithm of a count, so that what was met three times still shows.
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
    most = max([1, *target["times"].values()])
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
        for column, (what, count) in enumerate(counts.items()):
            marks.append(_cell(_WIDTH * column, y + _NAME, count, most, what))
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="paths x conditions reached">{"".join(marks)}</svg>'
    )


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" dy="0.32em" {attributes}>{escape(text)}</text>'


def _cell(x: float, y: float, count: int, most: int, what: str) -> str:
    shade = 0.12 + 0.88 * math.log1p(count) / math.log1p(most) if count else 0
    box = (
        f'<rect x="{x + 2:.0f}" y="{y + 2:.0f}" width="{_WIDTH - 4}" height="{_HEIGHT - 4}" '
        f'rx="3" class="{"cell" if count else "empty"}" fill-opacity="{shade:.2f}"/>'
    )
    tone = f'text-anchor="middle" class="{"dark" if shade > 0.65 else "light"}"'
    number = _text(x + _WIDTH / 2, y + _HEIGHT / 2, str(count), tone)
    return f"<g><title>{escape(what)} {count}</title>{box}{number}</g>"


_TONES = {"equal": "good", "met": "good", "not searched": "faint", RARELY: "faint"}
"""The class of each verdict; the others are bad."""


def page(verdict: Verdict, files: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """Return the page, with ``files`` to download by path and further SVG ``figures`` by title."""
    targets = verdict["targets"]
    tone, word = ("good", "passed") if verdict["passed"] else ("bad", "failed")
    body = [
        f'<h1>roseinfer: what was checked <span class="badge {tone}">{word}</span></h1>',
        f'<p class="faint">{escape(_searched(verdict))}</p>',
        _problems(verdict["problems"]),
        findings_html(verdict["findings"], files),
        *map(_target, targets),
        "" if targets else "<p>No cache or engine was tested in this run.</p>",
        *(_figure(title, drawn) for title, drawn in figures.items()),
        _run(verdict),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>roseinfer: {word}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{_lines(body)}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _searched(verdict: Verdict) -> str:
    return (
        f"{verdict['device']}, profile {verdict['profile']} ({verdict['examples']} examples of up "
        f"to {verdict['steps']} steps), seed {verdict['seed']}"
    )


def _run(verdict: Verdict) -> str:
    """Say what the run stood on."""
    facts = {
        "required paths": "on" if verdict["required_paths"] else "off",
        "how much such a search finds": verdict["strength"],
        "versions": pairs(verdict["versions"]),
        "environment": pairs(verdict["environment"], "="),
    }
    return f"<section><h2>This run</h2>{_facts(facts)}</section>"


def _figure(title: str, drawn: str) -> str:
    return f"<section><h2>{escape(title)}</h2><figure>{drawn}</figure></section>"


def _target(target: Target) -> str:
    name, distribution = escape(target["name"]), escape(target["distribution"])
    state = NOT_SEARCHED
    if target["searched"]:
        state = f"{target['histories']} {searches_of(target['kind'])} in {target['seconds']:.0f} s"
        state += f", {target['compiled']} kernels compiled" if target["compiled"] else ""
    if target["largest"]:
        state += f"; {largest_of(target['largest'])}"
    if target["cut_short"]:
        state += f"; {target['cut_short']}"
    if target["failed"]:
        state += "; a check failed, as said above"
    facts = {
        "searched": state,
        "tested": pairs(target["tested"]),
        "not offered": ", ".join(target["not_offered"]),
        "checked": pairs({name: n for name, n in target["checked"].items() if n}),
        "batches": pairs(target["batches"]) if target["searched"] else "",
    }
    figure = (
        f"<figure>{plot(target)}<figcaption>Steps in which a path (row) ran while a condition "
        "(column) was met; the first column counts all its runs.</figcaption></figure>"
        if target["times"]
        else '<p class="faint">It declares no paths.</p>'
    )
    return _lines(
        [
            f'<section><h2 class="name">{name} <span class="faint">{distribution}</span></h2>',
            _facts(facts),
            _problems(target["problems"]),
            *(f"<p>WARNING: {escape(warning)}</p>" for warning in target["warnings"]),
            figure,
            _rows(target["rows"]) if target["rows"] else "",
            "</section>",
        ]
    )


def _rows(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [
        f"<tr><td>{row['kind']}</td><td><code>{escape(row['name'])}</code></td>"
        f"<td><code>{escape(row['must_equal'])}</code></td>"
        f'<td class="number">{row["times"]}</td>'
        f'<td class="{_TONES.get(row["verdict"], "bad")}">{row["verdict"]}</td></tr>'
        for row in rows
    ]
    head = (
        '<tr><th></th><th>name</th><th>must equal</th><th class="number">times reached</th>'
        "<th>verdict</th></tr>"
    )
    return f'<div class="scrolls"><table>{head}{"".join(lines)}</table></div>'


def _facts(facts: Mapping[str, str]) -> str:
    lines = [
        f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items() if fact
    ]
    return f"<table>{''.join(lines)}</table>"


def _problems(problems: Iterable[str]) -> str:
    return "".join(f'<p class="bad">FAILED: {escape(problem)}</p>' for problem in problems)


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(filter(None, parts))
