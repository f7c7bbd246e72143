"""``python -m shardkit config`` asks questions and writes a file. Needs the extra ``cli``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer

from shardkit._errors import ConfigError
from shardkit._wrapping.policies import MIN_NUM_PARAMS
from shardkit.config._config import from_config
from shardkit.config._schema import PREFETCHES, STATE_DICTS, STRATEGIES, WRAPS
from shardkit.config._source import import_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence


# --- questions ------------------------------------------------------------------------------------

_PREFIX = "parallelism_config_"
_SIZES = {
    "dp_replicate_size": "How many replicas are there?",
    "dp_shard_size": "Over how many ranks is each of them sharded?",
    "tp_size": "Over how many ranks are weights split (tensor parallelism)?",
}
# Fields that Accelerate writes in every file.
_COMMON: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
}


class Terminal:
    """Asks at the terminal, and repeats a question until the answer is valid."""

    def choice(self, text: str, words: Sequence[str], default: str) -> str:
        """Return one of `words`."""
        by_word = {word.lower(): word for word in words}
        while True:
            answer = str(typer.prompt(f"{text} ({', '.join(words)})", default=default))
            if answer.strip().lower() in by_word:
                return by_word[answer.strip().lower()]
            typer.echo(f"It is one of {', '.join(words)}.")

    def number(self, text: str, default: int, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        while True:
            answer: int = typer.prompt(text, default=default, type=int)
            if answer >= least:
                return answer
            typer.echo(f"It is at least {least}.")

    def yes(self, text: str, *, default: bool) -> bool:
        """Return whether the answer is yes."""
        return typer.confirm(text, default=default)

    def text(self, text: str) -> str:
        """Return the answer as text."""
        while True:
            answer: str = typer.prompt(text, default="", show_default=False)
            if answer.strip():
                return answer.strip()
            typer.echo("It is asked for, and there is no default: write it, or end by ctrl-C.")


def default_fields(
    *, num_processes: int, use_cpu: bool, mixed_precision: str = "no", layers: str | None = None
) -> dict[str, Any]:
    """Return a config for this machine that suits every model: version 2, full sharding.

    Groups are the classes in `layers`, or modules of at least 100 million parameters.
    """
    fsdp: dict[str, Any] = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
    if layers is None:
        fsdp |= {"fsdp_auto_wrap_policy": WRAPS[1], "fsdp_min_num_params": MIN_NUM_PARAMS}
    else:
        fsdp |= {"fsdp_auto_wrap_policy": WRAPS[0], "fsdp_transformer_layer_cls_to_wrap": layers}
    fsdp |= {
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": False,
    }
    return _COMMON | {
        "fsdp_config": fsdp,
        "mixed_precision": mixed_precision,
        "num_processes": num_processes,
        "use_cpu": use_cpu,
    }


def asked_fields(ask: Terminal, *, num_processes: int, use_cpu: bool) -> dict[str, Any]:
    """Ask questions, and return the fields of a config; the arguments are the defaults."""
    use_cpu = ask.yes("Do the ranks compute on the CPU?", default=use_cpu)
    machines = _machines(ask)
    fsdp = _fsdp(ask)
    sizes: dict[str, Any] = {}
    if fsdp["fsdp_version"] == 2 and ask.yes(  # noqa: PLR2004 - the version
        "Is the mesh more than one axis of all ranks (replicas, tensor parallelism)?", default=False
    ):
        sizes = {_PREFIX + name: ask.number(text, 1) for name, text in _SIZES.items()}
        num_processes = math.prod(sizes.values())
        sizes[f"{_PREFIX}cp_size"] = 1
        if sizes[f"{_PREFIX}tp_size"] > 1:
            fsdp["fsdp_cpu_ram_efficient_loading"] = False
    else:
        num_processes = ask.number(
            "How many ranks are there, on all machines together?", num_processes
        )
    fields = {
        "fsdp_config": fsdp,
        "mixed_precision": ask.choice("Mixed precision?", ("no", "fp16", "bf16"), "no"),
        "num_processes": num_processes,
        "use_cpu": use_cpu,
    }
    return _COMMON | fields | machines | ({"parallelism_config": sizes} if sizes else {})


def _machines(ask: Terminal) -> dict[str, Any]:
    number = ask.number("How many machines are there?", 1)
    if number == 1:
        return {}
    return {
        "num_machines": number,
        "machine_rank": ask.number("What is the rank of this machine, from 0 on?", 0, 0),
        "main_process_ip": ask.text("What is the address of machine 0?"),
        "main_process_port": ask.number("Which port of it is free?", 29500),
        "same_network": ask.yes("Are all machines in one local network?", default=True),
    }


def _fsdp(ask: Terminal) -> dict[str, Any]:
    version = int(ask.choice("Which fsdp_version has the file?", ("1", "2"), "2"))
    fields: dict[str, Any] = {"fsdp_version": version}
    if version == 1:
        fields["fsdp_sharding_strategy"] = ask.choice("What is sharded?", STRATEGIES, "FULL_SHARD")
    else:
        fields["fsdp_reshard_after_forward"] = ask.yes(
            "Are parameters resharded after forward (less memory, more traffic)?", default=True
        )
    fields["fsdp_offload_params"] = ask.yes(
        "Are shards, gradients and optimizer state kept on the host?", default=False
    )
    policy = ask.choice("Which modules become groups?", WRAPS, WRAPS[0])
    fields["fsdp_auto_wrap_policy"] = policy
    if policy == WRAPS[0] and not ask.yes(
        "Does the model name their classes in _no_split_modules, as transformers' do?",
        default=False,
    ):
        fields["fsdp_transformer_layer_cls_to_wrap"] = ask.text(
            "Names of the classes, with commas between them"
        )
    if policy == WRAPS[1]:
        fields["fsdp_min_num_params"] = ask.number("From how many parameters on?", MIN_NUM_PARAMS)
    kinds = STATE_DICTS if version == 1 else (STATE_DICTS[2], STATE_DICTS[0])
    if version == 1:
        fields["fsdp_backward_prefetch"] = ask.choice(
            "When does backward gather the next group?", tuple(PREFETCHES), "BACKWARD_PRE"
        )
        fields["fsdp_forward_prefetch"] = ask.yes(
            "Does forward gather the next group?", default=True
        )
    fields["fsdp_state_dict_type"] = ask.choice(
        "How is training state saved?", kinds, "SHARDED_STATE_DICT"
    )
    efficient = ask.yes("Do all ranks get the values of rank 0's model?", default=True)
    fields["fsdp_cpu_ram_efficient_loading"] = efficient
    if version == 1:
        fields |= {"fsdp_sync_module_states": efficient, "fsdp_use_orig_params": True}
    fields["fsdp_activation_checkpointing"] = policy != WRAPS[2] and ask.yes(
        "Are activations of groups computed again in backward (less memory)?", default=False
    )
    return fields


# --- the command ----------------------------------------------------------------------------------

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

    The command asks for what it must know; an empty line takes the answer in brackets.

    Examples:
        python -m shardkit config

        python -m shardkit config --default --layers LlamaDecoderLayer --mixed_precision bf16
    """
    if config_file.is_dir():
        msg = f"--config_file must be the name of a file, and {config_file} is a directory."
        raise ConfigError(msg)
    if config_file.exists() and not overwrite:
        msg = f"{config_file} is there. Pass --overwrite, or another --config_file."
        raise ConfigError(msg)
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
    config = from_config(fields)
    text = import_yaml().safe_dump(fields)
    config_file.parent.mkdir(parents=True, exist_ok=True)
    part = config_file.with_name(f"{config_file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(config_file)
    print(f"{config_file}:\n{config.describe()}")
