"""The command ``trace``: the host's work and the device's in a steady decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

from roseinfer.bench import options, reporting
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.steps import step_trace

if TYPE_CHECKING:
    import argparse

    from roseinfer.bench.steps.step_trace import SpanRow, StepTimeRow

_STEPS = """\
All sequences decode, none comes or goes; medians. A step is what the host works and what it waits
for the device. device works us: from when the device began with a step's graph until it was done
with it, which is all it does in a step but a few small copies."""
_SPANS = "Some of those steps: what ran from when to when."


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("trace", help="what host and device do in a decode step")
    options.add_model(parser)
    group = parser.add_argument_group("work")
    whole = options.whole
    group.add_argument(
        "--sequences", type=whole(1), nargs="+", default=[1, 16, 64, 128, 256], metavar="N"
    )
    group.add_argument("--context", type=whole(1), default=128, help="tokens (%(default)s)")
    group.add_argument("--steps", type=whole(8), default=60, help="timed (%(default)s)")
    options.add_outputs(parser, plot=True)
    parser.set_defaults(run=_measure)


def _measure(args: argparse.Namespace, command: str) -> Report:
    source = ModelSource.of(args)
    llm = source.llm({"max_batch_size": max(args.sequences)})
    for sequences in args.sequences:
        step_trace.check(llm.engine, sequences, args.context, args.steps)
    rows: list[StepTimeRow] = []
    spans: list[SpanRow] = []
    for sequences in tqdm(args.sequences, desc="trace", unit="size", disable=None):
        row, some = step_trace.measure(llm, sequences, args.context, args.steps)
        rows.append(row)
        spans += some
    model = llm.engine.sessions.model
    return Report(
        benchmark="trace",
        command=command,
        date=reporting.now(),
        machine=reporting.this_machine(model.device),
        config={
            **source.described(model.dtype),
            "context": args.context,
            "steps": args.steps,
            "run_ahead": llm.config.lag(model.device.type),
        },
        facts={},
        tables=(Table("steps", _STEPS, rows), Table("spans", _SPANS, spans, printed=False)),
    )
