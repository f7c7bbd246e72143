"""What is known of ranks, of links between them, and of their collectives; plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from shardkit._text import listed

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class LaunchPlace:
    """A rank's place in the group, as launchers say it.

    Attributes:
        hosts_store: Whether this rank opens the port by which ranks meet. Under torchrun an agent
            has done so.
        is_alone: Whether the command started the ranks itself.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    hosts_store: bool
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank says of itself and its machine.

    Attributes:
        python: Version. So are `torch`, `shardkit`, and `torch_xla`, which may be missing.
        build: Kind of torch's build: ``"cpu"``, ``"cuda 13.0"``, ``"rocm 6.4"``.
        backends: Names of torch's backends that are there.
        device_type: Type of the accelerator that torch sees; None: it sees none.
        devices: Names of those that this rank sees.
        num_cards: Number of cards (NVIDIA, AMD) that the system has, seen by torch or not.
        host_addresses: Addresses that the name of the host resolves to.
        interfaces: Addresses (IPv4) of network interfaces that are up, by name.
        address: Address of the interface towards rank 0's host.
        port: Port where it answers others.
        shm_nbytes: Size of shared memory; None: there is none.
        shm_free_nbytes: Free part of it.
        limits: Soft limits: ``memlock`` in bytes, ``nofile``, ``nproc``; None: no limit.
        has_infiniband: Whether there are adapters of InfiniBand or RoCE.
        num_cores: Number of cores that this process may use.
        num_threads: Number of threads that torch uses in it.
        environment: Variables that change how ranks communicate.
        compute_s: Time of a small product of matrices on the host, the best of several.
        device_ids: Names by which devices differ from others of the host; empty: their numbers do.
    """

    rank: int
    local_rank: int
    local_world_size: int
    host: str
    pid: int
    python: str
    torch: str
    shardkit: str
    torch_xla: str | None
    build: str
    backends: list[str]
    device_type: str | None
    devices: list[str]
    num_cards: int
    host_addresses: list[str]
    interfaces: dict[str, str]
    address: str
    port: int
    shm_nbytes: int | None
    shm_free_nbytes: int | None
    limits: dict[str, int | None]
    has_infiniband: bool
    num_cores: int
    num_threads: int
    environment: dict[str, str]
    compute_s: float
    device_ids: list[str] = field(default_factory=list)

    def dump(self) -> str:
        """Return it as text, for `load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> RankFacts:
        """Return what `dump` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection that one rank tried to make to another.

    Attributes:
        source: Rank that connects.
        target: Rank that answers.
        interface: Interface of the target.
        address: Address of that interface.
        is_primary: Whether backends use it, if nothing else is said.
        error: Reason why there is none; None: there is one.
        latency_s: Time of a message there and back, the best of several.
        bytes_per_s: Rate of a few megabytes.
        clock_offset_s: The target's clock minus the source's.
    """

    source: int
    target: int
    interface: str
    address: str
    is_primary: bool
    error: str | None = None
    latency_s: float | None = None
    bytes_per_s: float | None = None
    clock_offset_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A collective, as one rank saw it.

    Attributes:
        nbytes: Size of the tensor of a rank.
        seconds: The median of several; None: it failed.
        error: Reason why it failed.
    """

    rank: int
    collective: str
    nbytes: int
    seconds: float | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to mend, or to know.

    Attributes:
        check: A short name that stays the same.
        level: ``"error"``: training fails, or is wrong; ``"warning"``: it is slow, or may fail;
            ``"note"``.
        where: Ranks and hosts.
        what: The fault.
        remedy: The way to mend it.
    """

    check: str
    level: Level
    where: str
    what: str
    remedy: str


@dataclass
class Checkup:
    """All that rank 0 knows of the group.

    Attributes:
        world_size: Number of ranks that there should be.
        master: Host and port by which ranks meet.
        ranks: Facts of those that came.
        links: Connections between them.
        timings: Times of collectives.
        silent: Ranks that came, and did not answer in a later step, by the step.
        backend: Engine of the collectives; None: none were tried.
        is_alone: Whether the command started the ranks itself: there may be more than devices.
    """

    world_size: int
    master: str
    ranks: list[RankFacts] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    silent: dict[str, list[int]] = field(default_factory=dict)
    backend: str | None = None
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
