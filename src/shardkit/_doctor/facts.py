"""What is known of ranks, of links between them, and of their collectives; plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardkit._text import listed

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class LaunchPlace:
    """A rank's place in the group, as launchers say it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    # Whether this rank opens the port by which ranks meet. Under torchrun an agent has done so.
    hosts_store: bool
    is_alone: bool = False  # Whether the command started the ranks itself.


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank says of itself and its machine."""

    rank: int
    local_rank: int
    local_world_size: int
    host: str
    pid: int
    python: str  # Version. So are `torch`, `shardkit`, and `torch_xla`, which may be missing.
    torch: str
    shardkit: str
    torch_xla: str | None
    build: str  # Kind of torch's build: ``"cpu"``, ``"cuda 13.0"``, ``"rocm 6.4"``.
    backends: list[str]  # Names of torch's backends that are there.
    device_type: str | None  # Type of the accelerator that torch sees; None: it sees none.
    devices: list[str]  # Names of those that this rank sees.
    num_cards: int  # Number of cards (NVIDIA, AMD) that the system has, seen by torch or not.
    host_addresses: list[str]  # Addresses that the name of the host resolves to.
    interfaces: dict[str, str]  # Addresses (IPv4) of network interfaces that are up, by name.
    address: str  # Address of the interface towards rank 0's host.
    port: int  # Port where it answers others.
    shm_nbytes: int | None  # Size of shared memory; None: there is none.
    shm_free_nbytes: int | None  # Free part of it.
    # Soft limits: ``memlock`` in bytes, ``nofile``, ``nproc``; None: no limit.
    limits: dict[str, int | None]
    has_infiniband: bool  # Whether there are adapters of InfiniBand or RoCE.
    num_cores: int  # Number of cores that this process may use.
    num_threads: int  # Number of threads that torch uses in it.
    environment: dict[str, str]  # Variables that change how ranks communicate.
    compute_s: float  # Time of a small product of matrices on the host, the best of several.
    # Names by which devices differ from others of the host; empty: their numbers do.
    device_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection that one rank tried to make to another."""

    source: int  # Rank that connects.
    target: int  # Rank that answers.
    interface: str  # Interface of the target.
    address: str  # Address of that interface.
    is_primary: bool  # Whether backends use it, if nothing else is said.
    error: str | None = None  # Reason why there is none; None: there is one.
    latency_s: float | None = None  # Time of a message there and back, the best of several.
    bytes_per_s: float | None = None  # Rate of a few megabytes.
    clock_offset_s: float | None = None  # The target's clock minus the source's.


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A collective, as one rank saw it."""

    rank: int
    collective: str
    nbytes: int  # Size of the tensor of a rank.
    seconds: float | None  # The median of several; None: it failed.
    error: str | None = None  # Reason why it failed.


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to mend, or to know."""

    check: str  # A short name that stays the same.
    # ``"error"``: training fails, or is wrong; ``"warning"``: it is slow, or may fail; ``"note"``.
    level: Level
    where: str  # Ranks and hosts.
    what: str  # The fault.
    remedy: str  # The way to mend it.


@dataclass
class Checkup:
    """All that rank 0 knows of the group."""

    world_size: int  # Number of ranks that there should be.
    master: str  # Host and port by which ranks meet.
    ranks: list[RankFacts] = field(default_factory=list)  # Facts of those that came.
    links: list[Link] = field(default_factory=list)  # Connections between them.
    timings: list[Timing] = field(default_factory=list)  # Times of collectives.
    # Ranks that came, and did not answer in a later step, by the step.
    silent: dict[str, list[int]] = field(default_factory=dict)
    backend: str | None = None  # Engine of the collectives; None: none were tried.
    # Whether the command started the ranks itself: there may be more than devices.
    is_alone: bool = False

    def devices_of(self, host: str) -> set[str]:
        """Return the devices that ranks of a host see; launchers may give each rank one."""
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
        """Different hosts of the ranks that came."""
        return len({facts.host for facts in self.ranks})

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return next((facts.host for facts in self.ranks if facts.rank == rank), "?")


def ranks_in_words(ranks: list[int]) -> str:
    """Return ranks for a message."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(sorted(ranks), str)}"
