"""Facts about ranks, links and collectives; and `Machine`, from which they are read.

Tests replace it with faulty machines.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import time
import timeit
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from shardkit._text import listed
from shardkit.backends import accelerator_type
from shardkit.backends.device import use_own_device
from shardkit.backends.groups import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --- facts: plain values --------------------------------------------------------------------------


Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class LaunchPlace:
    """A rank's place in the group, from the launcher's variables."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # 0: the launcher does not say it.
    master_addr: str
    master_port: int
    # Whether this rank opens the port where ranks meet. Under torchrun, an agent does so.
    hosts_store: bool
    is_alone: bool = False  # Whether the command started the ranks itself.


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts that a rank reports about itself and its machine."""

    rank: int
    local_rank: int
    local_world_size: int
    host: str
    pid: int
    system: str  # ``"Linux"``, ``"Darwin"`` (macOS).
    python: str  # Version; also `torch`, `shardkit`, and `torch_xla`, which may be missing.
    torch: str
    shardkit: str
    torch_xla: str | None
    build: str  # Kind of torch's build: ``"cpu"``, ``"cuda 13.0"``, ``"rocm 6.4"``.
    backends: list[str]  # Names of torch's available backends.
    device_type: str | None  # Type of the accelerator that torch sees, or None.
    devices: list[str]  # Names of the devices that this rank sees.
    num_cards: int  # Number of cards (NVIDIA, AMD) that the system has, seen by torch or not.
    host_addresses: list[str]  # Addresses that the name of the host resolves to.
    interfaces: dict[str, str]  # Address of each network interface, IPv4 if it has one, by name.
    address: str  # Address of the interface towards rank 0's host.
    port: int  # Port where it answers other ranks.
    shm_nbytes: int | None  # Size of shared memory; None: there is no folder for it.
    shm_free_nbytes: int | None  # Free part of it.
    # Soft limits: ``memlock`` in bytes, ``nofile``, ``nproc``; None: no limit.
    limits: dict[str, int | None]
    has_infiniband: bool  # Whether there are adapters of InfiniBand or RoCE.
    num_cores: int  # Number of cores that this process may use, or whose time it gets.
    num_threads: int  # Number of threads that torch uses in this process.
    environment: dict[str, str]  # Variables that change how ranks communicate.
    compute_s: float  # Time of a small matrix product on the host, the best of several.
    # Unique names of the devices on their host; empty: their numbers are unique.
    device_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection that one rank tried to make to another."""

    source: int  # Rank that connects.
    target: int  # Rank that answers.
    interface: str  # Interface of the target.
    address: str  # Address of that interface.
    is_primary: bool  # Whether backends use it by default.
    error: str | None = None  # Reason why it failed; None: it did not.
    latency_s: float | None = None  # Round-trip time of a message, the best of several.
    bytes_per_s: float | None = None  # Rate for a few megabytes.
    clock_offset_s: float | None = None  # The target's clock minus the source's.


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of a collective on one rank."""

    rank: int
    collective: str
    nbytes: int  # Size of a rank's tensor.
    seconds: float | None  # The median of several calls; None: it failed.
    error: str | None = None  # Reason why it failed.


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem to mend, or a note."""

    check: str  # A short, stable name.
    # ``"error"``: training fails or is wrong; ``"warning"``: it is slow or may fail; ``"note"``.
    level: Level
    where: str  # Ranks and hosts.
    what: str  # Description of the problem.
    remedy: str  # Way to mend the problem.


@dataclass
class Checkup:
    """All that rank 0 knows about the group."""

    world_size: int  # Expected number of ranks.
    master: str  # Host and port where ranks meet.
    ranks: list[RankFacts] = field(default_factory=list)  # Facts of the ranks that came.
    links: list[Link] = field(default_factory=list)  # Connections between them.
    timings: list[Timing] = field(default_factory=list)  # Times of collectives.
    # Ranks that came but did not answer in a later step, by the step.
    silent: dict[str, list[int]] = field(default_factory=dict)
    backend: str | None = None  # Engine of the collectives; None: there were none.
    # Whether the command started the ranks itself: there may be more ranks than devices.
    is_alone: bool = False

    def devices_of(self, host: str) -> set[str]:
        """Return the devices that ranks of a host see; a launcher may give each rank one."""
        return {
            each
            for facts in self.ranks
            if facts.host == host
            for each in facts.device_ids or map(str, range(len(facts.devices)))
        }

    @property
    def missing(self) -> list[int]:
        """Ranks that did not come."""
        came = {facts.rank for facts in self.ranks}
        return [rank for rank in range(self.world_size) if rank not in came]

    @property
    def num_hosts(self) -> int:
        """Number of different hosts of the ranks that came."""
        return len({facts.host for facts in self.ranks})

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return next((facts.host for facts in self.ranks if facts.rank == rank), "?")


def ranks_in_words(ranks: list[int]) -> str:
    """Return the text for ranks in a message."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(sorted(ranks), str)}"


# --- collectives ----------------------------------------------------------------------------------

SIZES = (4, 2**20, 2**24)
LARGE_SIZES = (*SIZES, 2**28)
"""Sizes of a rank's tensor in bytes; the last one on accelerators only."""

_MOST_RANKS = 16  # Largest gather, in tensors of the largest size.
_ROUNDS = {4: 20, 2**20: 5, 2**24: 3, 2**28: 3}


def measure_collectives(
    place: LaunchPlace, store: Any, device_type: str, *, timeout_s: float
) -> Iterator[Timing]:
    """Time collectives over a store that is only for this; a failure ends the series."""
    device = _device(place, device_type)
    try:
        dist.init_process_group(
            engine_of(device_type),
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        text = _first_line(error)
        yield Timing(rank=place.rank, collective="start", nbytes=0, seconds=None, error=text)
        return
    sizes = SIZES if device_type == "cpu" else LARGE_SIZES
    most_gathered = _MOST_RANKS * sizes[-1]
    try:
        for nbytes in sizes:
            for name, make in _COLLECTIVES.items():
                if name == "all_gather" and nbytes * place.world_size > most_gathered:
                    continue  # It would take too much memory in large groups.
                made = functools.partial(make, nbytes // 4, place, device)
                timing = _timed(place, name, nbytes, made)
                yield timing
                if timing.error is not None:
                    return
    finally:
        dist.destroy_process_group()


def _timed(
    place: LaunchPlace, name: str, nbytes: int, make: Callable[[], Callable[[], bool]]
) -> Timing:
    timing = functools.partial(Timing, rank=place.rank, collective=name, nbytes=nbytes)
    times = []
    try:
        call = make()
        dist.barrier()
        for _ in range(_ROUNDS[nbytes] + 1):
            start = time.perf_counter()
            is_right = call()
            times.append(time.perf_counter() - start)
            if not is_right:
                return timing(seconds=None, error="its result is wrong")
    except (RuntimeError, ValueError) as error:
        return timing(seconds=None, error=_first_line(error))
    return timing(seconds=statistics.median(times[1:]))  # The first call makes connections.


def _all_reduce(numel: int, place: LaunchPlace, device: torch.device) -> Callable[[], bool]:
    tensor = torch.empty(numel, device=device)

    def call() -> bool:
        tensor.fill_(place.rank + 1)
        dist.all_reduce(tensor)
        last = float(tensor[-1])  # This waits for the device.
        return last == place.world_size * (place.world_size + 1) / 2

    return call


def _all_gather(numel: int, place: LaunchPlace, device: torch.device) -> Callable[[], bool]:
    own = torch.full((numel,), float(place.rank), device=device)
    whole = torch.empty(numel * place.world_size, device=device)

    def call() -> bool:
        dist.all_gather(list(whole.chunk(place.world_size)), own)
        ends = whole.view(place.world_size, numel)[:, -1].tolist()
        return bool(ends == list(range(place.world_size)))

    return call


def _broadcast(numel: int, place: LaunchPlace, device: torch.device) -> Callable[[], bool]:
    tensor = torch.empty(numel, device=device)
    source = place.world_size - 1

    def call() -> bool:
        tensor.fill_(place.rank)
        dist.broadcast(tensor, src=source)
        return bool(float(tensor[-1]) == source)

    return call


_COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather, "broadcast": _broadcast}


def _device(place: LaunchPlace, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    use_own_device(device_type, str(place.local_rank))
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- the machine ----------------------------------------------------------------------------------

_SHM = "/dev/shm"  # noqa: S108 - where the system has shared memory
_ENGINES = ("gloo", "nccl", "mpi", "xccl")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_")
_LINK_LOCAL = "fe80:"  # Other hosts reach such an address only if they name an interface, too.
_PRODUCT = 192
_REPEATS = 5


class Machine:
    """The machine that this process runs on."""

    def clock(self) -> float:
        """Return seconds since 1970."""
        return time.time()

    def host_name(self) -> str:
        """Return the name of this host."""
        return socket.gethostname()

    def addresses_of(self, name: str) -> list[str]:
        """Return the addresses to which a name resolves; empty: there are none."""
        try:
            found = _resolved(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
        except OSError:
            return []
        return list(dict.fromkeys(str(item[4][0]) for item in found))

    def address_towards(self, host: str) -> str:
        """Return this machine's address on the way to a host: IPv4 if there is such a way."""
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                return address_towards(host, family=family)
        return "127.0.0.1"

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Return a connection, or raise `OSError`."""
        return socket.create_connection((address, port), timeout=timeout_s)

    def facts(self) -> dict[str, Any]:
        """Return the fields of `RankFacts` that are about the machine, torch and its devices."""
        hip = getattr(torch.version, "hip", None)
        build = f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu"
        shm = shutil.disk_usage(_SHM) if Path(_SHM).is_dir() else None
        infiniband = Path("/sys/class/infiniband")
        matrix = torch.ones(_PRODUCT, _PRODUCT)
        cards = len([*Path("/dev").glob("nvidia[0-9]*")]) or int(Path("/dev/kfd").exists())
        return {
            "system": platform.system(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shardkit": str(getattr(sys.modules.get("shardkit"), "__version__", None)),
            "torch_xla": next((d.version for d in distributions(name="torch_xla")), None),
            "build": f"rocm {hip}" if hip else build,
            "backends": [name for name in _ENGINES if getattr(dist, f"is_{name}_available")()],
            **_devices(),
            "num_cards": cards,
            "interfaces": {
                name: usable[0]
                for name, addresses in interface_addresses().items()
                if (usable := [each for each in addresses if not each.startswith(_LINK_LOCAL)])
            },
            "shm_nbytes": None if shm is None else shm.total,
            "shm_free_nbytes": None if shm is None else shm.free,
            "limits": {name: _limit(name) for name in ("memlock", "nofile", "nproc")},
            "has_infiniband": infiniband.is_dir() and any(infiniband.iterdir()),
            "num_cores": min(_num_own_cores(), cores_of_quota()),
            "num_threads": torch.get_num_threads(),
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
            "compute_s": min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=_REPEATS)),
        }


def facts_of(machine: Machine, place: LaunchPlace, port: int) -> RankFacts:
    """Return the facts of a rank that answers others at a port."""
    host = machine.host_name()
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        host=host,
        pid=os.getpid(),
        host_addresses=machine.addresses_of(host),
        address=machine.address_towards(place.master_addr),
        port=port,
        **machine.facts(),
    )


def address_towards(host: str, port: int = 9, family: int = socket.AF_UNSPEC) -> str:
    """Return this machine's address on the route to a host; raise `OSError` without a route."""
    problem: OSError | None = None
    found = _resolved(host, port, family, socket.SOCK_DGRAM)
    for kind, of_packets, protocol, _, address in found:
        try:
            with socket.socket(kind, of_packets, protocol) as probe:
                probe.connect(address)  # For datagrams, this only chooses the route.
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError as error:
            problem = error
    raise problem or OSError(f"{host} has no address")


def _resolved(name: str, port: int | None, family: int, kind: int) -> list[Any]:
    """Return what a name resolves to; raise `socket.gaierror` if it resolves to nothing."""
    try:
        return socket.getaddrinfo(name, port, family, kind)
    except UnicodeError as error:  # A part of the name is empty, or longer than 63 letters.
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None


def interface_addresses() -> dict[str, list[str]]:
    """Return the addresses of each network interface by its name, IPv4 first."""
    import psutil  # An extra, not needed with one host.

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for kind in kinds for a in found if a.family == kind]
        for name, found in psutil.net_if_addrs().items()
    }


def _devices() -> dict[str, Any]:
    kind = accelerator_type()
    if kind is None:
        return {"device_type": None, "devices": [], "device_ids": []}
    module = torch.get_device_module(kind)
    numbers = range(torch.accelerator.device_count())
    name = getattr(module, "get_device_name", lambda number: f"{kind}:{number}")
    # Numbers begin at 0 in each rank, even if a launcher shows it only some of the devices.
    properties = getattr(module, "get_device_properties", lambda _: None)
    ids = [getattr(properties(number), "uuid", None) for number in numbers]
    return {
        "device_type": kind,
        "devices": [str(name(number)) for number in numbers],
        "device_ids": [str(each) for each in ids if each is not None],
    }


def _num_own_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # On macOS no process is bound to cores.


def cores_of_quota(cgroups: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> float:
    """Return the cores whose time this process gets, by its control groups; infinity: of all.

    Containers (``docker run --cpus=2``) and jobs have such quotas, and still see all cores.

    Args:
        cgroups: Folder of control groups, of version 1 or 2.
        own: Content of ``/proc/self/cgroup``; None: it is read.
    """
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text("utf-8") if own is None else own
    folders: list[Path] = []
    for line in (own or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            place = cgroups / controllers / path.lstrip("/")
            # In a container the folder of its group is the root, whatever the path is.
            folders += [each for each in (place, *place.parents) if each.is_relative_to(cgroups)]
    return min(map(_quota_in, folders), default=math.inf)


def _quota_in(folder: Path) -> float:
    """Return the cores that a control group gives, by files of either version; or infinity."""
    for names in ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number.
            texts = [(folder / name).read_text("utf-8") for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:
                return math.ceil(quota / period)
    return math.inf


def _limit(name: str) -> int | None:
    """Return a soft limit of this process; None: there is none."""
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    return None if soft == resource.RLIM_INFINITY else soft
