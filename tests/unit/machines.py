"""A machine for the doctor that says what a test wants; what is not said is healthy."""

from __future__ import annotations

import dataclasses
import pathlib
import socket
import time
import typing

import torch

from shardkit._doctor.facts import Machine, RankFacts

GIB = 2**30


def has_ipv6() -> bool:
    """Whether this machine reaches itself by it."""
    file = pathlib.Path("/proc/net/if_inet6")
    return file.exists() and f"{1:032x}" in file.read_text()


@dataclasses.dataclass
class FakeMachine(Machine):
    """See `shardkit._doctor.facts.Machine`; connections are real, on the loopback interface."""

    host: str = "node0"
    offset_s: float = 0.0
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    faces: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"lo": "127.0.0.1", "eth0": "127.0.0.1"}
    )
    closed: bool = False
    memory: tuple[int, int] | None = (16 * GIB, 15 * GIB)
    soft_limits: dict[str, int | None] = dataclasses.field(
        default_factory=lambda: {"memlock": None, "nofile": 65536, "nproc": None}
    )
    infiniband: bool = False
    cards: int = 0
    known: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    seen: tuple[str | None, list[str]] = (None, [])
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    product_s: float = 0.001

    def clock(self) -> float:
        return time.time() + self.offset_s

    def host_name(self) -> str:
        return self.host

    def addresses_of(self, name: str) -> list[str]:
        return self.names.get(name, ["127.0.0.1"])

    def address_towards(self, _host: str) -> str:
        return "127.0.0.1"

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        if self.closed:
            msg = "timed out"
            raise TimeoutError(msg)
        return socket.create_connection((address, port), timeout=timeout_s)

    def facts(self) -> dict[str, typing.Any]:
        device_type, devices = self.seen
        total, free = self.memory or (None, None)
        said = {
            "build": "cpu",
            "backends": ["gloo"],
            "device_type": device_type,
            "devices": devices,
            "num_cards": self.cards,
            "interfaces": self.faces,
            "shm_nbytes": total,
            "shm_free_nbytes": free,
            "limits": self.soft_limits,
            "has_infiniband": self.infiniband,
            "num_threads": torch.get_num_threads(),
            "environment": self.variables,
            "compute_s": self.product_s,
            **self.known,
        }
        of_rank = {"rank", "local_rank", "local_world_size", "host", "pid"}
        of_rank |= {"host_addresses", "address", "port"}
        healthy = {k: v for k, v in dataclasses.asdict(HEALTHY).items() if k not in of_rank}
        return {**healthy, **said}


HEALTHY = RankFacts(
    rank=0,
    local_rank=0,
    local_world_size=1,
    host="node0",
    pid=1,
    system="Linux",
    python="3.11.7",
    torch="2.13.0",
    shardkit="0.1.0",
    torch_xla=None,
    build="cuda 13.0",
    backends=["gloo", "nccl"],
    device_type="cuda",
    devices=["H200"],
    num_cards=1,
    host_addresses=["10.0.0.1"],
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    address="10.0.0.1",
    port=1,
    shm_nbytes=64 * GIB,
    shm_free_nbytes=60 * GIB,
    limits={"memlock": None, "nofile": 65536, "nproc": None},
    has_infiniband=True,
    num_cores=64,
    num_threads=8,
    environment={"NCCL_SOCKET_IFNAME": "eth0"},
    compute_s=0.001,
)


def group(num_hosts: int = 4, **of_one: typing.Any) -> list[RankFacts]:
    """Return a rank on each of several hosts, all healthy; the last one differs by `of_one`."""
    ranks = [
        dataclasses.replace(
            HEALTHY,
            rank=rank,
            host=f"node{rank}",
            host_addresses=[f"10.0.0.{rank + 1}"],
            interfaces={"lo": "127.0.0.1", "eth0": f"10.0.0.{rank + 1}"},
            address=f"10.0.0.{rank + 1}",
        )
        for rank in range(num_hosts)
    ]
    return [*ranks[:-1], dataclasses.replace(ranks[-1], **of_one)]
