"""What torchrun is told: the command line, a config file below it, and defaults below that."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from shardkit._errors import LaunchError
from shardkit._text import Kind, NotOfKindError, nearest, number, seconds
from shardkit.config._schema import MAX_RANKS, TOP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PORT = 29500
_AS_MANY_AS_CARDS = -1  # As Accelerate writes it.
_ABOUT = """Start the ranks of a script by torchrun.

All options of torchrun are known, and the names of Accelerate for the most frequent ones. What is
not given comes from the config file (--config), which `accelerate config` writes. Without one there
is one host, with a rank for each card, or one rank where there is no card.
"""
# Accelerate's names; their values are what a config file has under the same name.
_OF_CONFIG = {
    "num_processes": "ranks of all hosts together",
    "num_machines": "hosts",
    "machine_rank": "of this host, from 0",
    "main_process_ip": "name or address of host 0, on a network that all share",
    "main_process_port": f"a free port there ({_PORT})",
}
# Torchrun's names of the same.
_OF_TORCHRUN = {
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}
# Torchrun's options of which no field is the same, and which it does not check.
_ALONE: dict[str, Kind] = {
    "max_restarts": number(0),
    "monitor_interval": seconds,
    "shutdown_timeout": number(0),
}


@dataclass(frozen=True)
class Arguments:
    """A launch."""

    # Options that `torch.distributed.run.run` takes, with those that are added here.
    torchrun: argparse.Namespace
    use_cpu: bool  # Whether cards are hidden from the ranks.
    cards: str | None  # Numbers of those that the ranks see, with commas between them; None: all.

    @property
    def min_hosts(self) -> int:
        """How many hosts it goes on with at the least."""
        return int(parse_min_max_nnodes(self.torchrun.nnodes)[0])

    @property
    def max_hosts(self) -> int:
        """How many hosts take part at the most."""
        return int(parse_min_max_nnodes(self.torchrun.nnodes)[1])


def parser() -> argparse.ArgumentParser:
    """Return torchrun's own parser, with the options of `launch` added."""
    result: argparse.ArgumentParser = get_args_parser()
    result.prog = "python -m shardkit launch"
    result.usage = "%(prog)s [options] script.py [arguments of the script]"
    for action in result._actions:  # noqa: SLF001 - what torch names training_script
        if action.dest == "training_script":
            action.metavar = "script.py"
    result.description = _ABOUT
    result.formatter_class = argparse.RawDescriptionHelpFormatter
    ours = result.add_argument_group("shardkit")
    ours.add_argument("--config", "--config_file", help="YAML file of `accelerate config`")
    ours.add_argument(
        "--install",
        action="store_true",
        help="let the script's `from torch.distributed.fsdp import fully_shard` be shardkit's",
    )
    ours.add_argument("--cpu", action="store_true", help="hide the cards from the ranks")
    ours.add_argument(
        "--xla",
        action="store_true",
        help="one process, which computes for all XLA devices of this host",
    )
    ours.add_argument(
        "--slurm",
        action="store_true",
        help="under srun: take hosts and ranks from SLURM's variables",
    )
    ours.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    for name, text in _OF_CONFIG.items():
        ours.add_argument(f"--{name}", f"--{name.replace('_', '-')}", help=text)
    return result


def parse(argv: Sequence[str], read_config: Any) -> Arguments:
    """Return what to launch; `read_config` returns the fields of a file by its path."""
    reader = parser()
    first = reader.parse_args(argv)
    written = read_config(first.config) if first.config else {}
    fields = {name: value for name, value in dict(written).items() if value is not None}
    reader.set_defaults(**dict.fromkeys(_OF_TORCHRUN.values()))  # None: not on the command line.
    fields |= _above_the_file(first, reader.parse_args(argv))
    fields = _parsed(fields)
    use_cpu = first.cpu or bool(fields.get("use_cpu"))
    on_xla = first.xla or str(fields.get("distributed_type", "")).upper() == "XLA"
    defaults = _defaults(fields, use_cpu=use_cpu, on_xla=on_xla)
    of_config = {name: value for name, value in defaults.items() if not _is_in_environment(name)}
    reader.set_defaults(nnodes=first.nnodes, node_rank=first.node_rank)
    reader.set_defaults(**of_config)
    torchrun = reader.parse_args(argv)
    if torchrun.no_python or torchrun.run_path:
        msg = "launch runs Python scripts and modules: leave out --no-python and --run-path."
        raise LaunchError(msg)
    if problem := _problem_of_counts(torchrun):
        msg = (
            f"--nnodes {torchrun.nnodes} --nproc-per-node {torchrun.nproc_per_node}: {problem}. "
            f"The first is a number of hosts, or two as 2:4; the second is a number of ranks on "
            f"this host, or cpu, gpu or auto."
        )
        raise LaunchError(msg)
    for name, kind in _ALONE.items():
        if hasattr(torchrun, name):  # Not all are options of each release.
            setattr(torchrun, name, _read(kind, name, getattr(torchrun, name)))
    chosen = str(fields.get("gpu_ids", "all"))
    result = Arguments(torchrun, use_cpu, None if chosen == "all" else chosen)
    if not first.slurm:
        _choose_rendezvous(result, fields)
    return result


def _problem_of_counts(torchrun: argparse.Namespace) -> str:
    try:
        hosts = parse_min_max_nnodes(torchrun.nnodes)
        counts = (*hosts, determine_local_world_size(torchrun.nproc_per_node))
    except (ValueError, RuntimeError) as error:
        return str(error)
    if hosts[0] > hosts[1]:
        return f"{hosts[0]} hosts at the least are more than {hosts[1]} at the most"
    wrong = [count for count in counts if not 1 <= count <= MAX_RANKS]
    return f"{wrong[0]} is not in 1 to {MAX_RANKS}" if wrong else ""


def check_script(script: str, *, is_module: bool) -> None:
    """Raise if there is no such script."""
    if is_module:
        name = script.partition(".")[0]
        if PathFinder.find_spec(name, [str(Path.cwd()), *sys.path[1:]]) is None:
            msg = f"there is no module {name!r}, neither in {Path.cwd()} nor installed."
            raise LaunchError(msg)
        return
    path = Path(script)
    if path.is_file():
        return
    beside = sorted(path.parent.glob("*.py")) if path.parent.is_dir() else []
    near = nearest(script, [str(file) for file in beside]) if beside else ""
    msg = f"there is no script {script!r} in {Path.cwd()}. {near}".rstrip()
    raise LaunchError(msg)


def _above_the_file(first: argparse.Namespace, given: argparse.Namespace) -> dict[str, Any]:
    """Return what the command line, and below it torchrun's variables, say of a file's fields.

    Args:
        first: All options, with torchrun's variables and defaults.
        given: The same with None where torchrun's names are not on the command line.
    """
    found = {}
    for name in _OF_CONFIG:
        own, theirs = getattr(first, name), _OF_TORCHRUN.get(name, "")
        other = getattr(given, theirs, None)
        if other is None and own is None and _is_in_environment(theirs):
            other = getattr(first, theirs)
        if None not in (own, other) and str(own) != str(other):
            option = theirs.replace("_", "-")
            msg = (
                f"--{option} {other} and --{name} {own} contradict each other: they are two names "
                f"of one thing. Give one of them."
            )
            raise LaunchError(msg)
        value = own if other is None else other
        if name == "num_machines" and own is None and not str(value or 0).isdigit():
            continue  # A number of hosts that may change, or nonsense, which torchrun tells.
        if value is not None:
            found[name] = value
    return found


def _parsed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of the command line as those of a file are read."""
    result = dict(fields)
    for name in _OF_CONFIG:  # Hosts before the rank of one of them.
        if name not in fields:
            continue
        kind = TOP[name].kind
        if name == "machine_rank" and "num_machines" in result:  # Else --nnodes says how many.
            kind = number(0, result["num_machines"] - 1)
        result[name] = _read(kind, name, fields[name])
    return result


def _read(kind: Kind, name: str, value: object) -> Any:
    """Return the value of an option; None if it is not given."""
    try:
        return None if value is None else kind(value)
    except NotOfKindError as error:
        raise LaunchError(error.sentence(name, value)) from None


def _is_in_environment(name: str) -> bool:
    """Say whether torchrun's own variable sets an option."""
    return f"PET_{name.upper()}" in os.environ


def _defaults(fields: Mapping[str, Any], *, use_cpu: bool, on_xla: bool) -> dict[str, Any]:
    hosts = int(fields.get("num_machines") or 1)
    if on_xla and hosts > 1:
        msg = (
            "on XLA shardkit trains on one host: num_machines must be 1. One process computes for "
            "all devices of a host."
        )
        raise LaunchError(msg)
    if on_xla:
        return {"nnodes": "1", "nproc_per_node": "1", "rdzv_backend": "static"}
    ranks = fields.get("num_processes")
    if ranks is None or int(ranks) == _AS_MANY_AS_CARDS:
        chosen = str(fields.get("gpu_ids", "all"))
        seen = torch.accelerator.device_count() if chosen == "all" else len(chosen.split(","))
        per_host = 1 if use_cpu else max(seen, 1)
    elif int(ranks) % hosts:
        msg = (
            f"num_processes counts the ranks of all hosts: {ranks} cannot be shared out evenly "
            f"among num_machines {hosts}. Choose a multiple, or leave both out and give --nnodes "
            f"and --nproc-per-node on each host."
        )
        raise LaunchError(msg)
    else:
        per_host = int(ranks) // hosts
    backend = str(fields.get("rdzv_backend") or "static")
    return {"nnodes": str(hosts), "nproc_per_node": str(per_host), "rdzv_backend": backend}


def _choose_rendezvous(arguments: Arguments, fields: Mapping[str, Any]) -> None:
    """Say where the hosts meet, unless torchrun was told."""
    torchrun = arguments.torchrun
    if torchrun.standalone:
        return
    if torchrun.rdzv_endpoint:  # All as torchrun has it.
        return
    where = fields.get("main_process_ip")
    port = fields.get("main_process_port")
    if arguments.max_hosts == 1 and where is None and port is None:
        torchrun.standalone = True
        return
    if arguments.max_hosts > 1 and where is None:
        msg = (
            f"{arguments.max_hosts} hosts must know where to meet: give the address of the first "
            f"one as --main_process_ip, and --machine_rank 0 there, 1 on the next host."
        )
        raise LaunchError(msg)
    meet(
        arguments,
        host=str(where or "127.0.0.1"),
        port=int(port or _PORT),
        host_rank=int(fields.get("machine_rank", 0)),
    )


def meet(arguments: Arguments, *, host: str, port: int, host_rank: int) -> None:
    """Change a launch so that the hosts meet at a port of the first one."""
    torchrun = arguments.torchrun
    if arguments.min_hosts < arguments.max_hosts and torchrun.rdzv_backend == "static":
        torchrun.rdzv_backend = "c10d"  # A number of hosts that may change needs it.
    if torchrun.rdzv_backend == "static":
        torchrun.master_addr, torchrun.master_port = host, port
        torchrun.node_rank = host_rank
        return
    torchrun.rdzv_endpoint = f"{host}:{port}"
    torchrun.node_rank = 0  # Torchrun warns of others: it numbers hosts by itself.
    if torchrun.rdzv_backend == "c10d" and "is_host" not in torchrun.rdzv_conf:
        # Else torchrun guesses by names, which are not always known.
        is_host = f"is_host={int(host_rank == 0)}"
        torchrun.rdzv_conf = ",".join(filter(None, (torchrun.rdzv_conf, is_host)))
