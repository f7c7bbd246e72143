"""Training on XLA devices against torch_xla's own fully sharded classes, on the CPU."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from models import GPTShape
from report import Report, Spread, Target
from rounds import Settings, turns
from xla_program import Program, last_program

_START_SECONDS = 300
_WARM_STEPS = 4
_MIB = 2**20


class Worker:
    """A contender in its own process, with its own copy of XLA and folder of dumps.

    Args:
        name: A function of `xla_worker`.
        num_devices: Number of virtual devices of the CPU.
        shape: Sizes of the model.
    """

    def __init__(self, name: str, num_devices: int, shape: GPTShape) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._num_devices = num_devices
        self._errors = Path(self._folder.name, "errors")
        self.dumps = Path(self._folder.name, "dumps")
        address = str(Path(self._folder.name, "socket"))
        environment = os.environ | {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(num_devices),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # The default scheduler of XLA's CPU compiler hoists gathers.
            "XLA_FLAGS": f"--xla_dump_to={self.dumps} --xla_dump_hlo_as_text "
            f"--xla_cpu_enable_concurrency_optimized_scheduler=false",
        }
        if name.startswith("replica"):
            # Collectives between threads hang in the asynchronous client.
            environment |= {"PJRT_CPU_ASYNC_CLIENT": "0", "NPROC": "16"}
            environment["XLA_THREAD_POOL_SIZE"] = "16"
        with Listener(address) as listener:
            script = str(Path(__file__).with_name("xla_worker.py"))
            sizes = json.dumps(asdict(shape))
            self._process = subprocess.Popen(  # noqa: S603 - this script
                [sys.executable, script, name, address, sizes],
                env=environment,
                stderr=self._errors.open("wb"),
            )
            self._connection = listener.accept()

    def __enter__(self) -> Self:
        """Return the worker itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process."""
        if kind is None:
            self._connection.send("end")
            self._process.wait(_START_SECONDS)
        else:
            self._process.kill()
        self._folder.cleanup()

    def steps(self, num: int) -> list[float]:
        """Take steps; return the seconds of each."""
        seconds: list[float] = self._ask(num)
        return seconds

    def loss(self) -> float:
        """Return the last loss, of the first rank in replica mode."""
        loss: float = self._ask(None)
        return loss

    def _ask(self, command: Any) -> Any:
        try:
            self._connection.send(command)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            said = self._errors.read_text(encoding="utf-8", errors="replace")
            msg = f"{self._process.args!r} has ended:\n{said[-4000:]}"
            raise RuntimeError(msg) from error

    def program(self) -> Program:
        """Return the compiled step."""
        return last_program(self.dumps, self._num_devices)


@dataclass(frozen=True)
class XlaCase:
    """Steps of a GPT in one of torch_xla's two modes."""

    summary: str  # The case in words.
    # Functions of `xla_worker`, by the names in the table; the first is shardkit's.
    contenders: Mapping[str, str]
    num_devices: int  # Number of virtual devices of the CPU.
    shape: GPTShape  # Sizes of the model.

    def run(self, settings: Settings) -> Report:
        """Measure; without torch_xla the table is empty."""
        columns = ("contender", "collectives", "MiB moved", "temp MiB", "step ms", "of shardkit's")
        if find_spec("torch_xla") is None:
            return Report(self.summary, columns, (), ("skipped: torch_xla is not installed",))
        names = list(self.contenders)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(function, self.num_devices, self.shape))
                for name, function in self.contenders.items()
            }
            for worker in workers.values():
                worker.steps(_WARM_STEPS)
            for name in turns(names, settings.num_rounds):
                seconds[name].append(Spread.of(workers[name].steps(settings.num_steps)).median)
            programs = {name: worker.program() for name, worker in workers.items()}
            losses = {name: worker.loss() for name, worker in workers.items()}
        return self._report(columns, programs, seconds, losses)

    def _report(
        self,
        columns: Sequence[str],
        programs: Mapping[str, Program],
        seconds: Mapping[str, Sequence[float]],
        losses: Mapping[str, float],
    ) -> Report:
        own, *others = programs
        rows = []
        for name, program in programs.items():
            counts = ", ".join(f"{num} {opcode}" for opcode, num in sorted(program.counts.items()))
            ratio = Spread.of_ratios(seconds[name], seconds[own])
            rows.append(
                (
                    name,
                    f"{program.num_collectives}: {counts}",
                    f"{program.bytes_moved / _MIB:.2f}",
                    f"{program.temp_bytes / _MIB:.2f}",
                    f"{Spread.of(seconds[name]).median * 1e3:.1f}",
                    f"{ratio:.2f}",
                )
            )
        mine, notes = programs[own], []
        for name in others:
            theirs = programs[name]
            ratios = {
                "collectives": mine.num_collectives / theirs.num_collectives,
                "bytes moved": mine.bytes_moved / theirs.bytes_moved,
                "temp memory": mine.temp_bytes / theirs.temp_bytes,
                "step time": Spread.of_ratios(seconds[own], seconds[name]).median,
            }
            for what, ratio in ratios.items():
                notes.append(Target(f"{what} / {name}", 1.0).verdict(ratio))
        shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        notes.append(f"Loss after equally many steps: {shown}")
        measured: dict[str, Any] = {
            name: {**asdict(programs[name]), "seconds": list(seconds[name])} for name in programs
        }
        return Report(self.summary, columns, rows, notes, measured)
