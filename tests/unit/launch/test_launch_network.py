"""By which address and interface other hosts reach this one."""

from __future__ import annotations

import socket
import sys

import pytest
import torch.distributed as dist
from machines import has_ipv6

from shardkit import MeshError
from shardkit._errors import LaunchError
from shardkit.backends.groups import make_torch_mesh
from shardkit.launch import Here, check_interface, here_towards


def test_this_host_reaches_itself() -> None:
    for address in ("127.0.0.1", "::1") if has_ipv6() else ("127.0.0.1",):
        assert here_towards(address, 29500) == Here(address, "lo")


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(LaunchError, match=r"does not know 'nobody\.invalid', where"):
        here_towards("nobody.invalid", 1)


def test_an_unknown_name_is_said_before_interfaces_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)  # Looking for them would raise.
    with pytest.raises(LaunchError, match="does not know 'nobody"):
        here_towards("nobody.invalid", 1)


def test_interfaces_that_do_not_lead_to_others() -> None:
    here = Here("10.0.0.2", "eth7")
    message = r"GLOO_SOCKET_IFNAME=lo: lo leads to no other host .* eth7 leads to the"
    with pytest.raises(LaunchError, match=message):
        check_interface("lo", here)
    with pytest.raises(LaunchError, match="nowhere is not on this host"):
        check_interface("nowhere", here)
    check_interface("", here)
    check_interface("lo", Here("127.0.0.1", "lo"))  # All "hosts" are this one.


def test_gloo_without_a_way_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Gloo connectFullMesh failed with timed out connecting: remote=[127.0.0.1]:34193"

    def start(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(dist, "init_process_group", start)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=rf"{socket.gethostname()}.*GLOO_SOCKET_IFNAME is lo"):
        make_torch_mesh("cpu", (1,), None)
    said = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        make_torch_mesh("cpu", (1,), None)
