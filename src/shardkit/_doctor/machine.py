"""Asks a machine for facts. Tests put machines in its place that are sick."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Protocol

import torch

from shardkit._doctor.facts import LaunchPlace, RankFacts
from shardkit.backends import accelerator_type

_SIOCGIFADDR = 0x8915  # Linux: address of an interface
_SHM = "/dev/shm"  # noqa: S108 - where the system has shared memory
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_")
_PRODUCT = 192
_REPEATS = 5


class Machine(Protocol):
    """A machine as this process sees it."""

    def clock(self) -> float:
        """Return seconds since 1970."""

    def host_name(self) -> str:
        """Return its name."""

    def addresses_of(self, name: str) -> list[str]:
        """Return what a name resolves to; empty: it does not."""

    def interfaces(self) -> dict[str, str]:
        """Return addresses of interfaces by name."""

    def address_towards(self, host: str) -> str:
        """Return this machine's address on the way to a host."""

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Return a connection; raises `OSError`."""

    def shared_memory(self) -> tuple[int, int] | None:
        """Return its size and what is free, in bytes."""

    def limits(self) -> dict[str, int | None]:
        """Return soft limits of this process."""

    def has_infiniband(self) -> bool:
        """Whether there are such adapters."""

    def num_cards(self) -> int:
        """Return how many cards the system has."""

    def num_cores(self) -> int:
        """Return how many cores this process may use."""

    def versions(self) -> dict[str, str | None]:
        """Return those of python, torch, shardkit and torch_xla, and torch's build."""

    def backends(self) -> list[str]:
        """Return names of torch's backends."""

    def devices(self) -> tuple[str | None, list[str]]:
        """Return the type of accelerators that torch sees, and their names."""

    def device_ids(self) -> list[str]:
        """Return what tells them from others of this machine; empty: their numbers do."""

    def environment(self) -> dict[str, str]:
        """Return variables that change how ranks communicate."""

    def compute_s(self) -> float:
        """Return the time of a small product."""


def facts_of(machine: Machine, place: LaunchPlace, port: int) -> RankFacts:
    """Return what a machine says.

    Args:
        machine: Is asked.
        place: Of this rank.
        port: Where this rank answers others.
    """
    versions, memory = machine.versions(), machine.shared_memory()
    device_type, devices = machine.devices()
    host = machine.host_name()
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        host=host,
        pid=os.getpid(),
        python=str(versions["python"]),
        torch=str(versions["torch"]),
        shardkit=str(versions["shardkit"]),
        torch_xla=versions["torch_xla"],
        build=str(versions["build"]),
        backends=machine.backends(),
        device_type=device_type,
        devices=devices,
        device_ids=machine.device_ids(),
        num_cards=machine.num_cards(),
        host_addresses=machine.addresses_of(host),
        interfaces=machine.interfaces(),
        address=machine.address_towards(place.master_addr),
        port=port,
        shm_nbytes=None if memory is None else memory[0],
        shm_free_nbytes=None if memory is None else memory[1],
        limits=machine.limits(),
        has_infiniband=machine.has_infiniband(),
        num_cores=machine.num_cores(),
        num_threads=torch.get_num_threads(),
        environment=machine.environment(),
        compute_s=machine.compute_s(),
    )


class ThisMachine:
    """The machine that this process runs on; see `Machine`."""

    def clock(self) -> float:
        """See `Machine`."""
        return time.time()

    def host_name(self) -> str:
        """See `Machine`."""
        return socket.gethostname()

    def addresses_of(self, name: str) -> list[str]:
        """See `Machine`."""
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            return []
        return list(dict.fromkeys(str(item[4][0]) for item in found))

    def interfaces(self) -> dict[str, str]:
        """See `Machine`."""
        found = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:
                    continue  # It has no address.
                found[name] = socket.inet_ntoa(answer[20:24])
        return found

    def address_towards(self, host: str) -> str:
        """See `Machine`."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, 9))  # Chooses an interface, and sends nothing.
            except OSError:
                return "127.0.0.1"
            return str(probe.getsockname()[0])

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """See `Machine`."""
        return socket.create_connection((address, port), timeout=timeout_s)

    def shared_memory(self) -> tuple[int, int] | None:
        """See `Machine`."""
        if not Path(_SHM).is_dir():
            return None
        usage = shutil.disk_usage(_SHM)
        return usage.total, usage.free

    def limits(self) -> dict[str, int | None]:
        """See `Machine`."""
        names = {
            "memlock": resource.RLIMIT_MEMLOCK,
            "nofile": resource.RLIMIT_NOFILE,
            "nproc": resource.RLIMIT_NPROC,
        }
        soft = {name: resource.getrlimit(number)[0] for name, number in names.items()}
        return {n: None if limit == resource.RLIM_INFINITY else limit for n, limit in soft.items()}

    def has_infiniband(self) -> bool:
        """See `Machine`."""
        folder = Path("/sys/class/infiniband")
        return folder.is_dir() and any(folder.iterdir())

    def num_cards(self) -> int:
        """See `Machine`."""
        return len([*Path("/dev").glob("nvidia[0-9]*")]) or int(Path("/dev/kfd").exists())

    def num_cores(self) -> int:
        """See `Machine`."""
        return len(os.sched_getaffinity(0))

    def versions(self) -> dict[str, str | None]:
        """See `Machine`."""
        hip = getattr(torch.version, "hip", None)
        build = f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu"
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shardkit": getattr(sys.modules.get("shardkit"), "__version__", None),
            "torch_xla": _version_of("torch_xla"),
            "build": f"rocm {hip}" if hip else build,
        }

    def backends(self) -> list[str]:
        """See `Machine`."""
        from shardkit._doctor.collectives import backends

        return backends()

    def devices(self) -> tuple[str | None, list[str]]:
        """See `Machine`."""
        kind = accelerator_type()
        if kind is None:
            return None, []
        module = torch.get_device_module(kind)
        count = torch.accelerator.device_count()
        name = getattr(module, "get_device_name", lambda number: f"{kind}:{number}")
        return kind, [str(name(number)) for number in range(count)]

    def device_ids(self) -> list[str]:
        """See `Machine`."""
        kind = accelerator_type()
        module = None if kind is None else torch.get_device_module(kind)
        if module is None or not hasattr(module, "get_device_properties"):
            return []
        # Numbers begin at 0 in each rank, also where a launcher shows it a part of the devices.
        found = [module.get_device_properties(n) for n in range(torch.accelerator.device_count())]
        return [str(each.uuid) for each in found if hasattr(each, "uuid")]

    def environment(self) -> dict[str, str]:
        """See `Machine`."""
        return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)}

    def compute_s(self) -> float:
        """See `Machine`."""
        matrix = torch.ones(_PRODUCT, _PRODUCT)
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            _ = matrix @ matrix
            times.append(time.perf_counter() - start)
        return min(times)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
