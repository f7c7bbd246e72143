"""What SLURM says of its tasks, as the variables that a launcher sets."""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from shardkit._errors import LaunchError
from shardkit._text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
"""Below those that Linux gives to outgoing connections."""
_NAME = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class Tasks(NamedTuple):
    """The tasks of a job step, and which of them this process is.

    Attributes:
        host: Number of its host in `hosts`.
        hosts: Names of all hosts.
        address: Host where the ranks meet: the first of them, or MASTER_ADDR.
        port: Port there, or MASTER_PORT.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: int
    hosts: tuple[str, ...]
    address: str
    port: int

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.hosts)


def slurm_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what torchrun would set, where `srun` has started one task for each rank.

        os.environ.update(slurm_environment())
        mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))

    Not needed under ``srun python -m shardkit launch --slurm script.py``, which does it.

    Args:
        environment: Variables with SLURM's among them; None: of this process. MASTER_ADDR and
            MASTER_PORT in it are kept.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR
        and MASTER_PORT. The ranks meet on the first host of the step, at a port that follows from
        the numbers of the job and of the step.

    Raises:
        LaunchError: This process was not started by `srun`, or a variable cannot be read.
    """
    environment = os.environ if environment is None else environment
    tasks = tasks_of(environment)
    return {
        "RANK": str(tasks.rank),
        "WORLD_SIZE": str(tasks.world_size),
        "LOCAL_RANK": str(tasks.local_rank),
        "LOCAL_WORLD_SIZE": str(tasks.local_world_size),
        "GROUP_RANK": str(tasks.host),
        "GROUP_WORLD_SIZE": str(tasks.num_hosts),
        "MASTER_ADDR": tasks.address,
        "MASTER_PORT": str(tasks.port),
    }


def tasks_of(environment: Mapping[str, str]) -> Tasks:
    """Return what SLURM's variables say.

    Raises:
        LaunchError: See `slurm_environment`.
    """

    def find(*names: str) -> str:
        for name in names:
            if environment.get(name):
                return environment[name]
        msg = (
            f"{names[0]} is not in the environment: `srun` sets it for each task. Write "
            f"`srun python -m shardkit launch --slurm script.py` in the batch script, and leave "
            f"--slurm out elsewhere."
        )
        raise LaunchError(msg)

    def number(*names: str) -> int:
        value = find(*names)
        if not value.isdecimal():
            msg = f"{names[0]} must be a number, got {value!r}."
            raise LaunchError(msg)
        return int(value)

    # Sbatch gives its script a task's place, too, but no step: others would be waited for.
    step = find("SLURM_STEP_ID", "SLURM_STEPID")
    host = number("SLURM_NODEID")
    # Those of the step come first: it may have fewer hosts than its job.
    hosts = host_names(find("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    per_host = tasks_per_host(find("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(per_host) != len(hosts) or host >= len(hosts):
        msg = (
            f"SLURM names the hosts {listed(hosts, str)} and {len(per_host)} numbers of tasks; "
            f"this is host {host}. They must belong together: start this process by `srun` itself."
        )
        raise LaunchError(msg)
    job = number("SLURM_JOB_ID", "SLURM_JOBID")
    chosen = environment.get("MASTER_PORT")
    offset = 31 * job + (int(step) if step.isdecimal() else 0)
    return Tasks(
        rank=number("SLURM_PROCID"),
        world_size=number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=number("SLURM_LOCALID"),
        local_world_size=per_host[host],
        host=host,
        hosts=hosts,
        address=environment.get("MASTER_ADDR") or hosts[0],
        port=number("MASTER_PORT") if chosen else _FIRST_PORT + offset % _NUM_PORTS,
    )


def host_names(nodelist: str) -> tuple[str, ...]:
    """Return the names that a list of SLURM's stands for, in its order.

    ``node[001-003,007],gpu-a`` is node001, node002, node003, node007 and gpu-a.

    Raises:
        LaunchError: It is no such list.
    """
    if _NAME.sub("", nodelist).strip(","):
        msg = f"{nodelist!r} is no list of hosts as SLURM writes them, such as node[001-003,007]."
        raise LaunchError(msg)
    found: list[str] = []
    for name in _NAME.findall(nodelist):
        parts = []
        for ranges, text in _PART.findall(name):
            parts.append([text] if text else [])
            for part in [] if text else ranges.split(","):
                first, _, last = part.partition("-")
                last = last or first
                if not (first.isdecimal() and last.isdecimal()):
                    msg = (
                        f"{nodelist!r} has {part!r} in brackets, where numbers must be: "
                        f"[001-003,007]."
                    )
                    raise LaunchError(msg)
                # With as many zeros as they were written with.
                parts[-1] += [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
        found += map("".join, itertools.product(*parts))
    return tuple(found)


def tasks_per_host(text: str) -> tuple[int, ...]:
    """Return how many tasks each host has: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        LaunchError: It is no such text.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None:
            msg = f"{text!r} does not say how many tasks hosts have, as SLURM does: 2(x3),1."
            raise LaunchError(msg)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)
