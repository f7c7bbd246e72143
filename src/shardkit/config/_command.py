"""``python -m shardkit config``: asks, and writes a config file. Needs the extra ``cli``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from shardkit._errors import ConfigError
from shardkit.config._config import from_config
from shardkit.config._questions import Terminal, asked_fields, default_fields
from shardkit.config._source import import_yaml

_DEFAULT_FILE = "fsdp.yaml"


def config_command(
    config_file: Annotated[
        Path, typer.Option("--config_file", "--config-file", help="Where to.")
    ] = Path(_DEFAULT_FILE),
    default: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--default", help="Ask nothing.")
    ] = False,
    mixed_precision: Annotated[
        Literal["no", "fp16", "bf16"],
        typer.Option("--mixed_precision", "--mixed-precision", help="With --default."),
    ] = "no",
    layers: Annotated[
        str | None,
        typer.Option(
            help="With --default: classes of layers, with commas between them.", show_default=False
        ),
    ] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes",
            "--num-processes",
            min=1,
            help="With --default; else one for each accelerator.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--overwrite", help="Replace the file.")
    ] = False,
) -> None:
    """Write a config file for shardkit.from_config, and for accelerate launch.

    Asks what it needs to know; a line alone takes what stands in brackets.

    Examples:
        python -m shardkit config

        python -m shardkit config --default --layers LlamaDecoderLayer --mixed_precision bf16
    """
    if config_file.exists() and not overwrite:
        print(
            f"{config_file} is there. Pass --overwrite, or another --config_file.", file=sys.stderr
        )
        raise typer.Exit(1)
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if default:
        fields = default_fields(
            num_processes=num_processes or count or 1,
            use_cpu=not count,
            mixed_precision=mixed_precision,
            layers=layers,
        )
    else:
        fields = asked_fields(Terminal(), num_processes=count or 1, use_cpu=not count)
    try:
        config = from_config(fields)
        _write(config_file, fields)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{config_file}:\n{config.describe()}")


def _write(path: Path, fields: dict[str, Any]) -> None:
    text = import_yaml().safe_dump(fields)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
