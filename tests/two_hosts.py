"""Two hosts on one machine: namespaces of networks, names and processes, with a cable between them.

Each has an address, a host name and process ids of its own. That takes root, and the commands `ip`
and `unshare`. The disk and the memory are shared.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import typing

import pytest

if typing.TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NET = "10.213.77"


class Ended(typing.NamedTuple):
    """How a command on a host ended."""

    code: int  # Its exit status.
    output: str  # Both of its streams.
    at: float  # When, by `time.monotonic`.


class Running(typing.NamedTuple):
    """A command on a host, and all that it started there."""

    process: subprocess.Popen[bytes]  # The one that holds the host's namespaces: all end with it.
    file: pathlib.Path  # What is written.

    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def kill(self) -> None:
        """End all processes of this host at once, as a power cut does."""
        self.process.kill()
        self.process.wait()

    def wait_for(self, text: str, limit_s: float = 60) -> float:
        """Return when a text was written."""
        end = time.monotonic() + limit_s
        while text not in self.output():
            assert time.monotonic() < end, f"no {text!r} in:\n{self.output()}"
            assert self.process.poll() is None, f"ended without {text!r}:\n{self.output()}"
            time.sleep(0.05)
        return time.monotonic()

    def wait(self, limit_s: float = 90) -> Ended:
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            msg = f"did not end within {limit_s:.0f} s:\n{self.output()}"
            raise AssertionError(msg) from None
        return Ended(code, self.output(), time.monotonic())


class Host(typing.NamedTuple):
    """One of them."""

    namespace: str  # Of its network.
    interface: str  # To the other one.
    address: str  # On it.
    name: str  # What it calls itself.

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs another one here, with process ids of its own."""
        unshare = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        named = ("sh", "-c", f'hostname {self.name} && "$@"', "sh")
        return ["ip", "netns", "exec", self.namespace, *unshare, *named, *arguments]

    def start(
        self, *arguments: str, cwd: pathlib.Path, environment: Mapping[str, str] | None = None
    ) -> Running:
        with tempfile.NamedTemporaryFile(dir=cwd, prefix=self.name, delete=False) as output:
            process = subprocess.Popen(
                self.command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
            )
        return Running(process, pathlib.Path(output.name))

    def cut(self) -> None:
        """Take the cable out: nothing arrives, and nobody is told."""
        run("ip", "-n", self.namespace, "link", "set", self.interface, "down")

    def slow_down(self, rate: str) -> None:
        """Let this host send no more than, for example, ``20mbit`` per second."""
        shape = ("tbf", "rate", rate, "burst", "64kbit", "latency", "500ms")
        inside = ("ip", "netns", "exec", self.namespace)
        found = subprocess.run(
            [*inside, "tc", "qdisc", "replace", "dev", self.interface, "root", *shape],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode:
            pytest.skip(f"this kernel does not slow a link down (tc tbf): {found.stderr.strip()}")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(names: Sequence[str] = ("host-a", "host-b")) -> Iterator[tuple[Host, Host]]:
    """Make them, and take them away; skip where that is not allowed."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"network namespaces need root and ip, unshare; missing here: {missing}")
    pid = os.getpid()
    found = [
        Host(f"shardkit-{letter}-{pid}", f"v{letter}{pid}"[:15], f"{NET}.{number}", name)
        for number, (letter, name) in enumerate(zip("ab", names, strict=True), 1)
    ]
    resolvers = [pathlib.Path("/etc/netns", host.namespace) for host in found]
    try:
        try:
            run("ip", "netns", "add", found[0].namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        run("ip", "netns", "add", found[1].namespace)
        a, b = (host.interface for host in found)
        run("ip", "link", "add", a, "type", "veth", "peer", "name", b)
        for host, resolver in zip(found, resolvers, strict=True):
            run("ip", "link", "set", host.interface, "netns", host.namespace)
            inside = ("ip", "-n", host.namespace)
            run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            run(*inside, "link", "set", host.interface, "up")
            run(*inside, "link", "set", "lo", "up")
            resolver.mkdir(parents=True)
            (resolver / "resolv.conf").write_text("")  # Nobody answers: ask nobody.
        yield found[0], found[1]
    finally:
        for host, resolver in zip(found, resolvers, strict=True):
            _end_all(host.namespace)
            subprocess.run(
                ("ip", "netns", "delete", host.namespace), check=False, capture_output=True
            )
            shutil.rmtree(resolver, ignore_errors=True)


def _end_all(namespace: str) -> None:
    """End what is left in a namespace of this test."""
    listed = subprocess.run(
        ("ip", "netns", "pids", namespace), capture_output=True, text=True, check=False
    )
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
