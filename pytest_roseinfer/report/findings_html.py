"""The part of the page that shows what was found: in words, drawn step by step, and as files."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.drawn.blocks import draw, words
from pytest_roseinfer.findings.drawn.timeline import draw_timeline, timeline_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_roseinfer.findings.drawn.frame import Frame
    from pytest_roseinfer.findings.drawn.timeline import Timeline
    from pytest_roseinfer.findings.found import Found

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
