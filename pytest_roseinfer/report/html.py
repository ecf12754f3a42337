"""The verdict as one HTML file that loads nothing: no script, no font, no request."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.report.plot import plot
from pytest_roseinfer.report.verdict import NOT_SEARCHED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_roseinfer.report.verdict import Target, Verdict

_STYLE = """
:root { --paper: #fff; --ink: #1c2330; --faint: #66707f; --line: #d9dee5; --shade: #12707a;
        --good: #1a7f47; --bad: #c0262d; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --ink: #e4e8ee; --faint: #97a1b0; --line: #323a46; --shade: #35b3bf;
          --good: #4cc580; --bad: #ff6b70; } }
body { margin: 2.5rem auto; max-width: 66rem; padding: 0 1.5rem; background: var(--paper);
       color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { margin: 2.6rem 0 .4rem; font: 600 1rem ui-monospace, monospace; overflow-wrap: anywhere; }
.badge { padding: .1rem .7rem; border-radius: 1rem; margin-left: .6rem; font-size: 1rem;
         vertical-align: middle; }
.good { color: var(--good); } .bad { color: var(--bad); } .faint { color: var(--faint); }
.badge.good { background: var(--good); color: var(--paper); }
.badge.bad { background: var(--bad); color: var(--paper); }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .25rem 1.4rem .25rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 500; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
code, svg text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
figure { margin: 1rem 0; overflow-x: auto; }
figcaption { color: var(--faint); font-size: .9rem; }
svg text { fill: var(--ink); }
svg .cell { fill: var(--shade); } svg .empty { fill: none; stroke: var(--line); }
svg text.dark { fill: var(--paper); }
"""
_TONES = {"equal": "good", "met": "good", "not searched": "faint"}
"""The class of each verdict; the others are bad."""


def page(verdict: Verdict) -> str:
    targets = verdict["targets"]
    tone, word = ("good", "passed") if verdict["passed"] else ("bad", "failed")
    facts = {
        "device": verdict["device"],
        "profile": f"{verdict['profile']}: {verdict['examples']} examples of up to "
        f"{verdict['steps']} steps",
        "seed": str(verdict["seed"]),
        "required paths": "on" if verdict["required_paths"] else "off",
        "how much such a search finds": verdict["strength"],
        "versions": _pairs(verdict["versions"], " "),
        "environment": _pairs(verdict["environment"], "="),
    }
    body = [
        f'<h1>roseinfer: what was reached <span class="badge {tone}">{word}</span></h1>',
        _facts(facts),
        _problems(verdict["problems"]),
        *map(_target, targets),
        "" if targets else "<p>No cache was tested in this run.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<title>roseinfer report</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{_lines(body)}\n</body>\n</html>\n"
    )


def _target(target: Target) -> str:
    name, distribution = escape(target["name"]), escape(target["distribution"])
    state = NOT_SEARCHED
    if target["searched"]:
        state = f"{target['histories']} histories in {target['seconds']:.0f} s"
        state += f", {target['compiled']} kernels compiled" if target["compiled"] else ""
    if target["cut_short"]:
        state += f"; {target['cut_short']}"
    if target["failed"]:
        state += "; a check failed, as the output of the run shows"
    facts = {
        "searched": state,
        "tested": ", ".join(target["tested"]),
        "not offered": ", ".join(target["not_offered"]),
        "checked": _pairs(target["checked"], " "),
    }
    figure = (
        f"<figure>{plot(target)}<figcaption>Steps in which a path (row) ran while a condition "
        "(column) was met; the first column counts all its runs.</figcaption></figure>"
        if target["times"]
        else '<p class="faint">This cache declares no paths.</p>'
    )
    return _lines(
        [
            f'<h2>{name} <span class="faint">{distribution}</span></h2>',
            _facts(facts),
            _problems(target["problems"]),
            figure,
            _rows(target["rows"]) if target["rows"] else "",
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
    return f"<table>{head}{''.join(lines)}</table>"


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
