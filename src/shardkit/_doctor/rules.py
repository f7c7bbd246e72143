"""Problems of a machine or a group: ranks that are missing, different, slow or unreachable."""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any

from shardkit._doctor.facts import Checkup, Finding, Link, RankFacts, ranks_in_words
from shardkit._text import counted, release_of
from shardkit.backends.groups import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --- one rank and its machine ---------------------------------------------------------------------

_MIB = 2**20
_LEAST_SHM = 2**30
_LEAST_FREE_SHM = 64 * _MIB
_LEAST_FILES, _LEAST_PROCESSES = 4096, 4096
_OLDEST_TORCH = (2, 9)
_GPU_BUILDS = ("cuda", "rocm")
_ENLARGE_SHM = "container --shm-size=16g or --ipc=host, else mount -o remount,size=16g /dev/shm"


def _of_hosts(checkup: Checkup) -> Iterator[Finding]:
    """Yield the problems of hosts, from the facts of the first rank of each."""
    hosts: dict[str, RankFacts] = {}
    for facts in sorted(checkup.ranks, key=lambda each: each.rank):
        hosts.setdefault(facts.host, facts)
    for facts in hosts.values():
        yield from _devices(facts, checkup)
        yield from _system(facts)
        yield from _host_name(facts, checkup)


def _devices(f: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    """Yield problems of torch's build and of the devices that it sees."""
    error = functools.partial(Finding, level="error", where=f.host)
    is_for_cards = f.build.startswith(_GPU_BUILDS)
    num_devices = len(checkup.devices_of(f.host))
    engine = engine_of(f.device_type)
    if f.num_cards and not is_for_cards:
        yield error(
            check="torch-build",
            what=f"the machine has {f.num_cards} cards, and torch {f.torch} is built for the CPU "
            f"only",
            remedy="install the build of torch for the driver: see pytorch.org/get-started",
        )
    if f.num_cards and is_for_cards and not f.devices:
        yield error(
            check="no-devices",
            what=f"the machine has {f.num_cards} cards, and torch ({f.build}) sees none",
            remedy="look at nvidia-smi (rocm-smi) and at CUDA_VISIBLE_DEVICES; the driver must be "
            "as new as torch's build wants; in a container pass the devices (--gpus all)",
        )
    if 0 < num_devices < f.local_world_size and not checkup.is_alone:
        yield error(
            check="too-few-devices",
            what=f"{f.local_world_size} ranks share {num_devices} devices",
            remedy=f"start {num_devices} ranks on this host (torchrun --nproc-per-node), or let "
            f"them see more devices",
        )
    if engine not in f.backends:
        yield error(
            check="no-backend",
            what=f"torch has no {engine}, the backend of {f.device_type or 'cpu'} ranks; it has "
            f"{', '.join(f.backends) or 'none'}",
            remedy="install a build of torch with it",
        )
    if f.torch_xla is not None:
        yield Finding(
            check="xla",
            level="note",
            where=f.host,
            what=f"torch_xla {f.torch_xla} is installed. XLA devices and their links are not "
            f"checked",
            remedy="python -c 'import torch_xla; print(torch_xla.devices())' says whether they are "
            "seen",
        )
    if f.torch_xla and release_of(f.torch_xla) != release_of(f.torch):
        yield error(
            check="xla-version",
            what=f"torch_xla {f.torch_xla} is made for another torch than {f.torch}",
            remedy="install both in the same version",
        )


def _system(f: RankFacts) -> Iterator[Finding]:
    """Yield problems of shared memory and of threads."""
    warning = functools.partial(Finding, level="warning", where=f.host)
    if f.shm_nbytes is None or f.shm_free_nbytes is None:
        if f.system == "Linux":
            yield warning(
                check="no-shm",
                what="there is no /dev/shm: loaders with workers and NCCL within a host need it",
                remedy="mount it: mount -t tmpfs tmpfs /dev/shm",
            )
    elif f.shm_free_nbytes < min(_LEAST_FREE_SHM * f.local_world_size, f.shm_nbytes // 2):
        yield Finding(
            check="shm-full",
            level="error",
            where=f.host,
            what=f"shared memory (/dev/shm) has {f.shm_free_nbytes // _MIB} MiB free of "
            f"{f.shm_nbytes // _MIB} MiB, for {f.local_world_size} ranks",
            remedy="delete what earlier runs left there (ls -l /dev/shm), or make it larger: in a "
            + _ENLARGE_SHM,
        )
    elif f.shm_nbytes < _LEAST_SHM:
        yield warning(
            check="shm-small",
            what=f"shared memory (/dev/shm) has {f.shm_nbytes // _MIB} MiB, which loaders and NCCL "
            f"soon fill",
            remedy="in a " + _ENLARGE_SHM,
        )
    if f.local_world_size > 1 and f.num_threads * f.local_world_size > 2 * f.num_cores:
        yield warning(
            check="threads",
            what=f"{f.local_world_size} ranks with {counted(f.num_threads, 'threads')} each share "
            f"{f.num_cores} cores",
            remedy=f"OMP_NUM_THREADS={max(1, f.num_cores // f.local_world_size)}"
            if f.num_threads > 1
            else "start fewer ranks on this host: --nproc-per-node",
        )


def _host_name(f: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    """Yield problems of the addresses to which the host's name resolves, if gloo uses the name."""
    if f.environment.keys() & {"GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFADDR"}:
        return
    entry = f"'{f.address} {f.host}'"
    if not f.host_addresses:
        yield Finding(
            check="host-unknown",
            level="warning" if checkup.num_hosts == 1 else "error",
            where=f.host,
            what=f"the host's name {f.host!r} resolves to no address; gloo looks itself up by it",
            remedy=f"add {entry} to /etc/hosts, or name the interface: "
            f"GLOO_SOCKET_IFNAME={_interface(f)}",
        )
    is_local = all(each.startswith("127.") or each == "::1" for each in f.host_addresses)
    if f.host_addresses and is_local and checkup.num_hosts > 1:
        yield Finding(
            check="host-loopback",
            level="error",
            where=f.host,
            what=f"the host's name {f.host!r} resolves to {f.host_addresses[0]}, where other hosts "
            f"cannot reach it; gloo tells them this address",
            remedy=f"in /etc/hosts put {entry} in the place of the line with "
            f"{f.host_addresses[0]}, or GLOO_SOCKET_IFNAME={_interface(f)}",
        )


def _of_ranks(checkup: Checkup) -> Iterator[Finding]:
    """Yield what may be wrong with one rank of a host."""
    for f in checkup.ranks:
        warning = functools.partial(Finding, level="warning", where=f.host)
        error = functools.partial(Finding, level="error", where=f.host)
        memlock, nofile, nproc = (f.limits.get(name) for name in ("memlock", "nofile", "nproc"))
        if release_of(f.torch) < _OLDEST_TORCH:
            yield error(
                check="torch-old",
                what=f"torch is {f.torch}, and shardkit needs 2.9 or newer",
                remedy="pip install 'torch>=2.9', the build for this machine's driver",
            )
        if f.has_infiniband and memlock is not None:
            yield error(
                check="memlock",
                what=f"ranks may lock {memlock // 1024} KiB of memory, and InfiniBand needs all it "
                f"registers",
                remedy="ulimit -l unlimited: in /etc/security/limits.conf '* - memlock unlimited', "
                "in a container --ulimit memlock=-1, under slurm "
                "PropagateResourceLimitsExcept=MEMLOCK",
            )
        if _is_below(nofile, _LEAST_FILES):
            yield warning(
                check="nofile",
                what=f"a process may have {nofile} open files; each connection and each tensor of "
                f"a data loader takes one",
                remedy="ulimit -n 65536 before the launcher, or LimitNOFILE of its service",
            )
        if _is_below(nproc, _LEAST_PROCESSES):
            yield warning(
                check="nproc",
                what=f"the user may have {nproc} processes and threads; ranks with loaders have "
                f"more",
                remedy="ulimit -u 65536 before the launcher, or TasksMax of its service",
            )
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if _names_no_interface(variable, f):
                yield Finding(
                    check="interface-unknown",
                    level="error",
                    where=f"rank {f.rank} on {f.host}",
                    what=f"{variable} is {f.environment[variable]!r}, and the host has "
                    f"{', '.join(f.interfaces)}",
                    remedy=f"{variable}={_interface(f)}, the interface towards rank 0",
                )


def _interface(facts: RankFacts) -> str:
    """Return the name of the interface towards rank 0's host."""
    found = (name for name, address in facts.interfaces.items() if address == facts.address)
    return next(found, "eth0")


def _is_below(limit: int | None, least: int) -> bool:
    return limit is not None and limit < least


def _names_no_interface(variable: str, facts: RankFacts) -> bool:
    text = facts.environment.get(variable, "")
    if text and variable == "GLOO_SOCKET_IFNAME":  # Takes whole names, and uses all of them.
        return not facts.interfaces.keys() >= {*text.split(",")}
    if not text or text.startswith("^"):
        return False
    # NCCL takes prefixes of names, or whole names after "=".
    wanted = tuple(text.removeprefix("=").split(","))
    return not any(name.startswith(wanted) for name in facts.interfaces)


# --- a group --------------------------------------------------------------------------------------

_CLOCK_S = 1.0
_SLOWER = 3.0  # Factor to the median from which a rank or link counts as slow.

_LEAST_LATENCY_S = 0.002
_LEAST_COMPUTE_S = 0.005
_IS_OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")


def examine(checkup: Checkup) -> list[Finding]:
    """Return all findings, errors first."""
    found = [finding for rule in _RULES for finding in rule(checkup)]
    order = {"error": 0, "warning": 1, "note": 2}
    once = dict.fromkeys(found)  # Ranks of one host report the same.
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
    """Yield ranks whose versions, devices or variables differ from those of most ranks."""
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
    """Yield slow links between hosts; a link within a host cannot be mended."""
    group = [
        link
        for link in checkup.links
        if link.is_primary
        and link.error is None
        and checkup.host_of(link.source) != checkup.host_of(link.target)
    ]
    if len(group) < 3:  # noqa: PLR2004 - of two, neither is the usual one
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
    """Yield ranks that use the same device."""
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
    _of_hosts,
    _of_ranks,
)
