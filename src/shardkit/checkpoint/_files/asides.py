"""Names beside a checkpoint under which it is written, replaced or deleted, and whose they are.

No two jobs use the same one: a name has in it who made it. So no lock is needed, and what a killed
job leaves is told from what another one is writing.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

INCOMPLETE, REPLACED, DELETED = ".incomplete", ".replaced", ".deleted"

ABANDONED_AFTER_S = 3600.0
"""Nothing is written for so long, and it is not known whether the job lives: it is on another host.

If it does, its save fails. What was under the name stays.
"""

_NAME_MAX = 255
_OWNER_MAX = 64  # Of what stands in a name beside that of the host.
_OWNED = re.compile(
    r"\.(?P<name>.+)"
    r"\.(?P<host>[\w-]*)-(?P<pid>\d+)-(?P<place>[0-9a-f]{8})-(?P<start>\d+)-[0-9a-f]{8}"
    r"(?P<kind>\.incomplete|\.replaced|\.deleted)"
)
# Without an owner: of shardkit before names had one.
_OWNERLESS = re.compile(r"\.(?P<name>.+)(?P<kind>\.incomplete|\.replaced|\.deleted)")


@dataclass(frozen=True)
class Owner:
    """The process that made a name: the first of the ranks that save.

    Attributes:
        host: Name of its host, maybe cut.
        pid: Process id.
        place: Checksum that tells apart hosts, their boots, and containers; empty if not known.
        start: Time at which it began, in ticks of its host: process ids are used again.
    """

    host: str
    pid: int
    place: str
    start: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unnamed host'}"

    @property
    def is_alive(self) -> bool | None:
        """Whether it runs; None if that cannot be known here."""
        if not self.place.strip("0") or self.place != _place():
            return None
        return _start_of(self.pid) == self.start


@dataclass(frozen=True)
class Aside:
    """A directory or file under such a name.

    Attributes:
        path: Place of it.
        name: That of the checkpoint.
        kind: ``".incomplete"``, ``".replaced"`` or ``".deleted"``.
        owner: Process that made it; None in what a release wrote whose names had no owner.
    """

    path: Path
    name: str
    kind: str
    owner: Owner | None

    @property
    def target(self) -> Path:
        """The checkpoint's own path."""
        return self.path.with_name(self.name)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody is at work on it any more."""
        if self.owner is None:
            return True
        is_alive = self.owner.is_alive
        if is_alive is not None:
            return not is_alive
        return time.time() - _last_written(self.path) > ABANDONED_AFTER_S


def new_aside(path: Path, kind: str) -> Path:
    """Return a name beside `path` that nobody else uses."""
    me = own()
    room = max(_NAME_MAX - _OWNER_MAX - len(os.fsencode(path.name)), 0)
    owner = f"{me.host[:room]}-{me.pid}-{me.place}-{me.start}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.{owner}{kind}")


def parse_aside(path: Path) -> Aside | None:
    """Tell what a path is; None if it is not of this kind."""
    if (found := _OWNED.fullmatch(path.name)) is not None:
        owner = Owner(found["host"], int(found["pid"]), found["place"], found["start"])
        return Aside(path, found["name"], found["kind"], owner)
    if (found := _OWNERLESS.fullmatch(path.name)) is not None:
        return Aside(path, found["name"], found["kind"], None)
    return None


def asides_in(directory: Path) -> Iterator[Aside]:
    """Yield what in a directory is of this kind."""
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(os.listdir(directory)):  # noqa: PTH208 - names are enough
            if entry.startswith(".") and (aside := parse_aside(directory / entry)) is not None:
                yield aside


def own() -> Owner:
    """Return this process."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:32]
    return Owner(host, os.getpid(), _place() or "0" * 8, _start_of(os.getpid()))


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it is no path
    except OSError:
        return ""
    return f"{zlib.crc32(boot + namespace.encode()):08x}"


def _start_of(pid: int) -> str:
    """Return when a process of this host began; an empty string if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "0" if pid == os.getpid() else ""
    # Behind the command, which may contain anything: state, ..., and as the 20th the start.
    fields = stat.rpartition(b")")[2].split()
    return "" if fields[0] in {b"Z", b"X"} else fields[19].decode()


def _last_written(path: Path) -> float:
    """Return when the newest of what is in a directory was written."""
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = path.lstat().st_mtime
        for entry in os.scandir(path):
            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest
