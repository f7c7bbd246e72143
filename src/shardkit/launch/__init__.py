"""Starting the ranks of a script: on one host or several, directly or under SLURM.

`launch` makes torchrun's options from the command line and a config file, and runs torchrun's agent
with them. It shows the output of the ranks and, at the end, their failures. It finds the address by
which other hosts reach this one. In each rank `worker` runs the script. `slurm` reads SLURM's
variables of its tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch.distributed import run as agent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from shardkit._doctor.facts import address_towards, interface_addresses
from shardkit._errors import LaunchError
from shardkit._text import Kind, nearest, number, read_as, seconds
from shardkit.config import CONFIG_VARIABLE, from_config
from shardkit.config._schema import MAX_RANKS, TOP
from shardkit.launch.slurm import slurm_environment

__all__ = ["launch", "slurm_environment"]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


# --- torchrun's options: from the command line, else a config file, else defaults -----------------


_PORT = 29500
_AS_MANY_AS_CARDS = -1  # Accelerate's notation.
_ABOUT = """Start the ranks of a script by torchrun.

All options of torchrun are known, and the names of Accelerate for the most frequent ones. What is
not given comes from the config file (--config), which `accelerate config` writes. Without one there
is one host, with a rank for each card, or one rank where there is no card.
"""
# Accelerate's names; in a config file, the fields of the same names have their values.
_OF_CONFIG = {
    "num_processes": "ranks of all hosts together",
    "num_machines": "hosts",
    "machine_rank": "of this host, from 0",
    "main_process_ip": "name or address of host 0, on a network that all share",
    "main_process_port": f"a free port there ({_PORT})",
}
# Torchrun's names of the same options.
_OF_TORCHRUN = {
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}
# Torchrun's options that have no field, and that it does not check.
_ALONE: dict[str, Kind] = {
    "max_restarts": number(0),
    "monitor_interval": seconds,
    "shutdown_timeout": number(0),
}


@dataclass(frozen=True)
class Arguments:
    """The options of a launch."""

    # Options for `torch.distributed.run.run`, with shardkit's own ones.
    torchrun: argparse.Namespace
    cards: str | None  # Numbers of the cards that ranks see, with commas; None: all.

    @property
    def hosts(self) -> tuple[int, int]:
        """The least number of hosts to go on with, and the largest number that take part."""
        least, most = agent.parse_min_max_nnodes(self.torchrun.nnodes)
        return least, most

    @property
    def is_elastic(self) -> bool:
        """Whether the number of hosts may change."""
        return self.hosts[0] < self.hosts[1]


def parser() -> argparse.ArgumentParser:
    """Return torchrun's own parser, with the options of `launch` added."""
    result: argparse.ArgumentParser = agent.get_args_parser()
    result.prog = "python -m shardkit launch"
    result.usage = "%(prog)s [options] script.py [arguments of the script]"
    for action in result._actions:  # noqa: SLF001 - torch names it training_script
        if action.dest == "training_script":
            action.metavar = "script.py"
        elif action.dest == "training_script_args":
            action.required = False  # Otherwise an error about a missing script names it, too.
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
    """Return the options of a launch; `read_config` returns the fields of a file by its path."""
    reader = parser()
    first = reader.parse_args(argv)
    written = read_config(first.config) if first.config else {}
    fields = {name: value for name, value in dict(written).items() if value is not None}
    reader.set_defaults(**dict.fromkeys(_OF_TORCHRUN.values()))  # None: not on the command line.
    fields |= _above_the_file(first, reader.parse_args(argv))
    for name in _OF_CONFIG:  # Read like those of a file; hosts before a host's rank.
        kind = TOP[name].kind
        if name == "machine_rank" and "num_machines" in fields:  # Otherwise --nnodes counts.
            kind = number(0, fields["num_machines"] - 1)
        if name in fields:
            fields[name] = read_as(kind, name, fields[name], LaunchError)
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
        value = getattr(torchrun, name, None)  # Not every release has all of them.
        if value is not None:
            setattr(torchrun, name, read_as(kind, name, value, LaunchError))
    chosen = "" if use_cpu else str(fields.get("gpu_ids", "all"))
    result = Arguments(torchrun, None if chosen == "all" else chosen)
    if not first.slurm:
        _choose_rendezvous(result, fields)
    return result


def _problem_of_counts(torchrun: argparse.Namespace) -> str:
    try:
        hosts = agent.parse_min_max_nnodes(torchrun.nnodes)
        counts = (*hosts, agent.determine_local_world_size(torchrun.nproc_per_node))
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
    folder = path if path.is_dir() else path.parent
    beside = sorted(folder.glob("*.py")) if folder.is_dir() else []
    near = nearest(script, [str(file) for file in beside]) if beside else ""
    if path.is_dir():
        msg = f"{script!r} is a directory. Give the script that each rank runs. {near}".rstrip()
    else:
        msg = f"there is no script {script!r} in {Path.cwd()}. {near}".rstrip()
    raise LaunchError(msg)


def _above_the_file(first: argparse.Namespace, given: argparse.Namespace) -> dict[str, Any]:
    """Return fields from the command line and, below it, from torchrun's variables.

    Args:
        first: All options, with torchrun's variables and defaults.
        given: The same options, with None where torchrun's names are not on the command line.
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
            continue  # An elastic number, or nonsense that torchrun reports.
        if value is not None:
            found[name] = value
    return found


def _is_in_environment(name: str) -> bool:
    """Return whether torchrun's own variable sets an option."""
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
    """Choose where the hosts meet, unless torchrun's options say so."""
    torchrun = arguments.torchrun
    if torchrun.standalone or torchrun.rdzv_endpoint:  # Torchrun's own choice.
        return
    most = arguments.hosts[1]
    where = fields.get("main_process_ip")
    port = fields.get("main_process_port")
    if most == 1 and where is None and port is None:
        torchrun.standalone = True
        return
    if most > 1 and where is None:
        msg = (
            f"{most} hosts must know where to meet: give the address of the first "
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
    """Change a launch so that the hosts meet at a port of the first host."""
    torchrun = arguments.torchrun
    if arguments.is_elastic and torchrun.rdzv_backend == "static":
        torchrun.rdzv_backend = "c10d"  # An elastic number of hosts needs it.
    if torchrun.rdzv_backend == "static":
        torchrun.master_addr, torchrun.master_port = host, port
        torchrun.node_rank = host_rank
        return
    torchrun.rdzv_endpoint = f"{host}:{port}"
    torchrun.node_rank = 0  # Torchrun warns about others: it numbers hosts itself.
    if torchrun.rdzv_backend == "c10d" and "is_host" not in torchrun.rdzv_conf:
        # Otherwise torchrun guesses it from names, which are not always known.
        is_host = f"is_host={int(host_rank == 0)}"
        torchrun.rdzv_conf = ",".join(filter(None, (torchrun.rdzv_conf, is_host)))


# --- failures -------------------------------------------------------------------------------------

_PARTED = "RankMismatchError: "
_ERROR_FILE = "error.json"


@dataclass(frozen=True)
class Failure:
    """The failure of one rank on this host."""

    rank: int
    local_rank: int
    at: float  # Time in seconds since 1970.
    message: str  # Type and text of its exception, or the way in which its process ended.
    traceback: str  # Traceback of its exception; empty: its process ended without one.

    @property
    def diagnosis(self) -> str | None:
        """The report of diverging ranks, if the rank failed with one."""
        return self.message.removeprefix(_PARTED) if self.message.startswith(_PARTED) else None


def failures_of(error: ChildFailedError, logs: Path) -> list[Failure]:
    """Return the failures of ranks on this host, in the order of time.

    Torchrun ends the other ranks when it sees the first process that has failed. The error files
    that they have left until then, in the folder of this launch, count as well.
    """
    rank_0 = next(rank - failure.local_rank for rank, failure in error.failures.items())
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda path: int(path.name.split("_")[1]))
    files = {
        int(file.parent.name): file
        for attempt in attempts[-1:]
        for file in attempt.glob(f"*/{_ERROR_FILE}")
    }
    read = {local: _of_file(file, rank_0 + local, local) for local, file in files.items()}
    found = [failure for failure in read.values() if failure is not None]
    found += [
        _without_file(rank, failure)
        for rank, failure in error.failures.items()
        if read.get(failure.local_rank) is None and failure.exitcode != -signal.SIGTERM
    ]
    if not found:  # Something else has ended all of them.
        found = [_without_file(*error.get_first_failure())]
    # In the order of time; ranks that only report another rank's failure come last.
    return sorted(found, key=lambda failure: (failure.diagnosis is not None, failure.at))


def _of_file(file: Path, rank: int, local_rank: int) -> Failure | None:
    """Return the failure in a rank's file; None if the rank was ended while it wrote."""
    try:
        content = json.loads(file.read_text("utf-8"))["message"]
    except ValueError:
        return None
    # The time in the file has only whole seconds.
    at = file.stat().st_mtime
    if not isinstance(content, dict):
        return Failure(rank, local_rank, at, str(content), "")
    traceback = content.get("extraInfo", {}).get("py_callstack", "")
    return Failure(rank, local_rank, at, content.get("message", ""), traceback)


def _without_file(rank: int, failure: ProcessFailure) -> Failure:
    """Return the failure of a process that left no file."""
    code = failure.exitcode
    how = (
        f"process {failure.pid} ended with exit status {code} and no exception; its own lines "
        f"above may say why"
    )
    if code < 0:
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        killed = " The system does that where memory runs out, torchrun if a rank ignores SIGTERM."
        cause = killed if name == "SIGKILL" else ""
        how = f"process {failure.pid} was ended by {name}.{cause}"
    return Failure(rank, failure.local_rank, failure.timestamp, how, "")


def report(failures: list[Failure], num_ranks: int) -> str:
    """Return the final report: the diagnosis, if there is one, and the first rank's traceback."""
    first, *others = failures
    host, when = socket.gethostname(), time.strftime("%H:%M:%S", time.localtime(first.at))
    count = f"{len(failures)} of {num_ranks} ranks on {host} failed"
    lines = [f"shardkit launch: {count}, first rank {first.rank} at {when}."]
    lines += [
        f"rank {other.rank}: {(other.message.splitlines() or ['no message'])[0]}"
        for other in others
        if other.diagnosis is None
    ]
    told = next((each for each in others if each.diagnosis is not None), None)
    if told is not None and first.diagnosis is None:
        lines += ["", f"What rank {told.rank} was told:", str(told.diagnosis)]
    lines += ["", f"rank {first.rank}:", first.traceback.rstrip() or first.message]
    return "\n".join(lines)


# --- output ---------------------------------------------------------------------------------------

TEMPLATE = "[rank ${rank}] "
"""Text that torchrun's agent puts before each piece of a rank's output."""

_HEADER = re.compile(r"\[rank (\d+)\] ")
_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
# Colours of a terminal's own palette, readable on a dark and on a light background.
_COLOURS = tuple(f"\x1b[{code}m" for code in (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91))


def wants_colour(choice: str, stream: TextIO) -> bool:
    """Return whether a stream gets colours; ``"auto"``: a terminal without ``NO_COLOR``."""
    if choice == "auto":
        return not os.environ.get("NO_COLOR") and stream.isatty()
    return choice == "always"


class RankLines:
    """A stream for the output of ranks, which torchrun's agent writes from several threads.

    The agent writes the text that it finds in a rank's file, which may be half a line. This stream
    keeps a line until it is complete, so that lines of different ranks do not mix. With `colour`,
    each header has the colour of its rank. What cannot be shown is left out, since ranks need no
    reader: the terminal may be closed, the other end of a pipe, or a disk full.
    """

    def __init__(self, stream: TextIO, *, colour: bool) -> None:
        self._stream = stream
        self._colour = colour
        self._unfinished: dict[int, str] = {}
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Write a piece of a rank's output, or a line of this process."""
        with self._lock:
            found = _HEADER.match(text)
            if found is None:
                self._show(text)
                return len(text)
            rank = int(found[1])
            line = self._unfinished.pop(rank, "") + text[found.end() :]
            if line.endswith("\n"):
                self._show_line(rank, line)
            else:
                self._unfinished[rank] = line
        return len(text)

    def close(self) -> None:
        """Show unfinished lines. The stream below stays open."""
        with self._lock:
            for rank, line in sorted(self._unfinished.items()):
                self._show_line(rank, f"{line}\n")
            self._unfinished.clear()

    def __getattr__(self, name: str) -> Any:
        if name not in {"flush", "isatty", "fileno", "encoding", "errors"}:
            raise AttributeError(name)  # Other methods would bypass the lock.
        return getattr(self._stream, name)

    def _show_line(self, rank: int, line: str) -> None:
        header = f"[rank {rank}]"
        if self._colour:
            header = f"{_COLOURS[rank % len(_COLOURS)]}{header}{_RESET}"
        self._show(f"{header} {line}")

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


# --- addresses ------------------------------------------------------------------------------------


class Here(NamedTuple):
    """This host, as another host sees it."""

    address: str  # Numeric address.
    interface: str | None  # Name of the interface; None: unknown.


def here_towards(host: str, port: int) -> Here:
    """Return the address and the interface by which this host reaches another one.

    Nothing is sent. If `host` is this host, the interface is the one that has its address.
    """
    try:
        own = address_towards(host, port)
    except socket.gaierror as error:
        msg = (
            f"this host ({socket.gethostname()}) does not know {host!r}, where the ranks are to "
            f"meet: {error.strerror}. Give the IP address of the first host as "
            f"--main_process_ip, or the name that a name server or /etc/hosts has."
        )
        raise LaunchError(msg) from None
    except OSError as error:
        own_addresses = ", ".join(each[0] for each in interface_addresses().values() if each)
        msg = (
            f"no route leads from this host ({socket.gethostname()}) to {host}, where the ranks "
            f"are to meet: {error}. Its addresses are {own_addresses or 'none'}. Give an address "
            f"of the network that all hosts share as --main_process_ip."
        )
        raise LaunchError(msg) from None
    known = interface_addresses()
    return Here(own, next((name for name, each in known.items() if own in each), None))


def check_interface(chosen: str, here: Here) -> None:
    """Refuse interfaces that do not lead to other hosts: ranks would wait for half an hour."""
    known = interface_addresses()
    wanted = here.interface or f"the one with the address {here.address}"
    for name in filter(None, chosen.split(",")):
        own = known.get(name, [])
        alone = bool(own) and ipaddress.ip_address(own[0]).is_loopback
        if name not in known or (alone and not ipaddress.ip_address(here.address).is_loopback):
            problem = "leads to no other host" if alone else "is not on this host"
            msg = (
                f"GLOO_SOCKET_IFNAME={chosen}: {name} {problem} ({socket.gethostname()}). {wanted} "
                f"leads to the first host. Leave the variable out, or set it to the interface of "
                f"the network that all hosts share."
            )
            raise LaunchError(msg)


# --- start ----------------------------------------------------------------------------------------

_WORKER = str(Path(__file__).with_name("worker.py"))
_SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_SIGNALLED = 128
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def launch(argv: Sequence[str]) -> int:
    """Start a script in ranks, and wait for them: the work of ``python -m shardkit launch``.

    Args:
        argv: Options, the script, and its arguments, in the form of `sys.argv[1:]`.

    Returns:
        The exit status: 0; 1 if a rank failed; or 128 plus the number of the signal that ended it.

    Raises:
        LaunchError: There is no such script, options contradict each other, or the hosts do not
            meet.
        ConfigError: The config file cannot be read.
    """
    arguments = parse(argv, read_config)
    check_script(arguments.torchrun.training_script, is_module=arguments.torchrun.module)
    os.environ.update(environment_of(arguments))
    if arguments.torchrun.slurm:
        tasks = slurm_environment()
        address, port, hosts = (
            tasks[name] for name in ("MASTER_ADDR", "MASTER_PORT", "GROUP_WORLD_SIZE")
        )
        if int(tasks["WORLD_SIZE"]) > int(hosts):  # Each task is a rank that SLURM has started.
            os.environ.update(tasks)
            _use_network(address, int(port))
            os.execv(sys.executable, [sys.executable, "-u", *_program(arguments)])  # noqa: S606
        arguments.torchrun.nnodes = hosts
        meet(arguments, host=address, port=int(port), host_rank=int(tasks["GROUP_RANK"]))
    _reach_others(arguments)
    with _logs(arguments) as logs:
        return _run(arguments, logs)


def read_config(path: str) -> Mapping[str, Any]:
    """Return the fields of a config file."""
    settings = from_config(path).settings
    return settings.launcher | {
        "use_cpu": settings.device_type == "cpu",
        "distributed_type": settings.distributed_type,
        "num_processes": settings.num_processes,
        "num_machines": settings.num_machines,
    }


def environment_of(arguments: Arguments) -> dict[str, str]:
    """Return the environment variables that all ranks get."""
    found = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": TEMPLATE}
    if arguments.is_elastic and _SHARE_STORE not in os.environ:
        # Torch 2.9 to 2.13 sends the address of a shared store in the first round only, so a host
        # that comes later waits for it until its time limit.
        found[_SHARE_STORE] = "1"
    if arguments.torchrun.config is not None:
        found[CONFIG_VARIABLE] = str(Path(arguments.torchrun.config).resolve())
    if arguments.cards is not None:
        found["CUDA_VISIBLE_DEVICES"] = arguments.cards
    return found


def _reach_others(arguments: Arguments) -> None:
    """Set the address and the interface by which this host takes part."""
    options = arguments.torchrun
    if options.standalone and options.local_addr is None:
        # Torchrun uses the host's own name, which may be unknown to name servers.
        options.local_addr = "127.0.0.1"
    if arguments.hosts[1] == 1:
        return
    if options.rdzv_backend == "static":
        host, port = options.master_addr, options.master_port
    else:
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=-1)
    number = f"number {options.node_rank} " if options.rdzv_backend == "static" else ""
    sys.stderr.write(
        f"shardkit launch: this host is {number}of {options.nnodes}, and meets the others at "
        f"{host}:{port} ({options.rdzv_backend}).\n"
    )
    address = _use_network(host, int(port))
    if options.local_addr is None:
        options.local_addr = address


def _use_network(host: str, port: int) -> str:
    """Let the engines use the interface that leads to a host; return its address."""
    here = here_towards(host, port)
    for name in _INTERFACES:
        if here.interface is not None:
            os.environ.setdefault(name, here.interface)
    check_interface(os.environ.get("GLOO_SOCKET_IFNAME", ""), here)
    return here.address


@contextlib.contextmanager
def _logs(arguments: Arguments) -> Iterator[Path]:
    """Yield a folder for the ranks' files, of this launch alone; kept if the user names one."""
    kept = arguments.torchrun.log_dir
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="shardkit-launch-") as folder:
            yield Path(folder)
        return
    Path(kept).mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-"
    yield Path(tempfile.mkdtemp(prefix=name, dir=kept))


def _program(arguments: Arguments) -> list[str]:
    """Return the command line for the Python of a rank."""
    options = arguments.torchrun
    flags = {"--install": options.install, "--module": options.module}
    wanted = [flag for flag, is_set in flags.items() if is_set]
    return [_WORKER, *wanted, options.training_script, *options.training_script_args]


def _run(arguments: Arguments, logs: Path) -> int:
    """Run torchrun's agent with all lines of ranks shown here; return the exit status."""
    options = arguments.torchrun
    num_ranks = int(agent.determine_local_world_size(options.nproc_per_node))
    program = _program(arguments)
    options.training_script, options.training_script_args = program[0], program[1:]
    options.module = False
    options.log_dir = str(logs)
    options.tee = "3"  # Both streams of each rank go into files, and from there to this terminal.
    if hasattr(options, "signals_to_handle"):  # Not every release has it.
        ignored = {each.name for each in signal.Signals if signal.getsignal(each) is signal.SIG_IGN}
        names = options.signals_to_handle.split(",")
        options.signals_to_handle = ",".join(name for name in names if name not in ignored)
    try:
        with contextlib.ExitStack() as stack:
            for stream, redirect in (
                (sys.stdout, contextlib.redirect_stdout),
                (sys.stderr, contextlib.redirect_stderr),
            ):
                lines: Any = RankLines(stream, colour=wants_colour(options.color, stream))
                stack.enter_context(contextlib.closing(lines))
                stack.enter_context(redirect(lines))
            agent.run(options)
    except ChildFailedError as error:
        text, status = report(failures_of(error, logs), num_ranks), 1
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        text = f"shardkit launch: {name} came; the ranks of this host have been ended."
        status = _SIGNALLED + int(error.sigval)
    except (RendezvousError, dist.DistError) as error:
        raise LaunchError(_not_met(arguments, error)) from error
    else:
        return 0
    title, *rest = text.split("\n", maxsplit=1)
    if wants_colour(options.color, sys.stderr):
        title = f"{_BOLD}{title}{_RESET}"
    sys.stderr.write("\n".join(("", title, *rest, "")))
    return status


def _not_met(arguments: Arguments, error: Exception) -> str:
    """Return the message that hosts did not meet, or lost each other between two starts."""
    options = arguments.torchrun
    where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    cause = error.__cause__ or error.__context__ or error
    return (
        f"this host ({socket.gethostname()}, {options.local_addr or 'localhost'}) and the others "
        f"do not meet at {where}: {type(error).__name__}: {error} ({type(cause).__name__}: "
        f"{cause}). The command must run on {options.nnodes} hosts within the same minutes, with "
        f"the same address, port and --rdzv-id; the port must be open, and the host that holds it "
        f"must be there for as long as the others run."
    )
