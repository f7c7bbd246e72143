"""``python -m shardkit doctor``. Needs the extra ``cli``."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from torch.distributed.elastic.utils.distributed import get_free_port

from shardkit._doctor.facts import Checkup, Finding, LaunchPlace, Machine, ranks_in_words
from shardkit._doctor.rules import examine
from shardkit._doctor.session import (
    ALONE_VARIABLE,
    NoStoreError,
    Session,
    limited,
    open_store,
    place_of,
)
from shardkit._text import shown_nbytes
from shardkit.backends import accelerator_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._doctor.facts import RankFacts


# --- reports --------------------------------------------------------------------------------------

_MARKS = {"error": "ERROR", "warning": "WARN", "note": "NOTE"}


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether none is an error."""
    return all(finding.level != "error" for finding in findings)


def as_json(checkup: Checkup, findings: Sequence[Finding]) -> str:
    """Return all that is known, for programs."""
    found = {"healthy": is_healthy(findings), "findings": [*map(asdict, findings)]}
    return json.dumps({**found, **asdict(checkup), "missing": checkup.missing}, indent=2)


def lines_of(checkup: Checkup, findings: Sequence[Finding]) -> list[str]:
    """Return it as text: hosts, collectives, then findings with their remedies."""
    lines = [f"{checkup.world_size} ranks, meeting at {checkup.master}"]
    by_host: dict[str, list[RankFacts]] = {}
    for facts in checkup.ranks:
        by_host.setdefault(facts.host, []).append(facts)
    for host, ranks in by_host.items():
        lines += ["", *_host_lines(host, ranks)]
    lines += ["", *_link_lines(checkup), *_timing_lines(checkup), *finding_lines(findings)]
    num_errors = sum(finding.level == "error" for finding in findings)
    num_warnings = sum(finding.level == "warning" for finding in findings)
    last = f"{num_errors} errors, {num_warnings} warnings"
    return [*lines, last if num_errors or num_warnings else "nothing is to be mended"]


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return findings as text."""
    lines = []
    for finding in findings:
        lines += [
            f"{_MARKS[finding.level]} {finding.check}: {finding.where}: {finding.what}.",
            f"  mend: {finding.remedy}.",
        ]
    return lines


def _host_lines(host: str, ranks: list[RankFacts]) -> list[str]:
    facts = ranks[0]
    limits = ", ".join(
        f"{name} {'unlimited' if limit is None else limit}" for name, limit in facts.limits.items()
    )
    devices = ", ".join(dict.fromkeys(facts.devices)) or "none"
    shm = "none" if facts.shm_nbytes is None else shown_nbytes(facts.shm_nbytes)
    network = ", ".join(f"{name} {address}" for name, address in facts.interfaces.items())
    addresses = ", ".join(facts.host_addresses) or "nothing"
    return [
        f"{host}: {ranks_in_words([each.rank for each in ranks])}",
        f"  python {facts.python}, torch {facts.torch} ({facts.build}), shardkit {facts.shardkit}",
        f"  devices: {len(facts.devices)} ({devices}), backends: {', '.join(facts.backends)}",
        f"  {facts.num_cores} cores, {facts.num_threads} threads a rank, /dev/shm {shm}, {limits}",
        f"  network: {network}; the name resolves to {addresses}",
        "  XLA: torch_xla is not installed, so it is not checked"
        if facts.torch_xla is None
        else f"  XLA: torch_xla {facts.torch_xla}, whose devices are not checked",
    ]


def _link_lines(checkup: Checkup) -> list[str]:
    found = [link for link in checkup.links if link.is_primary and link.error is None]
    if not found:
        return []
    rates = [(link.bytes_per_s or 0.0) / 1e6 for link in found]
    waits = [(link.latency_s or 0.0) * 1e6 for link in found]
    text = (
        f"connections (TCP): {len(found)}, {min(rates):.0f} to {max(rates):.0f} MB/s, "
        f"{min(waits):.0f} to {max(waits):.0f} us there and back"
    )
    return [text, ""]


def _timing_lines(checkup: Checkup) -> list[str]:
    by_size: dict[tuple[str, int], list[float]] = {}
    for timing in checkup.timings:
        if timing.seconds is not None:
            by_size.setdefault((timing.collective, timing.nbytes), []).append(timing.seconds)
    if not by_size:
        return []
    lines = [f"collectives ({checkup.backend}), the median of ranks"]
    for (name, nbytes), seconds in sorted(by_size.items()):
        usual = statistics.median(seconds)
        rate = f"{nbytes / usual / 1e6:9.0f} MB/s of a rank's tensor" if nbytes > 4 else ""  # noqa: PLR2004
        lines.append(
            f"  {name:<10} {shown_nbytes(nbytes):>9} {usual * 1e3:10.3f} ms {rate}".rstrip()
        )
    return [*lines, ""]


# --- the command ----------------------------------------------------------------------------------

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
        "MASTER_PORT": str(get_free_port()),
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
