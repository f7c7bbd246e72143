"""What is wrong with a group: who is missing, unlike, slow, or cannot be reached."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from shardkit._doctor.facts import Finding, ranks_in_words
from shardkit._doctor.rules_machine import findings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit._doctor.facts import Checkup, Link, RankFacts

_CLOCK_S = 1.0
_SLOWER = 3.0
"""A rank or link so many times slower than the median is named."""

_LEAST_LATENCY_S = 0.002
_LEAST_COMPUTE_S = 0.005
_IS_OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")


def examine(checkup: Checkup) -> list[Finding]:
    """Return all findings, errors first."""
    found = [finding for rule in _RULES for finding in rule(checkup)]
    for facts in checkup.ranks:
        found += findings_of(facts, checkup)
    order = {"error": 0, "warning": 1, "note": 2}
    once = dict.fromkeys(found)  # Ranks of one host say the same of it.
    return sorted(once, key=lambda finding: order[finding.level])


def _missing(checkup: Checkup) -> Iterator[Finding]:
    if checkup.missing:
        yield Finding(
            check="missing",
            level="error",
            where=ranks_in_words(checkup.missing),
            what=f"did not come; {len(checkup.ranks)} of {checkup.world_size} ranks are there",
            remedy=f"look at their own output. Each must reach {checkup.master} (MASTER_ADDR and "
            f"MASTER_PORT, or --rdzv-endpoint of torchrun), and --nnodes, --nproc-per-node and "
            f"--node-rank must fit",
        )
    for step, ranks in checkup.silent.items():
        yield Finding(
            check="silent",
            level="error",
            where=ranks_in_words(ranks),
            what=f"came, and did not answer in the step {step!r}",
            remedy="look at their own output; where a rank still runs, py-spy dump --pid PID says "
            "where it is: "
            + ", ".join(f"{f.pid} on {f.host}" for f in checkup.ranks if f.rank in ranks),
        )


def _unlike(checkup: Checkup) -> Iterator[Finding]:
    """Ranks whose versions, devices or variables are not those of most."""
    values: dict[str, tuple[str, Callable[[RankFacts], Any], str]] = {
        "torch": ("error", lambda f: f"{f.torch} ({f.build})", "install one build everywhere"),
        "shardkit": ("error", lambda f: f.shardkit, "install one version everywhere"),
        "python": (
            "warning",
            lambda f: ".".join(f.python.split(".")[:2]),
            "use one version, so that what one rank pickles others can read",
        ),
        "devices": (
            "warning",
            lambda f: f"{len(f.devices)} x {f.devices[0]}" if f.devices else "none",
            "the slowest sets the pace: use like hosts, or let the group leave these out",
        ),
        "ranks on the host": (
            "warning",
            lambda f: f.local_world_size,
            "start as many ranks on each host; hybrid sharding needs it",
        ),
    }
    for name, (level, value_of, remedy) in values.items():
        yield from _odd_ones(checkup, name, level, value_of, remedy)
    names = {name for facts in checkup.ranks for name in facts.environment} - set(_IS_OWN)
    for name in sorted(names):
        yield from _odd_ones(
            checkup,
            name,
            "warning",
            lambda f, name=name: f.environment.get(name, "not set"),
            "set it alike on all hosts; launchers pass variables of their own host only",
        )


def _odd_ones(
    checkup: Checkup, name: str, level: Any, value_of: Callable[..., Any], remedy: str
) -> Iterator[Finding]:
    ranks_by_value: dict[str, list[int]] = {}
    for facts in checkup.ranks:
        ranks_by_value.setdefault(str(value_of(facts)), []).append(facts.rank)
    usual = max(ranks_by_value, key=lambda value: len(ranks_by_value[value]), default="")
    for value, ranks in ranks_by_value.items():
        if value != usual:
            hosts = dict.fromkeys(checkup.host_of(rank) for rank in ranks)
            yield Finding(
                check="unlike",
                level=level,
                where=f"{ranks_in_words(ranks)} on {', '.join(hosts)}",
                what=f"{name} is {value}, and {usual} on {ranks_in_words(ranks_by_value[usual])}",
                remedy=remedy,
            )


def _unreachable(checkup: Checkup) -> Iterator[Finding]:
    for link in checkup.links:
        if link.error is None:
            continue
        back = [
            other
            for other in checkup.links
            if (other.source, other.target) == (link.target, link.source) and other.is_primary
        ]
        one_way = " The way back is open." if any(b.error is None for b in back) else ""
        yield Finding(
            check="unreachable" if link.is_primary else "interface-closed",
            level="error" if link.is_primary else "warning",
            where=_where(checkup, link),
            what=f"no connection to {link.address} ({link.interface}): {link.error}.{one_way}",
            remedy=(
                f"open all TCP ports between the hosts on {link.interface}: ranks listen on ports "
                f"that the system chooses (iptables -L, security groups); or name an interface "
                f"that is open by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
                if link.is_primary
                else f"leave {link.interface} out: NCCL_SOCKET_IFNAME=^{link.interface},lo,docker"
            ),
        )


def _slow_links(checkup: Checkup) -> Iterator[Finding]:
    """Links between hosts; within a host there is no link that could be mended."""
    group = [
        link
        for link in checkup.links
        if link.is_primary
        and link.error is None
        and checkup.host_of(link.source) != checkup.host_of(link.target)
    ]
    if len(group) < 3:  # noqa: PLR2004 - of two nobody says which one is usual
        return
    rates = [link.bytes_per_s or 0.0 for link in group]
    waits = [link.latency_s or 0.0 for link in group]
    usual_rate, usual_wait = statistics.median(rates), statistics.median(waits)
    for link, rate, wait in zip(group, rates, waits, strict=True):
        is_late = wait > max(_SLOWER * usual_wait, usual_wait + _LEAST_LATENCY_S)
        if rate * _SLOWER < usual_rate or is_late:
            yield Finding(
                check="slow-link",
                level="warning",
                where=_where(checkup, link),
                what=f"{rate / 1e6:.0f} MB/s and {wait * 1e6:.0f} us, where "
                f"{usual_rate / 1e6:.0f} MB/s and {usual_wait * 1e6:.0f} us are usual",
                remedy=f"look at cable, duplex and errors of {link.interface} (ethtool, ip -s "
                f"link), and at other traffic; run again to see whether it stays",
            )


def _slow_ranks(checkup: Checkup) -> Iterator[Finding]:
    times = [facts.compute_s for facts in checkup.ranks]
    usual = statistics.median(times) if times else 0.0
    for facts in checkup.ranks:
        if facts.compute_s > max(_SLOWER * usual, _LEAST_COMPUTE_S):
            yield Finding(
                check="slow-rank",
                level="warning",
                where=f"rank {facts.rank} on {facts.host}",
                what=f"a product of matrices on the host takes {facts.compute_s * 1e3:.1f} ms, "
                f"and {usual * 1e3:.1f} ms as a rule",
                remedy="look for other processes, and for a clock that is throttled (top, "
                "turbostat); all ranks wait for this one",
            )


def _clocks(checkup: Checkup) -> Iterator[Finding]:
    seen: set[str] = set()
    for link in checkup.links:
        offset = link.clock_offset_s
        host = checkup.host_of(link.source)
        if link.target != 0 or offset is None or abs(offset) <= _CLOCK_S or host in seen:
            continue
        seen.add(host)
        side = "behind" if offset > 0 else "ahead of"
        yield Finding(
            check="clock",
            level="warning",
            where=host,
            what=f"its clock is {abs(offset):.1f} s {side} that of rank 0 on {checkup.host_of(0)}",
            remedy="chronyc makestep, or timedatectl set-ntp true: logs and checkpoints of hosts "
            "are put in order by their times",
        )


def _same_place(checkup: Checkup) -> Iterator[Finding]:
    """Two ranks that take one device."""
    places: dict[tuple[str, int], list[int]] = {}
    for facts in checkup.ranks:
        if facts.devices:
            places.setdefault((facts.host, facts.local_rank), []).append(facts.rank)
    for (host, local_rank), ranks in places.items():
        if len(ranks) > 1:
            yield Finding(
                check="same-device",
                level="error",
                where=f"{ranks_in_words(ranks)} on {host}",
                what=f"all have LOCAL_RANK {local_rank}, so they take one device",
                remedy="let each host have a name of its own, and each rank on it a LOCAL_RANK of "
                "its own",
            )


def _failed_collectives(checkup: Checkup) -> Iterator[Finding]:
    errors: dict[tuple[str, int, str], list[int]] = {}
    for timing in checkup.timings:
        if timing.error is not None:
            key = (timing.collective, timing.nbytes, timing.error)
            errors.setdefault(key, []).append(timing.rank)
    for (name, nbytes, error), ranks in errors.items():
        yield Finding(
            check="collective",
            level="error",
            where=ranks_in_words(ranks),
            what=f"{name} of {nbytes} bytes on {checkup.backend} failed: {error}",
            remedy="NCCL_DEBUG=INFO (TORCH_DISTRIBUTED_DEBUG=DETAIL) shows which connection it "
            "is; NCCL_IB_DISABLE=1 or NCCL_P2P_DISABLE=1 tell whether adapters or peers are at "
            "fault",
        )


def _where(checkup: Checkup, link: Link) -> str:
    return (
        f"rank {link.source} ({checkup.host_of(link.source)}) to rank {link.target} "
        f"({checkup.host_of(link.target)})"
    )


_RULES = (
    _missing,
    _unlike,
    _unreachable,
    _failed_collectives,
    _same_place,
    _slow_links,
    _slow_ranks,
    _clocks,
)
