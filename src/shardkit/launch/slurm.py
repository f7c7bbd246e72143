"""SLURM's variables of its tasks, converted to the variables that a launcher sets."""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING

from shardkit._errors import LaunchError
from shardkit._text import listed, read_as
from shardkit._text import number as whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
"""Ports below those that Linux uses for outgoing connections."""
_NAME = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def slurm_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of torchrun, if `srun` has started one task for each rank.

        os.environ.update(slurm_environment())
        mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))

    It is not needed under ``srun python -m shardkit launch --slurm script.py``, which calls it.

    Args:
        environment: Variables, SLURM's among them; None: those of this process. MASTER_ADDR and
            MASTER_PORT in it are kept.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR
        and MASTER_PORT. The ranks meet on the first host of the step, at a port that is computed
        from the numbers of the job and of the step.

    Raises:
        LaunchError: This process was not started by `srun`, or a variable cannot be read.
    """
    variables = os.environ if environment is None else environment

    def find(*names: str) -> str:
        for name in names:
            if variables.get(name):
                return variables[name]
        msg = (
            f"{names[0]} is not in the environment: `srun` sets it for each task. Write "
            f"`srun python -m shardkit launch --slurm script.py` in the batch script, and leave "
            f"--slurm out elsewhere."
        )
        raise LaunchError(msg)

    def number(*names: str) -> int:
        found: int = read_as(whole_number(), names[0], find(*names), LaunchError)
        return found

    # Sbatch gives its script the place of a task, too, but no step: it would wait for other tasks.
    step = find("SLURM_STEP_ID", "SLURM_STEPID")
    host = number("SLURM_NODEID")
    # Variables of the step come first: it may have fewer hosts than its job.
    hosts = host_names(find("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    per_host = tasks_per_host(find("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(per_host) != len(hosts) or host >= len(hosts):
        msg = (
            f"SLURM names the hosts {listed(hosts, str)} and {len(per_host)} numbers of tasks; "
            f"this is host {host}. They must belong together: start this process by `srun` itself."
        )
        raise LaunchError(msg)
    offset = 31 * number("SLURM_JOB_ID", "SLURM_JOBID") + (int(step) if step.isdecimal() else 0)
    chosen = number("MASTER_PORT") if variables.get("MASTER_PORT") else None
    port = _FIRST_PORT + offset % _NUM_PORTS if chosen is None else chosen
    return {
        "RANK": str(number("SLURM_PROCID")),
        "WORLD_SIZE": str(number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
        "LOCAL_RANK": str(number("SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(per_host[host]),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": variables.get("MASTER_ADDR") or hosts[0],
        "MASTER_PORT": str(port),
    }


def host_names(nodelist: str) -> tuple[str, ...]:
    """Return the host names in a list of SLURM, in its order.

    ``node[001-003,007],gpu-a`` is node001, node002, node003, node007 and gpu-a.

    Raises:
        LaunchError: The text is no such list.
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
                # With leading zeros as in the list.
                parts[-1] += [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
        found += map("".join, itertools.product(*parts))
    return tuple(found)


def tasks_per_host(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each host: ``2(x3),1`` is 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None:
            msg = f"{text!r} does not say how many tasks hosts have, as SLURM does: 2(x3),1."
            raise LaunchError(msg)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)
