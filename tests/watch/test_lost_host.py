"""A host that disappears: two ranks on two hosts, of which one loses its network.

The hosts are namespaces of this one. That takes root.
"""

from __future__ import annotations

import typing

import healthy_cases
import parting_cases
import pytest

from launching import ASK_SOON, start_ranks
from two_hosts import Host, two_hosts

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

pytestmark = pytest.mark.parting

LIMIT_S = 150
PARTED_S = 90 + 20  # With the start of the processes.


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a cable between them."""
    with two_hosts() as found:
        yield found


@pytest.mark.parametrize("culprit", [1, 0], ids=["a rank", "the rank with the store"])
def test_a_host_that_disappears_is_named(hosts: tuple[Host, Host], culprit: int) -> None:
    """Where it is the store's host, the other can only say that the store does not answer."""
    ended = start_ranks(
        (parting_cases.__file__, "lose_the_network", str(culprit), "late"),
        2,
        limit_s=LIMIT_S,
        below=lambda rank: hosts[rank].command(),
        by_rank=lambda rank: {"GLOO_SOCKET_IFNAME": hosts[rank].interface},
        MASTER_ADDR=hosts[0].address,
        **ASK_SOON,
    )
    for rank, each in enumerate(ended):
        assert each.seconds < PARTED_S, each.output
        assert each.code not in (0, None), each.output
        assert "RankMismatchError" in each.output, each.output
        if rank == 0 and culprit == 1:
            assert "rank 1" in each.output, each.output
            assert hosts[1].name in each.output, each.output
            assert "has not answered" in each.output, each.output
        elif rank == 1:
            assert "the store of the process group does not answer" in each.output, each.output


@pytest.mark.parametrize(
    ("name", "silent_after_s"),
    [
        ("hold_the_lock", "60"),
        ("sleep", "60"),
        ("save_slowly", "60"),
        ("hold_the_lock", "5"),
        ("be_stopped", "5"),
        ("stop_with_the_store", "5"),
    ],
)
def test_a_host_that_only_takes_long_goes_on(
    hosts: tuple[Host, Host], name: str, silent_after_s: str, tmp_path: pathlib.Path
) -> None:
    """It has another network, another name and process ids of its own.

    However long it is silent: its kernel accepts connections.
    """
    ended = start_ranks(
        (healthy_cases.__file__, name, str(tmp_path)),
        2,
        limit_s=LIMIT_S,
        below=lambda rank: hosts[rank].command(),
        by_rank=lambda rank: {"GLOO_SOCKET_IFNAME": hosts[rank].interface},
        MASTER_ADDR=hosts[0].address,
        LONG_S="25",
        SHARDKIT_SILENT_AFTER_S=silent_after_s,
        **ASK_SOON,
    )
    for each in ended:
        assert each.code == 0, each.output
        assert "result [" in each.output
        assert "Error" not in each.output, each.output
