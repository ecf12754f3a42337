"""The newest kept run as Markdown, for a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.history.circumstances import differences
from pytest_roseinfer.gates.time.timing_report import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.gates.history.kept_runs import KeptRun


def in_markdown(runs: Sequence[KeptRun]) -> str:
    """Say what the newest run found, and in what its environment differs from the run before."""
    newest = runs[-1]
    lines = [f"### Decode steps at {newest.label}", ""]
    for part in (_times(newest), _work(newest), _environment(runs)):
        lines += [*part, ""]
    return "\n".join(lines)


def _times(run: KeptRun) -> Iterator[str]:
    if run.times:
        yield table(run.times, "github")
        yield ""
    for timed in run.times:
        yield f"- {_judged(timed)}"


def _judged(timed: dict[str, Any]) -> str:
    because = f" because {timed['doubt']}" if timed["doubt"] else ""
    return (
        f"`{timed['test']}`: **{timed['verdict']}**{because} against `{timed['against']}`, with a "
        f"margin of {timed['margin']:.1%} after {timed['series']} series, {timed['seconds']:.0f} s"
    )


def _work(run: KeptRun) -> Iterator[str]:
    if not run.work:
        return
    grew = [work for work in run.work if work["more"]]
    yield f"{len(grew)} of {len(run.work)} steps do more work than their baselines."
    for work in run.work:
        lines = [*work["more"], *work["less"]]
        if lines:
            yield from ("", f"`{work['test']}`, {work['step']}:", "", "```", *lines, "```")


def _environment(runs: Sequence[KeptRun]) -> Iterator[str]:
    newest = runs[-1]
    yield ", ".join(f"{name} {what}" for name, what in newest.environment.items())
    for timed in newest.times:
        there, here = timed["there"]["versions"], timed["here"]["versions"]
        for line in differences(there, here):
            yield f"- from there to here: {line}"
    for line in differences(runs[-2].environment, newest.environment) if len(runs) > 1 else ():
        yield f"- since the run before, at {runs[-2].label}: {line}"
