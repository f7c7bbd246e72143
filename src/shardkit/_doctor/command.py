"""``python -m shardkit doctor``: the common steps of the ranks, and the printed result.

Ranks register, connect, and time collectives. Each step has a time limit. Needs the extra ``cli``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed as dist
import typer
from torch.distributed import distributed_c10d as c10d

from shardkit._doctor.facts import (
    Checkup,
    Finding,
    LaunchPlace,
    Link,
    Machine,
    RankFacts,
    Timing,
    facts_of,
    measure_collectives,
    ranks_in_words,
)
from shardkit._doctor.rules import examine
from shardkit._errors import LaunchError
from shardkit._text import shown_nbytes
from shardkit.backends import accelerator_type
from shardkit.backends.groups import engine_of
from shardkit.backends.watch.runs import RunStore, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


# --- links ----------------------------------------------------------------------------------------

_CLOCK, _BYTES = b"t", b"b"
_ANSWER = struct.Struct("d")
_LENGTH = struct.Struct("Q")
_ROUNDS = 8
_NBYTES = 4 * 2**20
_CHUNK = 2**18
_IDLE_S = 30.0
_MOST = 64  # Simultaneous connections; others wait in the system's queue.
# Interfaces of containers and virtual machines, which other hosts need not reach.
_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "vnet")


class Answerer:
    """Answers other ranks on all interfaces until it is closed: the time, or receipt of bytes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=_MOST, dualstack_ipv6=both
        )
        self._free = threading.BoundedSemaphore(_MOST)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="shardkit-doctor", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._free.acquire()  # noqa: SIM115, RUF100 - the connection's thread releases it
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # It was closed.
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.ExitStack() as stack:
            stack.callback(self._free.release)
            try:
                connection.settimeout(_IDLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (kind := connection.recv(1)) in (_CLOCK, _BYTES):
                    if kind == _BYTES:
                        (nbytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                        left = min(nbytes, _NBYTES)
                        while left:
                            left -= len(_receive(connection, min(left, _CHUNK)))
                    connection.sendall(_ANSWER.pack(self._machine.clock()))
            except OSError:
                return  # The other rank has gone.


def measure_links(
    machine: Machine, own: RankFacts, target: RankFacts, *, timeout_s: float
) -> list[Link]:
    """Connect to another rank on its primary address, then on its other interfaces.

    Loopback and interfaces of containers count only if they are the primary one.
    """
    addresses = [target.address]
    if own.host != target.host:
        addresses += [
            address
            for name, address in target.interfaces.items()
            if address != target.address and not name.startswith(_VIRTUAL)
        ]
    found = []
    for address in addresses:
        names = (name for name, each in target.interfaces.items() if each == address)
        place: dict[str, Any] = {"source": own.rank, "target": target.rank, "address": address}
        place |= {"interface": next(names, "?"), "is_primary": address == target.address}
        try:
            with machine.connect(address, target.port, timeout_s) as connection:
                connection.settimeout(timeout_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                latency_s, offset_s = _ask_clock(machine, connection)
                rate = _send(connection) if place["is_primary"] else None
        except OSError as error:
            link = Link(**place, error=str(error) or type(error).__name__)
        else:
            link = Link(**place, latency_s=latency_s, bytes_per_s=rate, clock_offset_s=offset_s)
        found.append(link)
    return found


def _ask_clock(machine: Machine, connection: socket.socket) -> tuple[float, float]:
    """Return the time of the fastest of several messages, and the clock offset from it.

    Source: F. Cristian, Probabilistic clock synchronization, 1989.
    """
    found = []
    for _ in range(_ROUNDS):
        before, start = machine.clock(), time.perf_counter()
        connection.sendall(_CLOCK)
        (theirs,) = _ANSWER.unpack(_receive(connection, _ANSWER.size))
        taken_s = time.perf_counter() - start
        found.append((taken_s, theirs - before - taken_s / 2))
    return min(found)


def _send(connection: socket.socket) -> float:
    chunk = bytes(_CHUNK)
    start = time.perf_counter()
    connection.sendall(_BYTES + _LENGTH.pack(_NBYTES))
    for _ in range(_NBYTES // _CHUNK):
        connection.sendall(chunk)
    _receive(connection, _ANSWER.size)
    return _NBYTES / (time.perf_counter() - start)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    parts = b""
    while len(parts) < nbytes:
        part = connection.recv(nbytes - len(parts))
        if not part:
            msg = "the connection was closed"
            raise ConnectionError(msg)
        parts += part
    return parts


# --- the session ----------------------------------------------------------------------------------

ALONE_VARIABLE = "SHARDKIT_DOCTOR_ALONE"
"""Variable that is set if the command has started the ranks itself."""

_POLL_S = 0.05
_MOST_PARTNERS = 8
_MOST_RANKS = 2**20
_FIRST, _LINKS, _COLLECTIVES = "come", "links", "collectives"


class NoStoreError(Exception):
    """A rank cannot reach the store where ranks meet; `finding` gives the reason."""

    def __init__(self, where: str, **words: str) -> None:
        self.finding = Finding(level="error", where=where, **words)
        super().__init__(self.finding.what)


def place_of(environment: Mapping[str, str]) -> LaunchPlace | None:
    """Return this rank's place; None: no launcher set one.

    Raises:
        LaunchError: A variable has something else than a launcher sets.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        return None

    def number(name: str, least: int, most: int, otherwise: int = 0) -> int:
        text = environment.get(name, str(otherwise))
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        msg = (
            f"{name} must be a number from {least} to {most}, got {text!r}. Launchers such as "
            f"torchrun set it; unset RANK, and the doctor starts ranks of its own."
        )
        raise LaunchError(msg)

    world_size = number("WORLD_SIZE", 1, _MOST_RANKS)
    rank = number("RANK", 0, world_size - 1)
    return LaunchPlace(
        rank=rank,
        world_size=world_size,
        local_rank=number("LOCAL_RANK", 0, world_size - 1, rank),
        local_world_size=number("LOCAL_WORLD_SIZE", 1, world_size)
        if "LOCAL_WORLD_SIZE" in environment
        else 0,
        master_addr=environment["MASTER_ADDR"],
        master_port=number("MASTER_PORT", 1, 65535),
        hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        is_alone=ALONE_VARIABLE in environment,
    )


def open_store(machine: Machine, place: LaunchPlace, timeout_s: float) -> RunStore:
    """Return the store at which ranks meet."""
    where = f"{place.master_addr}:{place.master_port}"
    host = f"rank {place.rank} on {machine.host_name()}"
    if not machine.addresses_of(place.master_addr):
        raise NoStoreError(
            host,
            check="master-unknown",
            what=f"MASTER_ADDR {place.master_addr!r} resolves to no address",
            remedy="give the address of rank 0's host, or a name that all hosts know (getent hosts "
            "NAME)",
        )
    if not place.hosts_store:
        _wait_for_master(machine, place, timeout_s, host)
    try:
        return connect(
            "doctor",
            place.master_addr,
            place.master_port,
            limit_s=timeout_s,
            is_master=place.hosts_store,
        )
    except (dist.DistError, RuntimeError) as error:
        raise NoStoreError(
            host,
            check="master-port",
            what=f"the port of {where} cannot be opened: {str(error).splitlines()[0]}",
            remedy="another process has it (ss -tlnp), or MASTER_ADDR is not an address of "
            "rank 0's host: choose another MASTER_PORT, or mend MASTER_ADDR",
        ) from error


def _wait_for_master(machine: Machine, place: LaunchPlace, timeout_s: float, host: str) -> None:
    """Connect once to the place where ranks meet, with retries until the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            machine.connect(place.master_addr, place.master_port, max(left_s, 0.1)).close()
        except OSError as error:
            if time.monotonic() + _POLL_S < deadline:
                time.sleep(_POLL_S)
                continue
            raise NoStoreError(
                host,
                check="master-unreachable",
                what=f"MASTER_ADDR {place.master_addr}, port {place.master_port} (MASTER_PORT) "
                f"could not be reached in {timeout_s:.0f} s: {error}",
                remedy="is rank 0 there, and is its MASTER_ADDR the same? If so, a firewall is "
                "in between: open this port and those that the system chooses, between all "
                "hosts",
            ) from error
        else:
            return


class Session:
    """A rank's part in a checkup; each step waits a limited time for other ranks.

    Collectives are timed on `device`. None: on the accelerator, if all ranks have one.
    """

    def __init__(
        self,
        machine: Machine,
        place: LaunchPlace,
        store: RunStore,
        *,
        timeout_s: float,
        device: str | None = None,
        times_collectives: bool = True,
    ) -> None:
        self._machine = machine
        self._place = place
        self._store = store
        self._timeout_s = timeout_s
        self._device = device
        self._times = times_collectives
        self.step = _FIRST
        where = f"{place.master_addr}:{place.master_port}"
        self.checkup = Checkup(place.world_size, where, is_alone=place.is_alone)

    def run(self) -> Checkup | None:
        """Do all steps; on rank 0 return the results."""
        answerer = Answerer(self._machine)
        try:
            own = facts_of(self._machine, self._place, answerer.port)
            self._put(_FIRST, dataclasses.asdict(own))
            known = self._from_rank_0("group", self._group, 2 * self._timeout_s)
            if group := [RankFacts(**facts) for facts in json.loads(known)]:
                self.step = _LINKS
                self._put(_LINKS, [*map(dataclasses.asdict, self._connect_all(own, group))])
                choose = functools.partial(self._device_type, group)
                kind = self._from_rank_0("collectives", choose, 3 * self._timeout_s)
                if kind:
                    self.step = _COLLECTIVES
                    self._time(kind)
            return self._result()
        finally:
            answerer.close()

    # --- steps ---

    def _group(self) -> str:
        """Wait for all ranks; return their facts as JSON, or none if not all ranks came."""
        came = [*self._collect(_FIRST).values()]
        on_host = Counter(facts["host"] for facts in came)
        for facts in came:
            facts["local_world_size"] = facts["local_world_size"] or on_host[facts["host"]]
        self.checkup.ranks += [RankFacts(**facts) for facts in came]
        return json.dumps([] if self.checkup.missing else came)

    def _connect_all(self, own: RankFacts, group: list[RankFacts]) -> list[Link]:
        world_size, rank = self._place.world_size, self._place.rank
        steps = range(1, min(world_size, _MOST_PARTNERS + 1))
        partners = dict.fromkeys([(rank + step) % world_size for step in steps])
        if rank != 0:
            partners.setdefault(0)  # Its clock is the reference.
        found: list[Link] = []
        for partner in partners:
            timeout_s = self._timeout_s / (2 * len(partners))
            found += measure_links(self._machine, own, group[partner], timeout_s=timeout_s)
        return found

    def _device_type(self, group: list[RankFacts]) -> str:
        """Return the device type for collectives; empty: they would hang, or are not wanted."""
        checkup = self.checkup
        checkup.links += [Link(**link) for link in self._collect_lists(_LINKS)]
        is_closed = any(link.error is not None and link.is_primary for link in checkup.links)
        types = {facts.device_type if facts.devices else None for facts in group}
        is_shared = any(
            f.devices and f.local_world_size > len(checkup.devices_of(f.host)) for f in group
        )
        common = types.pop() if len(types) == 1 and not is_shared else None
        if is_closed or checkup.silent or not self._times:
            return ""
        kind = self._device or common or "cpu"
        checkup.backend = engine_of(kind)
        return kind

    def _time(self, kind: str) -> None:
        store = c10d.PrefixStore("shardkit/doctor/group", self._store.connection)
        timings = measure_collectives(self._place, store, kind, timeout_s=self._timeout_s)
        self._put(_COLLECTIVES, [*map(dataclasses.asdict, timings)])
        if self._place.rank == 0:
            found = self._collect_lists(_COLLECTIVES)
            self.checkup.timings += [Timing(**timing) for timing in found]

    def _result(self) -> Checkup | None:
        """End together: the store must not end before others have read what they need."""
        self._from_rank_0("end", str, 3 * self._timeout_s)
        if self._place.rank != 0:
            self._put("bye", "")
            return None
        came = [facts.rank for facts in self.checkup.ranks if facts.rank]
        if self._place.hosts_store:
            self._store.await_keys([f"bye/{rank}" for rank in came], min(self._timeout_s, 2.0))
        return self.checkup

    # --- the store ---

    def _put(self, step: str, value: object) -> None:
        self._store.set(f"{step}/{self._place.rank}", json.dumps(value))

    def _collect(self, step: str) -> dict[int, Any]:
        """Return the values that ranks have put within the time limit, by rank."""
        keys = [f"{step}/{rank}" for rank in range(self._place.world_size)]
        self._store.await_keys(keys, self._timeout_s)
        missing = set(self._store.missing(keys))
        there = {rank: key for rank, key in enumerate(keys) if key not in missing}
        return {rank: json.loads(self._store.get(key)) for rank, key in there.items()}

    def _collect_lists(self, step: str) -> list[Any]:
        """Return the lists of all ranks as one list; note the ranks that put none."""
        answers = self._collect(step)
        if silent := [rank for rank in range(self._place.world_size) if rank not in answers]:
            self.checkup.silent[step] = silent
        return [item for items in answers.values() for item in items]

    def _from_rank_0(self, key: str, choose: Callable[[], str], timeout_s: float) -> str:
        """Return what rank 0 chooses; other ranks wait for it.

        Rank 0 may wait as long as a step for the others, and may have begun later.
        """
        if self._place.rank == 0:
            chosen = choose()
            self._store.set(key, chosen)
            return chosen
        with contextlib.suppress(RuntimeError):  # The store has ended with rank 0.
            if self._store.await_keys([key], timeout_s):
                return self._store.get(key).decode()
        where = f"rank {self._place.rank} on {self._machine.host_name()}"
        raise NoStoreError(
            where,
            check="rank-0-silent",
            what=f"rank 0 did not answer in {timeout_s:.0f} s, or has ended",
            remedy="look at the output of rank 0",
        )


# --- reports --------------------------------------------------------------------------------------

_MARKS = {"error": "ERROR", "warning": "WARN", "note": "NOTE"}


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether no finding is an error."""
    return all(finding.level != "error" for finding in findings)


def as_json(checkup: Checkup, findings: Sequence[Finding]) -> str:
    """Return all results as JSON, for programs."""
    found = {"healthy": is_healthy(findings), "findings": [*map(dataclasses.asdict, findings)]}
    facts = {**dataclasses.asdict(checkup), "missing": checkup.missing}
    return json.dumps({**found, **facts}, indent=2)


def lines_of(checkup: Checkup, findings: Sequence[Finding]) -> list[str]:
    """Return the results as text: hosts, collectives, then findings with their remedies."""
    lines = [f"{checkup.world_size} ranks, meeting at {checkup.master}"]
    by_host: dict[str, list[RankFacts]] = {}
    for facts in checkup.ranks:
        by_host.setdefault(facts.host, []).append(facts)
    for host, ranks in by_host.items():
        lines += ["", *_host_lines(host, ranks)]
    lines += ["", *_link_lines(checkup), *_timing_lines(checkup), *finding_lines(findings)]
    num_errors = sum(finding.level == "error" for finding in findings)
    num_warnings = sum(finding.level == "warning" for finding in findings)
    last = f"{num_errors} errors, {num_warnings} warnings"
    return [*lines, last if num_errors or num_warnings else "nothing is to be mended"]


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return findings as text."""
    lines = []
    for finding in findings:
        lines += [
            f"{_MARKS[finding.level]} {finding.check}: {finding.where}: {finding.what}.",
            f"  mend: {finding.remedy}.",
        ]
    return lines


def _host_lines(host: str, ranks: list[RankFacts]) -> list[str]:
    facts = ranks[0]
    limits = ", ".join(
        f"{name} {'unlimited' if limit is None else limit}" for name, limit in facts.limits.items()
    )
    build = f"torch {facts.torch} ({facts.build})"
    devices = ", ".join(dict.fromkeys(facts.devices)) or "none"
    shm = "none" if facts.shm_nbytes is None else shown_nbytes(facts.shm_nbytes)
    network = ", ".join(f"{name} {address}" for name, address in facts.interfaces.items())
    addresses = ", ".join(facts.host_addresses) or "nothing"
    return [
        f"{host}: {ranks_in_words([each.rank for each in ranks])}",
        f"  {facts.system}, python {facts.python}, {build}, shardkit {facts.shardkit}",
        f"  devices: {len(facts.devices)} ({devices}), backends: {', '.join(facts.backends)}",
        f"  {facts.num_cores} cores, {facts.num_threads} threads a rank, /dev/shm {shm}, {limits}",
        f"  network: {network}; the name resolves to {addresses}",
        "  XLA: torch_xla is not installed, so it is not checked"
        if facts.torch_xla is None
        else f"  XLA: torch_xla {facts.torch_xla}, whose devices are not checked",
    ]


def _link_lines(checkup: Checkup) -> list[str]:
    found = [link for link in checkup.links if link.is_primary and link.error is None]
    if not found:
        return []
    rates = [(link.bytes_per_s or 0.0) / 1e6 for link in found]
    waits = [(link.latency_s or 0.0) * 1e6 for link in found]
    text = (
        f"connections (TCP): {len(found)}, {min(rates):.0f} to {max(rates):.0f} MB/s, "
        f"{min(waits):.0f} to {max(waits):.0f} us there and back"
    )
    return [text, ""]


def _timing_lines(checkup: Checkup) -> list[str]:
    by_size: dict[tuple[str, int], list[float]] = {}
    for timing in checkup.timings:
        if timing.seconds is not None:
            by_size.setdefault((timing.collective, timing.nbytes), []).append(timing.seconds)
    if not by_size:
        return []
    lines = [f"collectives ({checkup.backend}), the median of ranks"]
    for (name, nbytes), seconds in sorted(by_size.items()):
        usual = statistics.median(seconds)
        rate = f"{nbytes / usual / 1e6:9.0f} MB/s of a rank's tensor" if nbytes > 4 else ""  # noqa: PLR2004
        lines.append(
            f"  {name:<10} {shown_nbytes(nbytes):>9} {usual * 1e3:10.3f} ms {rate}".rstrip()
        )
    return [*lines, ""]


# --- the command ----------------------------------------------------------------------------------

_STEPS = 4  # Each has the time limit.
_START_S = 60.0  # Time for processes to import torch.
_ALONE = 2


def doctor_command(
    as_json: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--json", help="For programs.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a step waits for ranks.")
    ] = 30.0,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where collectives are timed, e.g. cpu; else on the accelerator, if there is one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check this machine, or a group of ranks, and name what to mend; exit with 1 on errors.

    Without a launcher it starts two ranks on this machine. Under a launcher it checks the
    launcher's group, and rank 0 prints.

    Examples:
        python -m shardkit doctor

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node0:29500 -m shardkit doctor
    """
    known = ("cpu", *filter(None, [accelerator_type()]))
    if device is not None and device not in known:
        msg = f"--device {device}: torch sees {' and '.join(known)} here"
        raise typer.BadParameter(msg)
    place = place_of(os.environ)
    if place is None:
        raise typer.Exit(_start_ranks(timeout))
    raise typer.Exit(_check(place, timeout, device, is_json=as_json))


def _start_ranks(timeout_s: float) -> int:
    """Start ranks on this host with the same options; return 1 if any of them failed, else 0."""
    store = connect("doctor", "127.0.0.1", 0, limit_s=timeout_s, is_master=True)
    common = {
        **os.environ,
        "WORLD_SIZE": str(_ALONE),
        "LOCAL_WORLD_SIZE": str(_ALONE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.connection.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # Here, so no other process takes the port.
        ALONE_VARIABLE: "1",
    }
    common.setdefault("OMP_NUM_THREADS", "1")  # Torchrun does the same.
    command = [sys.executable, "-m", "shardkit", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})  # noqa: S603 - itself
        for rank in range(_ALONE)
    ]
    try:
        codes = [rank.wait(_START_S + (_STEPS + 1) * timeout_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        print("the ranks did not end in time", file=sys.stderr)
        return 1
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return max(abs(code) for code in codes) and 1


def _check(place: LaunchPlace, timeout_s: float, device: str | None, *, is_json: bool) -> int:
    """Do the part of one rank; return its exit status."""
    machine = Machine()
    session: Session | None = None

    def give_up() -> None:
        step = _FIRST if session is None else session.step
        finding = Finding(
            check="stuck",
            level="error",
            where=f"rank {place.rank} on {machine.host_name()}",
            what=f"the step {step!r} did not end",
            remedy="run again with --device cpu: if that ends, the accelerator or its network is "
            "at fault",
        )
        known = Checkup(place.world_size, "?") if session is None else session.checkup
        try:
            _print(known, [finding, *examine(known)], is_json=is_json and place.rank == 0)
        finally:
            os._exit(1)

    # A backend may wait in a place that no error reaches.
    limit = threading.Timer(_STEPS * timeout_s + 5, give_up)
    limit.daemon = True
    limit.start()
    try:
        store = open_store(machine, place, timeout_s)
        session = Session(machine, place, store, timeout_s=timeout_s, device=device)
        checkup = session.run()
    except NoStoreError as error:
        if is_json and place.rank == 0:
            _print(Checkup(place.world_size, "?"), [error.finding], is_json=True)
        else:
            print("\n".join(finding_lines([error.finding])), file=sys.stderr)
        return 1
    finally:
        limit.cancel()
    if checkup is None:
        return 0
    findings = examine(checkup)
    _print(checkup, findings, is_json=is_json)
    return 0 if is_healthy(findings) else 1


def _print(checkup: Checkup, findings: list[Finding], *, is_json: bool) -> None:
    text = as_json(checkup, findings) if is_json else "\n".join(lines_of(checkup, findings))
    print(text, flush=True)
