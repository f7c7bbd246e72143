"""``python -m shardkit doctor``. Needs the extra ``cli``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from shardkit._doctor.facts import Checkup, Finding, LaunchPlace
from shardkit._doctor.machine import Machine
from shardkit._doctor.report import as_json, finding_lines, is_healthy, lines_of
from shardkit._doctor.rules_group import examine
from shardkit._doctor.session import (
    ALONE_VARIABLE,
    NoStoreError,
    Session,
    free_port,
    limited,
    open_store,
    place_of,
)
from shardkit.backends import accelerator_type

_STEPS = 4  # Each waits for its time at most.
_START_S = 60.0  # In which processes import torch.
_ALONE = 2


def doctor_command(
    as_json: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--json", help="For programs.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a step waits for ranks.")
    ] = 30.0,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where collectives are timed, e.g. cpu; else on the accelerator, if there is one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check this machine, or a group of ranks, and say what to mend; exit with 1 on errors.

    Alone it starts two ranks on this machine. Under a launcher it checks the launcher's group, and
    rank 0 prints.

    Examples:
        python -m shardkit doctor

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node0:29500 -m shardkit doctor
    """
    known = ("cpu", *filter(None, [accelerator_type()]))
    if device is not None and device not in known:
        msg = f"--device {device}: torch sees {' and '.join(known)} here"
        raise typer.BadParameter(msg)
    place = place_of(os.environ)
    if place is None:
        raise typer.Exit(_start_ranks(timeout))
    raise typer.Exit(_check(place, timeout, device, is_json=as_json))


def _start_ranks(timeout_s: float) -> int:
    """Start ranks on this host with the same options; return the exit status of the first."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(_ALONE),
        "LOCAL_WORLD_SIZE": str(_ALONE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        ALONE_VARIABLE: "1",
    }
    common.setdefault("OMP_NUM_THREADS", "1")  # As torchrun does.
    command = [sys.executable, "-m", "shardkit", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})  # noqa: S603 - itself
        for rank in range(_ALONE)
    ]
    try:
        codes = [rank.wait(_START_S + (_STEPS + 1) * timeout_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        print("the ranks did not end in time", file=sys.stderr)
        return 1
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return max(abs(code) for code in codes) and 1


def _check(place: LaunchPlace, timeout_s: float, device: str | None, *, is_json: bool) -> int:
    """Do a rank's part; return its exit status."""
    machine = Machine()
    session: Session | None = None

    def expired() -> None:
        step = "come" if session is None else session.step
        finding = Finding(
            check="stuck",
            level="error",
            where=f"rank {place.rank} on {machine.host_name()}",
            what=f"the step {step!r} did not end",
            remedy="run again with --device cpu: if that ends, the accelerator or its network is "
            "at fault",
        )
        known = Checkup(place.world_size, "?") if session is None else session.checkup
        _print(known, [finding, *examine(known)], is_json=is_json and place.rank == 0)

    with limited(_STEPS * timeout_s + 5, expired):
        try:
            store = open_store(machine, place, timeout_s)
            session = Session(machine, place, store, timeout_s=timeout_s, device=device)
            checkup = session.run()
        except NoStoreError as error:
            if is_json and place.rank == 0:
                _print(Checkup(place.world_size, "?"), [error.finding], is_json=True)
            else:
                print("\n".join(finding_lines([error.finding])), file=sys.stderr)
            return 1
    if checkup is None:
        return 0
    findings = examine(checkup)
    _print(checkup, findings, is_json=is_json)
    return 0 if is_healthy(findings) else 1


def _print(checkup: Checkup, findings: list[Finding], *, is_json: bool) -> None:
    text = as_json(checkup, findings) if is_json else "\n".join(lines_of(checkup, findings))
    print(text, flush=True)
