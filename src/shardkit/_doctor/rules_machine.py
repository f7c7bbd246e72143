"""What is wrong with one rank and its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit._doctor.facts import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit._doctor.facts import Checkup, RankFacts

_MIB, _GIB = 2**20, 2**30
_LEAST_SHM = _GIB
_LEAST_FREE_SHM = 64 * _MIB
_LEAST_FILES, _LEAST_PROCESSES = 4096, 4096
_OLDEST_TORCH = (2, 9)
_GPU_BUILDS = ("cuda", "rocm")


def findings_of(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    """Yield what is wrong with a rank; what is of the host, of its first rank only."""
    for rule in _OF_RANK:
        yield from rule(facts, checkup)
    same_host = [other.rank for other in checkup.ranks if other.host == facts.host]
    if facts.rank == min(same_host):
        for rule in _OF_HOST:
            yield from rule(facts, checkup)


def _finding(
    facts: RankFacts, check: str, level: Level, what: str, remedy: str, *, is_host: bool = True
) -> Finding:
    where = facts.host if is_host else f"rank {facts.rank} on {facts.host}"
    return Finding(check=check, level=level, where=where, what=what, remedy=remedy)


# --- torch and devices ----------------------------------------------------------------------------


def _torch(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    parts = facts.torch.split("+")[0].split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if numbers < _OLDEST_TORCH:
        yield _finding(
            facts,
            "torch-old",
            "error",
            f"torch is {facts.torch}, and shardkit needs 2.9 or newer",
            "pip install 'torch>=2.9', the build for this machine's driver",
        )


def _cards(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    if facts.num_cards and not facts.build.startswith(_GPU_BUILDS):
        yield _finding(
            facts,
            "torch-build",
            "error",
            f"the machine has {facts.num_cards} cards, and torch {facts.torch} is built for the "
            f"CPU only",
            "install the build of torch for the driver: see pytorch.org/get-started",
        )
    elif facts.num_cards and not facts.devices and facts.build.startswith(_GPU_BUILDS):
        yield _finding(
            facts,
            "no-devices",
            "error",
            f"the machine has {facts.num_cards} cards, and torch ({facts.build}) sees none",
            "look at nvidia-smi (rocm-smi) and at CUDA_VISIBLE_DEVICES; the driver must be as new "
            "as torch's build wants; in a container pass the devices (--gpus all)",
        )


def _too_few_devices(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    number = len(checkup.devices_of(facts.host))
    if number and facts.local_world_size > number and not checkup.is_alone:
        yield _finding(
            facts,
            "too-few-devices",
            "error",
            f"{facts.local_world_size} ranks share {number} devices",
            f"start {number} ranks on this host (torchrun --nproc-per-node), or let "
            f"them see more devices",
        )


def _backend(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    wanted = {"cuda": "nccl", "xpu": "xccl"}.get(facts.device_type or "cpu", "gloo")
    if wanted not in facts.backends:
        yield _finding(
            facts,
            "no-backend",
            "error",
            f"torch has no {wanted}, the backend of {facts.device_type or 'cpu'} ranks; it has "
            f"{', '.join(facts.backends) or 'none'}",
            "install a build of torch with it",
        )


def _xla(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    if facts.torch_xla is None:
        return
    yield _finding(
        facts,
        "xla",
        "note",
        f"torch_xla {facts.torch_xla} is installed. XLA devices and their links are not checked",
        "python -c 'import torch_xla; print(torch_xla.devices())' says whether they are seen",
    )
    if facts.torch_xla.split("+")[0].split(".")[:2] != facts.torch.split("+")[0].split(".")[:2]:
        yield _finding(
            facts,
            "xla-version",
            "error",
            f"torch_xla {facts.torch_xla} is made for another torch than {facts.torch}",
            "install both in the same version",
        )


# --- limits of the system -------------------------------------------------------------------------


def _shared_memory(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    total, free = facts.shm_nbytes, facts.shm_free_nbytes
    if total is None or free is None:
        yield _finding(
            facts,
            "no-shm",
            "warning",
            "there is no /dev/shm: loaders with workers and NCCL within a host need it",
            "mount it: mount -t tmpfs tmpfs /dev/shm",
        )
    elif free < min(_LEAST_FREE_SHM * facts.local_world_size, total // 2):
        yield _finding(
            facts,
            "shm-full",
            "error",
            f"shared memory (/dev/shm) has {free // _MIB} MiB free of {total // _MIB} MiB, for "
            f"{facts.local_world_size} ranks",
            "delete what earlier runs left there (ls -l /dev/shm), or make it larger: in a "
            "container --shm-size=16g or --ipc=host, else mount -o remount,size=16g /dev/shm",
        )
    elif total < _LEAST_SHM:
        yield _finding(
            facts,
            "shm-small",
            "warning",
            f"shared memory (/dev/shm) has {total // _MIB} MiB, which loaders and NCCL soon fill",
            "in a container --shm-size=16g or --ipc=host, else mount -o remount,size=16g /dev/shm",
        )


def _limits(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    locked, files = facts.limits.get("memlock"), facts.limits.get("nofile")
    processes = facts.limits.get("nproc")
    if facts.has_infiniband and locked is not None:
        yield _finding(
            facts,
            "memlock",
            "error",
            f"ranks may lock {locked // 1024} KiB of memory, and InfiniBand needs all it registers",
            "ulimit -l unlimited: in /etc/security/limits.conf '* - memlock unlimited', in a "
            "container --ulimit memlock=-1, under slurm PropagateResourceLimitsExcept=MEMLOCK",
        )
    if files is not None and files < _LEAST_FILES:
        yield _finding(
            facts,
            "nofile",
            "warning",
            f"a process may have {files} open files; each connection and each tensor of a data "
            f"loader takes one",
            "ulimit -n 65536 before the launcher, or LimitNOFILE of its service",
        )
    if processes is not None and processes < _LEAST_PROCESSES:
        yield _finding(
            facts,
            "nproc",
            "warning",
            f"the user may have {processes} processes and threads; ranks with loaders have more",
            "ulimit -u 65536 before the launcher, or TasksMax of its service",
        )


def _threads(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    wanted = facts.num_threads * facts.local_world_size
    if facts.local_world_size > 1 and wanted > 2 * facts.num_cores:
        yield _finding(
            facts,
            "threads",
            "warning",
            f"{facts.local_world_size} ranks with {facts.num_threads} threads each share "
            f"{facts.num_cores} cores",
            f"OMP_NUM_THREADS={max(1, facts.num_cores // facts.local_world_size)}",
        )


# --- names ----------------------------------------------------------------------------------------


def _host_name(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    if not facts.host_addresses:
        yield _finding(
            facts,
            "host-unknown",
            "error" if checkup.num_hosts > 1 else "warning",
            f"the host's name {facts.host!r} resolves to no address; gloo looks itself up by it",
            f"add '{facts.address} {facts.host}' to /etc/hosts, or name the interface: "
            f"GLOO_SOCKET_IFNAME={_interface(facts)}",
        )
        return
    is_loopback = all(_is_loopback(address) for address in facts.host_addresses)
    chosen = any(name in facts.environment for name in ("GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFADDR"))
    if is_loopback and checkup.num_hosts > 1 and not chosen:
        yield _finding(
            facts,
            "host-loopback",
            "error",
            f"the host's name {facts.host!r} resolves to {facts.host_addresses[0]}, where other "
            f"hosts cannot reach it; gloo tells them this address",
            f"in /etc/hosts put '{facts.address} {facts.host}' in the place of the line with "
            f"{facts.host_addresses[0]}, or GLOO_SOCKET_IFNAME={_interface(facts)}",
        )


def _interface_names(facts: RankFacts, checkup: Checkup) -> Iterator[Finding]:
    del checkup
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = facts.environment.get(variable, "")
        if not text or text.startswith("^"):
            continue
        # NCCL takes beginnings of names, and with "=" whole ones.
        wanted = text.removeprefix("=").split(",")
        if not any(name.startswith(part) for part in wanted for name in facts.interfaces):
            yield _finding(
                facts,
                "interface-unknown",
                "error",
                f"{variable} is {text!r}, and the host has {', '.join(facts.interfaces)}",
                f"{variable}={_interface(facts)}, the interface towards rank 0",
                is_host=False,
            )


def _interface(facts: RankFacts) -> str:
    names = [name for name, address in facts.interfaces.items() if address == facts.address]
    return names[0] if names else "eth0"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


_OF_RANK: tuple[Callable[[RankFacts, Checkup], Iterator[Finding]], ...] = (
    _torch,
    _limits,
    _interface_names,
)
_OF_HOST: tuple[Callable[[RankFacts, Checkup], Iterator[Finding]], ...] = (
    _cards,
    _too_few_devices,
    _backend,
    _xla,
    _shared_memory,
    _threads,
    _host_name,
)
