"""A host that disappears: two ranks on two hosts, of which one loses its network.

The hosts are network namespaces of this one, with names of their own. That takes root.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import typing

import parting_cases
import pytest

from launching import ASK_SOON, start_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.parting

LIMIT_S = 90
PARTED_S = 45  # With the start of the processes.
NET = "10.213.77"


class Hosts(typing.NamedTuple):
    """Two of them.

    Attributes:
        names: Of their network namespaces, and what the hosts are called.
        interfaces: By which they reach each other.
    """

    names: tuple[str, str]
    interfaces: tuple[str, str]

    def below(self, rank: int) -> list[str]:
        """Return the command that runs another one on the host of a rank."""
        rename = f'hostname {self.names[rank]} && exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.names[rank],
            "unshare",
            "--uts",
            "sh",
            "-c",
            rename,
            "sh",
        ]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Make two hosts with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, and the commands ip and unshare, for network namespaces")
    pid = os.getpid()
    found = Hosts((f"host-a-{pid}", f"host-b-{pid}"), (f"va{pid}"[:15], f"vb{pid}"[:15]))
    resolvers = [pathlib.Path("/etc/netns", name) for name in found.names]
    try:
        try:
            run("ip", "netns", "add", found.names[0])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
        run("ip", "netns", "add", found.names[1])
        a, b = found.interfaces
        run("ip", "link", "add", a, "type", "veth", "peer", "name", b)
        for rank, (name, interface) in enumerate(zip(*found, strict=True)):
            run("ip", "link", "set", interface, "netns", name)
            inside = ("ip", "-n", name)
            run(*inside, "addr", "add", f"{NET}.{rank + 1}/24", "dev", interface)
            run(*inside, "link", "set", interface, "up")
            run(*inside, "link", "set", "lo", "up")
            resolvers[rank].mkdir(parents=True)
            (resolvers[rank] / "resolv.conf").write_text("")  # Nobody answers: ask nobody.
        yield found
    finally:
        for name, resolver in zip(found.names, resolvers, strict=True):
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)
            shutil.rmtree(resolver, ignore_errors=True)


@pytest.mark.parametrize("culprit", [1, 0], ids=["a rank", "the rank with the store"])
def test_a_host_that_disappears_is_named(hosts: Hosts, culprit: int) -> None:
    """Where it is the store's host, the other can only say that the store does not answer."""
    ended = start_ranks(
        (parting_cases.__file__, "lose_the_network", str(culprit), "late"),
        2,
        limit_s=LIMIT_S,
        below=hosts.below,
        by_rank=lambda rank: {"GLOO_SOCKET_IFNAME": hosts.interfaces[rank]},
        MASTER_ADDR=f"{NET}.1",
        **ASK_SOON,
    )
    for rank, each in enumerate(ended):
        assert each.seconds < PARTED_S, each.output
        assert each.code not in (0, None), each.output
        assert "RankMismatchError" in each.output, each.output
        if rank == 0 and culprit == 1:
            assert "rank 1" in each.output, each.output
            assert hosts.names[1] in each.output, each.output
            assert "has not answered" in each.output, each.output
        elif rank == 1:
            assert "the store of the process group does not answer" in each.output, each.output
