"""The verdict as one HTML file that loads nothing and makes no request."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.report.findings_html import findings_html
from pytest_roseinfer.report.page_style import SCRIPT, STYLE
from pytest_roseinfer.report.plot import plot
from pytest_roseinfer.report.verdict import NOT_SEARCHED
from pytest_roseinfer.running.coverage import RARELY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_roseinfer.report.verdict import Target, Verdict

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
        "versions": _pairs(verdict["versions"], " "),
        "environment": _pairs(verdict["environment"], "="),
    }
    return f"<section><h2>This run</h2>{_facts(facts)}</section>"


def _figure(title: str, drawn: str) -> str:
    return f"<section><h2>{escape(title)}</h2><figure>{drawn}</figure></section>"


def _target(target: Target) -> str:
    name, distribution = escape(target["name"]), escape(target["distribution"])
    state = NOT_SEARCHED
    searches = "mixes of requests" if target["kind"] == "engine" else "histories"
    if target["searched"]:
        state = f"{target['histories']} {searches} in {target['seconds']:.0f} s"
        state += f", {target['compiled']} kernels compiled" if target["compiled"] else ""
    if target["largest"]:
        most = ", ".join(f"{size} {name}" for name, size in target["largest"].items())
        state += f"; largest: {most}"
    if target["cut_short"]:
        state += f"; {target['cut_short']}"
    if target["failed"]:
        state += "; a check failed, as said above"
    facts = {
        "searched": state,
        "tested": _pairs(target["tested"], " "),
        "not offered": ", ".join(target["not_offered"]),
        "checked": _pairs({name: n for name, n in target["checked"].items() if n}, " "),
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


def _pairs(values: Mapping[str, object], sign: str) -> str:
    return ", ".join(f"{name}{sign}{value}" for name, value in values.items())


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(filter(None, parts))
