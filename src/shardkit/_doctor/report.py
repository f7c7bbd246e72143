"""A checkup as text, or for programs."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardkit._doctor.facts import Finding, ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._doctor.facts import Checkup, RankFacts

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
    shm = "none" if facts.shm_nbytes is None else f"{facts.shm_nbytes / 2**30:.1f} GiB"
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
        lines.append(f"  {name:<10} {_size(nbytes):>8} {usual * 1e3:10.3f} ms {rate}".rstrip())
    return [*lines, ""]


def _size(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes} B"
