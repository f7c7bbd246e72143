"""By which address, and on which interface, other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import NamedTuple

from shardkit._doctor.machine import interface_addresses
from shardkit._errors import LaunchError

_INET6 = Path("/proc/net/if_inet6")


class Here(NamedTuple):
    """This host, as another one sees it.

    Attributes:
        address: Numeric.
        interface: Its name; None: the system does not tell.
    """

    address: str
    interface: str | None


def here_towards(host: str, port: int) -> Here:
    """Return the address and the interface by which this host reaches another one.

    Nothing is sent. If `host` is this one, it is the interface that has its address.

    Raises:
        LaunchError: The name is not known here, or no route leads there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        msg = (
            f"this host ({socket.gethostname()}) does not know {host!r}, where the ranks are to "
            f"meet: {error.strerror}. Give the IP address of the first host as "
            f"--main_process_ip, or the name that a name server or /etc/hosts has."
        )
        raise LaunchError(msg) from None
    problem: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # Of datagrams: it chooses the route, and sends nothing.
                own = probe.getsockname()[0].split("%")[0]
        except OSError as error:
            problem = error
            continue
        return Here(own, _interface_of(own))
    own_addresses = ", ".join(interface_addresses().values()) or "none"
    msg = (
        f"no route leads from this host ({socket.gethostname()}) to {host}, where the ranks are "
        f"to meet: {problem}. Its addresses are {own_addresses}. Give an address "
        f"of the network that all hosts share as --main_process_ip."
    )
    raise LaunchError(msg)


def check_interface(variable: str, chosen: str, here: Here) -> None:
    """Refuse interfaces that cannot lead to other hosts: ranks would wait for half an hour.

    Args:
        variable: Variable by which they were chosen.
        chosen: Names, with commas between them.
        here: Address and interface by which this host reaches the first one.

    Raises:
        LaunchError: One of them is not there, or is for this host alone.
    """
    known = {name for _, name in socket.if_nameindex()}
    wanted = here.interface or f"the one with the address {here.address}"
    for name in filter(None, chosen.split(",")):
        address = interface_addresses().get(name)
        alone = address is not None and ipaddress.ip_address(address).is_loopback
        if name not in known or (alone and not ipaddress.ip_address(here.address).is_loopback):
            problem = "leads to no other host" if alone else "is not on this host"
            msg = (
                f"{variable}={chosen}: {name} {problem} ({socket.gethostname()}). {wanted} leads "
                f"to the first host. Leave the variable out, or set it to the interface of the "
                f"network that all hosts share."
            )
            raise LaunchError(msg)


def _interface_of(address: str) -> str | None:
    wanted = ipaddress.ip_address(address)
    for name, known in interface_addresses().items():
        if ipaddress.ip_address(known) == wanted:
            return name
    if wanted.version == 6 and _INET6.exists():  # noqa: PLR2004 - IPv6
        for line in _INET6.read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
    return None
