"""Run test functions on real ranks, in worker processes that live as long as the test session.

A pool holds the processes of one world size. A call sends every rank the same module-level
function, by reference, and gets one outcome per rank. Before each call a rank returns to a known
state: a new gloo process group, seed 0, one thread. Ranks that fail are named with their traceback,
ranks that hang with their stacks; a pool in which a rank hung or died is killed and the next call
starts a new one.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import faulthandler
import functools
import gc
import inspect
import math
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import typing

import torch
import torch.distributed as dist

from script_server import TAKE_LONG

if typing.TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping, Sequence

# Workers are forked from a process that has imported once what takes seconds: torch, what shardkit
# and the first step of an optimizer import, and the packages that a session names. It passes over
# those that are not there, and must have no thread but one.
_PACKAGES = os.environ.get("SHARDKIT_TEST_PRELOAD", "").split()
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", *TAKE_LONG, "shardkit", *_PACKAGES])

Spawn = typing.Callable[..., list[typing.Any]]
"""What the fixtures ``spawn`` and ``spawn_errors`` are: see `Pools`, whose methods they call."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_START_TIMEOUT_S = 120
# How long the other ranks may still run once one has failed: enough to raise the same error a
# little later.
_GRACE_S = 6.0
_STACK_DUMP_TIMEOUT_S = 3.0
# Caches of torch keep process groups that were destroyed, each with threads that wake 100 times a
# second. A rank with more threads than this slows all others down.
_MAX_THREADS = 100


def on_ranks(
    world_size: int | str, timeout_s: float = 60
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on every rank, each with the test's arguments.

    Args:
        world_size: Number of ranks, or the argument of the test that is this number or the shape
            of a mesh over them.
        timeout_s: Limit for the body, in seconds.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def on_every_rank(*args: typing.Any, **given: typing.Any) -> None:
            if not given:  # In a rank, which finds this function by its name.
                test(*args)
                return
            spawn = given.pop("spawn")
            ranks = given[world_size] if isinstance(world_size, str) else world_size
            ranks = math.prod(ranks) if isinstance(ranks, tuple) else ranks
            spawn(on_every_rank, ranks, *map(given.get, signature.parameters), timeout_s=timeout_s)

        fixture = inspect.Parameter("spawn", inspect.Parameter.KEYWORD_ONLY)
        parameters = (*signature.parameters.values(), fixture)
        on_every_rank.__signature__ = signature.replace(parameters=parameters)
        return on_every_rank

    return decorate


def in_each(
    choices: Mapping[str, object], fn: Callable[..., typing.Any], *args: object
) -> dict[str, typing.Any]:
    """Run ``fn(*args, choice)`` for each of some cases that share a call, which takes its time.

    Args:
        choices: The last argument of ``fn`` in each case, by the name of the case.
        fn: Function at module level.
        args: Its first arguments.

    Returns:
        By the name of the case, what ``fn`` returned. An error tells in which case it was raised,
        and the output of a rank that hangs or dies ends with the name of its case.
    """
    found = {}
    for name, choice in choices.items():
        print(f"case {name!r}", flush=True)
        torch.manual_seed(0)  # As at the beginning of a call.
        try:
            found[name] = fn(*args, choice)
        except BaseException as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found


def spawn_each(
    spawn: Spawn,
    choices: Mapping[str, object],
    fn: Callable[..., typing.Any],
    world_size: int,
    *args: object,
) -> dict[str, list[typing.Any]]:
    """Return by name what ``spawn(fn, world_size, *args, choice)`` would, of cases in one call."""
    by_rank = spawn(in_each, world_size, choices, fn, *args, timeout_s=60 + 20 * len(choices))
    return {name: [found[name] for found in by_rank] for name in choices}


class WorkerError(Exception):
    """Ranks failed in a call; the message shows each one's traceback or stacks, and output."""


@dataclasses.dataclass(frozen=True)
class Returned:
    """A rank's function returned."""

    value: object

    def __str__(self) -> str:
        return "returned"


@dataclasses.dataclass(frozen=True)
class Raised:
    """A rank's function raised."""

    type_name: str  # Name of the exception's class.
    bases: tuple[str, ...]  # Names of that class and all its bases.
    message: str  # ``str`` of the exception.
    traceback: str  # As Python prints it.

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe ``error`` by strings, which unlike the exception itself can always be sent."""
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return cls(
            type(error).__name__, bases, str(error), "".join(traceback.format_exception(error))
        )

    def __str__(self) -> str:
        return f"raised {self.type_name}\n{self.traceback}"


@dataclasses.dataclass(frozen=True)
class Died:
    """A rank's process ended during the call."""

    exitcode: int | None

    def __str__(self) -> str:
        if self.exitcode is not None and self.exitcode < 0:
            return f"died of {signal.Signals(-self.exitcode).name}"
        return f"died with exit code {self.exitcode}"


@dataclasses.dataclass(frozen=True)
class Stuck:
    """A rank had not finished in time; its stacks are at the end of its output."""

    waited_s: float

    def __str__(self) -> str:
        return f"was still running after {self.waited_s:.1f} s"


Outcome = Returned | Raised | Died | Stuck


@dataclasses.dataclass(frozen=True)
class Call:
    """What the parent sends to a rank."""

    number: int  # Count of calls to this pool; names the call's rendezvous.
    timeout_s: float  # How long the parent waits.
    sys_path: list[str]  # The parent's, so that the ranks import the same test modules.
    pickled: bytes  # The function, by module and name, and its arguments.


# --- a rank -------------------------------------------------------------------------------------


def _serve(
    rank: int,
    world_size: int,
    port: int,
    log_path: str,
    connection: multiprocessing.connection.Connection,
) -> None:
    """Answer calls until the parent closes the connection: a worker process's main function."""
    _redirect_output(log_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the parent, which then closes the pool.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    environment = dict(os.environ)
    gc.freeze()  # What the processes of a pool have in common: collections leave it out.
    connection.send_bytes(b"ready")
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        outcome = _run_call(call, rank, world_size, store, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(_pickle_outcome(outcome))


def _run_call(
    call: Call, rank: int, world_size: int, store: dist.Store, environment: dict[str, str]
) -> Returned | Raised:
    try:
        sys.path[:] = call.sys_path
        fn, args = pickle.loads(call.pickled)
        _reset_state(environment)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{call.number}", store),
            rank=rank,
            world_size=world_size,
            # Longer than the parent waits: a hang ends with stacks and not with an error of gloo's.
            timeout=dt.timedelta(seconds=call.timeout_s + 60),
        )
        return Returned(fn(*args))
    except BaseException as error:  # noqa: BLE001 - the parent judges, also SystemExit
        return Raised.of(error)


_modules_frozen = 0


def _collect_garbage() -> None:
    """Collect what the last call left; leave modules out, which have most objects by far."""
    global _modules_frozen  # noqa: PLW0603 - of this process
    gc.collect()
    if len(sys.modules) > _modules_frozen:  # Not each time: what is frozen is never collected.
        gc.freeze()
        _modules_frozen = len(sys.modules)


def forget_old_meshes() -> None:
    """Clear DTensor's caches: they hand out meshes of process groups that earlier calls ended."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()  # noqa: SLF001
    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001 - it holds what that one made
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # noqa: SLF001 - 2.9 has none
        torch._C._clear_DTensor_sharding_propagator_cache()  # noqa: SLF001


def _forget_watch_settings() -> None:
    """Set what a call chose by `set_watch` back to what the environment says."""
    if settings := sys.modules.get("shardkit._settings"):
        chosen = dataclasses.asdict(settings.WatchSettings.of_environment())
        settings.watch_settings.update(chosen, {})


def _reset_state(environment: dict[str, str]) -> None:
    """Undo what the last call left.

    The old process group goes here and not when its call ends: then all ranks have answered, so
    that none closes a connection on which another still receives.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_old_meshes()
    _collect_garbage()
    os.environ.clear()
    os.environ.update(environment)
    _forget_watch_settings()
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():  # To turn it off imports inductor.
        torch.use_deterministic_algorithms(mode=False)
    torch.manual_seed(0)


def _pickle_outcome(outcome: Returned | Raised) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - whatever a result's own pickling raises
        return pickle.dumps(Raised.of(error))


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _exit_with_parent() -> None:
    """End this process when the parent has ended, also one that hangs in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# --- the parent ---------------------------------------------------------------------------------


@dataclasses.dataclass
class _Worker:
    """The parent's end of one rank."""

    rank: int
    process: multiprocessing.process.BaseProcess
    connection: multiprocessing.connection.Connection
    log: pathlib.Path

    def receive(self) -> Outcome:
        """Read the answer that is there, or say how the process ended."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Died(self.process.exitcode)

    def dump_stacks(self) -> None:
        """Make the rank write the stack of each of its threads to its log."""
        before = self.log.stat().st_size
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_DUMP_TIMEOUT_S
        size = before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            last, size = size, self.log.stat().st_size
            if before < last == size:
                return


class Pool:
    """The worker processes of one world size."""

    def __init__(self, world_size: int) -> None:
        """Start the processes and wait until all are ready."""
        self._logs = tempfile.TemporaryDirectory(prefix="shardkit-workers-")
        # The store lives here so that it survives a rank that dies. It listens on IPv4 alone: torch
        # looks up the name of each process that connects, and resolvers may take 5 s to find that
        # an IPv6 address has none.
        listener = socket.create_server(("127.0.0.1", 0))
        self._store = dist.TCPStore(
            *listener.getsockname(),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._calls = 0
        self._workers = [self._start(rank, world_size) for rank in range(world_size)]
        for worker in self._workers:
            if (
                not worker.connection.poll(_START_TIMEOUT_S)
                or worker.connection.recv_bytes() != b"ready"
            ):
                log = worker.log.read_text() if worker.log.exists() else ""
                self.kill()
                msg = f"rank {worker.rank} did not start in {_START_TIMEOUT_S} s\n{log}"
                raise WorkerError(msg)

    def _start(self, rank: int, world_size: int) -> _Worker:
        ours, theirs = _context.Pipe()
        log = pathlib.Path(self._logs.name) / f"rank{rank}.log"
        process = _context.Process(
            target=_serve,
            args=(rank, world_size, self._store.port, str(log), theirs),
            name=f"rank {rank} of {world_size}",
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Worker(rank, process, ours, log)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [worker.process.pid for worker in self._workers]

    @property
    def is_worn_out(self) -> bool:
        """Whether a rank has gathered so many threads that new processes pay off."""
        tasks = [pathlib.Path(f"/proc/{pid}/task") for pid in self.pids]
        return any(len(list(path.iterdir())) > _MAX_THREADS for path in tasks if path.exists())

    def run(
        self, fn: Callable[..., object], args: Sequence[object], timeout_s: float
    ) -> tuple[list[Outcome], list[str]]:
        """Run ``fn(*args)`` on every rank.

        Returns:
            By rank, what became of it and what it printed meanwhile.
        """
        self._calls += 1
        call = pickle.dumps(Call(self._calls, timeout_s, list(sys.path), pickle.dumps((fn, args))))
        starts = [worker.log.stat().st_size for worker in self._workers]
        outcomes: dict[int, Outcome] = {}
        for worker in self._workers:
            try:
                worker.connection.send_bytes(call)
            except BrokenPipeError:  # It died since the last call.
                outcomes[worker.rank] = worker.receive()
        self._collect(outcomes, timeout_s)
        outputs = []
        for worker, start in zip(self._workers, starts, strict=True):
            outputs.append(worker.log.read_bytes()[start:].decode(errors="replace"))
        return [outcomes[worker.rank] for worker in self._workers], outputs

    def _collect(self, outcomes: dict[int, Outcome], timeout_s: float) -> None:
        """Wait for all ranks, after a failure for ``_GRACE_S`` more; take stacks of the rest."""
        begin = time.monotonic()
        deadline = begin + timeout_s
        waiting = {
            worker.connection: worker for worker in self._workers if worker.rank not in outcomes
        }
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for connection in ready:
                worker = waiting.pop(connection)
                outcomes[worker.rank] = worker.receive()
            if not all(isinstance(outcome, Returned) for outcome in outcomes.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        for worker in waiting.values():
            worker.dump_stacks()
            outcomes[worker.rank] = Stuck(time.monotonic() - begin)

    def close(self) -> None:
        """End idle processes: they exit when their connection closes."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(timeout=5)
        self.kill()

    def kill(self) -> None:
        """Kill the processes, whatever they do."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._logs.cleanup()


class Pools:
    """Pools by world size, started when first used and again after one was killed or worn out."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._pools: dict[int, Pool] = {}

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.renew()

    def renew(self) -> None:
        """Close all pools. What is run next starts in new processes: nothing before is left."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def pids(self, world_size: int) -> list[int]:
        """Process ids by rank, empty if no such pool runs."""
        return self._pools[world_size].pids if world_size in self._pools else []

    def spawn(
        self, fn: Callable[..., object], world_size: int, *args: object, timeout_s: float = 60
    ) -> list[typing.Any]:
        """Run ``fn(*args)`` on ``world_size`` ranks.

        Args:
            fn: A function at the top level of an importable module.
            world_size: Number of ranks.
            *args: The same on every rank; a rank asks ``torch.distributed`` which it is.
            timeout_s: Limit for the call, without the start of the processes.

        Returns:
            What each rank returned.

        Raises:
            WorkerError: If a rank raised, died or did not finish.
        """
        outcomes = self._run(fn, world_size, args, timeout_s, accepted=Returned)
        return [outcome.value for outcome in outcomes]

    def spawn_errors(
        self, fn: Callable[..., object], world_size: int, *args: object, timeout_s: float = 60
    ) -> list[Raised | None]:
        """Run ``fn(*args)`` on ``world_size`` ranks where errors are expected.

        Returns:
            What each rank raised; None for a rank that returned.

        Raises:
            WorkerError: If a rank died or did not finish, which is what an error on some ranks only
                leads to.
        """
        outcomes = self._run(fn, world_size, args, timeout_s, accepted=Returned | Raised)
        return [outcome if isinstance(outcome, Raised) else None for outcome in outcomes]

    def _run(
        self,
        fn: Callable[..., object],
        world_size: int,
        args: Sequence[object],
        timeout_s: float,
        *,
        accepted: type | types.UnionType,
    ) -> list[typing.Any]:
        """Run a call and raise if an outcome is not an ``accepted`` one.

        The pool is killed if a rank did not answer. Where all did, it starts the next call from a
        new state.
        """
        if world_size not in self._pools:
            self._pools[world_size] = Pool(world_size)
        try:
            outcomes, outputs = self._pools[world_size].run(fn, args, timeout_s)
        except BaseException:
            self._pools.pop(world_size).kill()
            raise
        if not all(isinstance(outcome, Returned | Raised) for outcome in outcomes):
            self._pools.pop(world_size).kill()
        elif self._pools[world_size].is_worn_out:
            self._pools.pop(world_size).close()
        if not all(isinstance(outcome, accepted) for outcome in outcomes):
            raise WorkerError(_report(fn, outcomes, outputs))
        return outcomes


def _report(fn: Callable[..., object], outcomes: Sequence[Outcome], outputs: Sequence[str]) -> str:
    failed = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, Returned)]
    lines = [f"{fn.__module__}.{fn.__qualname__}: failed on ranks {failed} of {len(outcomes)}"]
    for rank, (outcome, output) in enumerate(zip(outcomes, outputs, strict=True)):
        lines.append(f"--- rank {rank} {outcome}")
        if output:
            lines.append(f"--- output of rank {rank}\n{output}")
    return "\n".join(lines)
