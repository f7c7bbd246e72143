"""The commands of ``python -m shardkit``; needs the packages of the extra ``cli``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.distributed as dist  # noqa: TID251 - it asks the ranks of another process group
import typer
from rich.text import Text
from typer.core import TyperGroup

import shardkit
from shardkit._doctor.command import doctor_command
from shardkit._errors import ShardkitError, StateError
from shardkit._text import console_of_tables, counted, shown_nbytes, table_of
from shardkit.backends.watch import runs
from shardkit.backends.watch.diagnosis import describe as describe_rank
from shardkit.backends.watch.rounds import Rounds
from shardkit.backends.watch.status import RankStatus
from shardkit.checkpoint._consolidate import (
    DEFAULT_SUFFIX,
    TensorSummary,
    consolidate,
    describe,
    verify,
)
from shardkit.config._command import config_command
from shardkit.launch import launch
from shardkit.planning._command import plan_command
from shardkit.tracing.command import trace_command

if TYPE_CHECKING:
    from collections.abc import Sequence


# --- why: where the ranks of a run are ------------------------------------------------------------

_CONNECT_S = 10.0
_ASKER = -1


def why(pid: int | None, *, stacks: bool) -> list[str]:
    """Ask the ranks of the latest run on this host, or of a process's run; else look back.

    Returns:
        Lines that say who waits for whom, then lines of each rank, with its stack if wanted and
        its entries in NCCL's flight recorder.
    """
    running = [run for run in runs.running() if pid in (None, run.pid)]
    if running:
        run = running[0]
        ranks = counted(run.world_size, "ranks")
        title = f"Run {run.name}: {ranks}, store on {run.host}:{run.port}."
        try:
            store = runs.connect(run.name, run.host, run.port, limit_s=_CONNECT_S)
            rounds = Rounds(store, run.world_size, _ASKER)
            diagnosis = rounds.ask()
        except dist.DistError as error:
            text: str | None = f"Its store does not answer: {error}"
            answers: Sequence[RankStatus] = []
        else:
            text = None if diagnosis is None else diagnosis.text
            answers = rounds.statuses
    else:
        if pid is not None:
            msg = f"process {pid} is no rank of a run of shardkit on this host. Leave --pid out."
            raise StateError(msg)
        found = runs.last_diagnosis()
        if found is None:
            msg = (
                "no run of shardkit is on this host, and no diagnosis of an earlier one. A rank is "
                "found from its first mesh on, by its own user, with the same temporary folder."
            )
            raise StateError(msg)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["at"]))
        title, text = f"The last diagnosis on this host, of {when}:", found["text"]
        answers = [RankStatus.load(text) for text in found["answers"]]
    lines = [title, text or "No rank waits.", ""]
    for answer in answers:
        lines += [describe_rank(answer), *(f"  {line}" for line in answer.engine)]
        if stacks and answer.stack:
            lines += ["", answer.stack.rstrip(), ""]
    return lines


# --- commands -------------------------------------------------------------------------------------

_NOT_ALL_VERIFIED = 3  # 2 means that the command line is wrong.


class _Commands(TyperGroup):
    """Commands that print errors which users can mend, and then exit with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        _show_anything()
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # The reader of the output has closed it.
        except (ShardkitError, OSError) as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Runs that start, runs that hang, plans of runs, where their time goes, checkpoints of "
        "sharded models, config files and machines.\n\n"
        "CKPT is a checkpoint directory (of shardkit, FSDP2 or torch.distributed.checkpoint), a "
        "file of torch.save or safetensors, a Hugging Face directory, or the common prefix of "
        "per-rank files."
    ),
)

_Source = Annotated[str, typer.Argument(metavar="CKPT", show_default=False)]
_Suffix = Annotated[
    str, typer.Option("--ckpt_suffix", "--ckpt-suffix", help="Pattern after the prefix.")
]


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's signature
    if wanted:
        print(f"shardkit {shardkit.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[  # noqa: FBT002 - a flag
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions."),
    ] = False,
) -> None:
    """Take the options before the command."""
    del version


@app.command(name="consolidate")
def consolidate_command(  # noqa: PLR0913, PLR0917 - options of a command
    paths: Annotated[
        list[str],
        typer.Argument(metavar="[CKPT] OUT", show_default=False, help="From what, and to where."),
    ],
    file_format: Annotated[
        Literal["torch", "safetensors"],
        typer.Option("--format", help="What torch.load reads, or Hugging Face's libraries."),
    ] = "torch",
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            help="Bytes of a file at most, e.g. 5GB; OUT is a directory then.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of floating-point tensors, e.g. bfloat16.", show_default=False),
    ] = None,
    optimizer: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--optimizer", help="The optimizer's state as well.")
    ] = False,
    model_key: Annotated[
        str | None,
        typer.Option("--model-key", help="Where the model is, e.g. app.model.", show_default=False),
    ] = None,
    ckpt_prefix: Annotated[
        str | None,
        typer.Option(
            "--ckpt_prefix",
            "--ckpt-prefix",
            help="What names of per-rank files begin with, in the place of CKPT.",
            show_default=False,
        ),
    ] = None,
    ckpt_suffix: _Suffix = DEFAULT_SUFFIX,
) -> None:
    """Write a checkpoint of many ranks as whole tensors.

    By default it writes the model alone, as in its state_dict(). It needs memory for the largest
    tensor.

    Examples:
        python -m shardkit consolidate checkpoints/step-1000 model.pt

        python -m shardkit consolidate checkpoints/step-1000 hf/ --format safetensors
        --max-shard-size 5GB

        python -m shardkit consolidate --ckpt_prefix run/final model.pt
    """
    sources = [ckpt_prefix] if ckpt_prefix is not None else []
    if len(sources) + len(paths) != 2:  # noqa: PLR2004 - from and to
        msg = "give CKPT and OUT, or --ckpt_prefix and OUT"
        raise typer.BadParameter(msg)
    source, out = [*sources, *paths]
    written = consolidate(
        source,
        out,
        format=file_format,
        max_shard_size=max_shard_size,
        dtype=_dtype(dtype),
        optimizer=optimizer,
        model_key=model_key,
        suffix=ckpt_suffix,
    )
    files = list(written.iterdir()) if written.is_dir() else [written]
    print(f"{written}: {shown_nbytes(sum(file.stat().st_size for file in files))}")


@app.command(name="inspect")
def inspect_command(
    source: _Source,
    as_json: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--json", help="For programs.")
    ] = False,
    ckpt_suffix: _Suffix = DEFAULT_SUFFIX,
) -> None:
    """Show names, shapes, dtypes, sizes, the step, and which files hold what."""
    found = describe(source, ckpt_suffix)
    if as_json:
        print(json.dumps({"source": source, **dataclasses.asdict(found)}, indent=2))
        return
    console = console_of_tables()
    facts = [
        found.kind,
        f"step {found.step}" if found.step is not None else "",
        counted(found.world_size, "ranks") if found.world_size is not None else "",
        f"{counted(len(found.entries), 'tensors')}, {shown_nbytes(found.nbytes)}",
        f"{counted(len(found.files), 'files')}, {shown_nbytes(sum(found.files.values()))}",
        "checksums" if found.has_checksums else "not all of it has checksums",
    ]
    console.print(Text(f"{source}: " + ", ".join(fact for fact in facts if fact)))
    places = {"name": "fold", "shape": "right", "dtype": "left", "size": "right", "where": "fold"}
    rows = [
        (e.name, str(list(e.shape)), e.dtype, shown_nbytes(e.nbytes), _where(e))
        for e in found.entries
    ]
    console.print(table_of(places, rows))
    if found.others:
        console.print(Text(f"no tensors: {', '.join(found.others)}"))


@app.command(name="verify")
def verify_command(source: _Source, ckpt_suffix: _Suffix = DEFAULT_SUFFIX) -> None:
    """Read everything and compare checksums.

    It exits with 1 if something is wrong, and with 3 if nothing is wrong but some data has no
    checksums.
    """
    found = verify(source, ckpt_suffix)
    for line in (*found.problems, *found.unverified):
        print(line, file=sys.stderr)
    if found.problems:
        raise typer.Exit(1)
    if found.unverified:
        print(f"{source}: nothing wrong was found, but not everything could be verified")
        raise typer.Exit(_NOT_ALL_VERIFIED)
    print(f"{source}: nothing is wrong")


@app.command(name="why")
def why_command(
    pid: Annotated[int | None, typer.Option(help="Of a rank; default: the latest run.")] = None,
    no_stacks: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--no-stacks", help="Do not print stacks.")
    ] = False,
) -> None:
    """Say why the ranks of a run on this host wait, and where each of them is.

    It asks the ranks, also those that hang. If there is no run, it prints the last diagnosis.
    """
    print("\n".join(why(pid, stacks=not no_stacks)))


app.command(name="config")(config_command)
app.command(name="doctor")(doctor_command)
app.command(name="plan")(plan_command)
app.command(name="trace")(trace_command)


@app.command(
    name="launch",
    add_help_option=False,  # torchrun has its own option for help.
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)
def launch_command(context: typer.Context) -> None:
    """Start a script in ranks, by torchrun, on one host or several; --help lists the options.

    Examples:
        python -m shardkit launch train.py

        python -m shardkit launch --config fsdp.yaml --max-restarts 3 train.py --lr 1e-3
    """
    raise typer.Exit(launch(context.args))


def _show_anything() -> None:
    """Print as escapes what a terminal cannot show: names, and what ranks write, are any bytes.

    What goes to a stream that was closed before this process began is not shown.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _dtype(name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name is not None else None
    if name is not None and not isinstance(found, torch.dtype):
        msg = f"--dtype must be a floating-point dtype of torch such as bfloat16, got {name!r}"
        raise typer.BadParameter(msg)
    return found


def _where(entry: TensorSummary) -> str:
    files = list(dict.fromkeys(chunk["file"] for chunk in entry.chunks))
    count = f"{len(entry.chunks)} chunks: " if len(entry.chunks) > len(files) else ""
    shown = files if len(files) <= 3 else [files[0], f"{len(files) - 2} more", files[-1]]  # noqa: PLR2004
    return count + ", ".join(shown)
