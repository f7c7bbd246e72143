"""Starting the ranks of this host by torchrun's agent, and saying how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from shardkit._errors import LaunchError
from shardkit.config import CONFIG_VARIABLE, from_config
from shardkit.launch import output, slurm
from shardkit.launch.arguments import check_script, meet, parse
from shardkit.launch.failures import failures_of, report
from shardkit.launch.network import check_interface, here_towards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, TextIO

    from shardkit.launch.arguments import Arguments

_WORKER = str(Path(__file__).with_name("worker.py"))
_SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_SIGNALLED = 128
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def launch(argv: Sequence[str]) -> int:
    """Start a script in ranks, and wait for them; what ``python -m shardkit launch`` does.

    Args:
        argv: Options, the script, and its arguments, as `sys.argv[1:]` has them.

    Returns:
        The exit status: 0; 1 if a rank failed; 128 and the number of the signal that ended it.

    Raises:
        LaunchError: There is no such script, what was asked for contradicts itself, or the hosts do
            not meet.
        ConfigError: The config file cannot be read.
    """
    arguments = parse(argv, read_config)
    check_script(arguments.torchrun.training_script, is_module=arguments.torchrun.module)
    os.environ.update(environment_of(arguments))
    if arguments.torchrun.slurm:
        tasks = slurm.tasks_of(os.environ)
        if tasks.world_size > tasks.num_hosts:  # Each task is a rank, SLURM has started them.
            os.environ.update(slurm.slurm_environment())
            _use_network(tasks.address, tasks.port)
            os.execv(sys.executable, [sys.executable, "-u", *_program(arguments)])  # noqa: S606
        arguments.torchrun.nnodes = str(tasks.num_hosts)
        meet(arguments, host=tasks.address, port=tasks.port, host_rank=tasks.host)
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
    """Return what all ranks have in their environment."""
    found = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": output.TEMPLATE}
    if arguments.min_hosts < arguments.max_hosts and _SHARE_STORE not in os.environ:
        # Torch 2.9 to 2.13 tells the address of a shared store in the first round only, so that a
        # host that comes later waits for it until it gives up.
        found[_SHARE_STORE] = "1"
    if arguments.config is not None:
        found[CONFIG_VARIABLE] = str(Path(arguments.config).resolve())
    if arguments.use_cpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif arguments.cards is not None:
        found["CUDA_VISIBLE_DEVICES"] = arguments.cards
    return found


def _reach_others(arguments: Arguments) -> None:
    """Say by which address and interface this host takes part."""
    options = arguments.torchrun
    if options.standalone and options.local_addr is None:
        # Torchrun takes the host's own name, which no name server may know.
        options.local_addr = "127.0.0.1"
    if arguments.max_hosts == 1:
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
    """Let the engines use the interface that leads to a host; return this host's address on it."""
    here = here_towards(host, port)
    for name in _INTERFACES:
        if here.interface is not None:
            os.environ.setdefault(name, here.interface)
    check_interface("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", ""), here)
    return here.address


@contextlib.contextmanager
def _logs(arguments: Arguments) -> Iterator[Path]:
    """Give a folder for what ranks write: of this launch alone, and kept if the user names one."""
    kept = arguments.torchrun.log_dir
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="shardkit-launch-") as folder:
            yield Path(folder)
        return
    Path(kept).mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-"
    yield Path(tempfile.mkdtemp(prefix=name, dir=kept))


def _program(arguments: Arguments) -> list[str]:
    """Return what a rank's Python is told to run."""
    options = arguments.torchrun
    flags = {"--install": arguments.install, "--module": options.module}
    wanted = [flag for flag, is_set in flags.items() if is_set]
    return [_WORKER, *wanted, options.training_script, *options.training_script_args]


def _run(arguments: Arguments, logs: Path) -> int:
    """Run torchrun's agent with all lines of ranks shown here; return the exit status."""
    options = arguments.torchrun
    num_ranks = int(torchrun.determine_local_world_size(options.nproc_per_node))
    program = _program(arguments)
    options.training_script, options.training_script_args = program[0], program[1:]
    options.module = False
    options.log_dir = str(logs)
    options.tee = "3"  # Both streams of each rank: into files, and from there to this terminal.
    try:
        with _rank_lines(arguments):
            torchrun.run(options)
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
    if output.wants_colour(arguments.color, sys.stderr):
        title = output.bold(title)
    sys.stderr.write("\n".join(("", title, *rest, "")))
    return status


@contextlib.contextmanager
def _rank_lines(arguments: Arguments) -> Iterator[None]:
    """Show what ranks write, line by line, with the number of the rank."""
    streams = [
        output.RankLines(stream, colour=output.wants_colour(arguments.color, stream))
        for stream in (sys.stdout, sys.stderr)
    ]
    try:
        with (
            contextlib.redirect_stdout(cast("TextIO", streams[0])),
            contextlib.redirect_stderr(cast("TextIO", streams[1])),
        ):
            yield
    finally:
        for stream in streams:
            stream.close()


def _not_met(arguments: Arguments, error: Exception) -> str:
    """Say that hosts did not meet, or lost each other between two starts."""
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
