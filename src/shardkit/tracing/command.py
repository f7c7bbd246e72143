"""``python -m shardkit trace``: tables in the terminal, and files to view."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from shardkit._text import console_of_tables, counted, table_of
from shardkit.tracing.late import WINDOW, compared_steps
from shardkit.tracing.page import PlannedStep, write_page
from shardkit.tracing.perfetto import write_perfetto
from shardkit.tracing.picture import draw
from shardkit.tracing.trace import Share, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUM_ROWS = 20
_MIB = 2**20


def trace_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What record has written.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to put the files; default: FOLDER.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step in the picture; default: one in the middle.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="What `plan --hardware ... --json` has printed: a row of the page shows it."
        ),
    ] = None,
    png: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--png", help="Draw a step of up to 16 ranks, too: trace.png.")
    ] = False,
    no_files: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--no-files", help="Print the tables only.")
    ] = False,
) -> None:
    """Show where the time of steps goes on all ranks, and which ranks are late.

    Writes trace.html (a page that needs no network) and trace.json.gz (for ui.perfetto.dev).
    """
    trace = Trace.read(folder)
    if step is not None and not 0 <= step < trace.num_steps():
        msg = f"--step must be one of the {trace.num_steps()} steps from 0 on, got {step}"
        raise typer.BadParameter(msg)
    planned = None if plan is None else PlannedStep.read(plan)
    _show(trace)
    if planned is not None:
        print(planned)
    if not no_files:
        target = folder if out is None else out
        target.mkdir(parents=True, exist_ok=True)
        write_page(trace, target / "trace.html", planned)
        write_perfetto(trace, target / "trace.json.gz")
        if png:
            draw(trace, target / "trace.png", step)
        names = "trace.html, trace.json.gz" + ", trace.png" * png
        print(f"\nWritten to {target}: {names}.")


def _show(trace: Trace) -> None:
    console = console_of_tables()
    for line in _facts(trace):
        console.print(Text(line))
    shares = trace.shares()
    step_s = sum(share.seconds for share in shares)
    rows = [*shares[:_NUM_ROWS]]
    if rest := shares[_NUM_ROWS:]:
        rows.append(Share(f"{len(rest)} others", "", sum(share.seconds for share in rest)))
    columns = {"group": "fold", "cause": "left", "ms a step": "right", "%": "right"}
    texts = [(group, cause, f"{s * 1e3:.3f}", f"{s / step_s:.1%}") for group, cause, s in rows]
    console.print(table_of(columns, texts))


def _facts(trace: Trace) -> Iterator[str]:
    yield (
        f"{counted(len(trace.records), 'ranks')}, {counted(trace.num_steps(), 'steps')}, "
        f"{trace.step_s() * 1e3:.2f} ms a step (median); "
        f"buffers of shardkit have at most {trace.peak_nbytes() / _MIB:.1f} MiB on a rank"
    )
    if trace.missing:
        yield f"files of {len(trace.missing)} ranks are missing, rank {trace.missing[0]} first"
    cut = [record.header.rank for record in trace.records if not record.is_whole]
    if cut:
        yield f"the records of {len(cut)} ranks were cut off, rank {cut[0]} first"
    error_s = max(record.header.clock.error_s for record in trace.records)
    yield f"clocks of ranks agree within {error_s * 1e6:.0f} us"
    if not compared_steps(trace.slices):
        yield f"whether a rank is late shows in {WINDOW + 1} steps of two ranks or more"
    elif not trace.late:
        yield "no rank is late"
    for late in trace.late:
        yield str(late)
