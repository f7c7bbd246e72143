"""The checkpoint case: saving and loading model and optimizer, and the bytes written."""

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state

from contenders import BESIDE, FSDP2, SHARDKIT, Workload, build, shardkit_of
from models import GPTShape
from ranks import Ranks
from report import ABSENT, Report, Spread, Target
from rounds import Settings, able, turns

_DIM = 1024
_BYTES_PER_PARAMETER = 12  # fp32, and the same for each of AdamW's averages.
_PARAMETERS_PER_LAYER = 12 * _DIM**2
_COLUMNS = {
    "save": "save s",
    "dcp_save": "dcp.save s",
    "load_cold": "first load s",
    "load_again": "load s, evicted",
    "load_warm": "load s, cached",
    "async_blocked": "async_save blocks s",
    "copy": "plain copy s",
}
_MODELS = {"50 MB": (200, 62_500), "3,000 tiny": (3_000, 8)}
"""Number of fp32 tensors of a model, and elements of each: one has many bytes, one many tensors."""
_BESIDE_LIMIT = 1.02


@dataclass(frozen=True)
class CheckpointCase:
    """A GPT with AdamW's state, of the size in the settings."""

    summary: str  # The case in words.

    def run(self, settings: Settings) -> Report:
        """Run saves and loads of the contenders in turns."""
        per_layer = _PARAMETERS_PER_LAYER * _BYTES_PER_PARAMETER
        num_layers = max(1, round(settings.state_gb * 1e9 / per_layer))
        shape = GPTShape(dim=_DIM, num_layers=num_layers, num_heads=16, batch=1, sequence=8)
        names = able((SHARDKIT, FSDP2))
        times: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ranks = {
                name: stack.enter_context(
                    Ranks(
                        settings.world_size,
                        settings.device_type,
                        CheckpointRank,
                        name,
                        Workload(shape),
                    )
                )
                for name in names
            }
            for number in range(settings.num_rounds + 1):
                for name in names if number % 2 == 0 else reversed(names):
                    turn = Path(folder, f"{number}")
                    found = _turn(ranks[name], turn, name, direct_first=number % 4 < 2)  # noqa: PLR2004 - twice, then twice not
                    if number > 0:  # The first round makes memory and files.
                        for what, seconds in found.items():
                            times[name].setdefault(what, []).append(seconds)
            nbytes = sum(ranks[names[0]].call("nbytes"))
        return _report(self.summary, times, nbytes)

    def run_beside(self, settings: Settings) -> Report:
        """Compare saves and loads of one rank with the source that ``--beside`` names, in turns.

        The times are processor time: the processor reads and writes files in the page cache, and
        other work on the machine does not count.
        """
        names = able((SHARDKIT, BESIDE))
        times: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ranks = {
                name: stack.enter_context(Ranks(1, settings.device_type, BesideRank, name))
                for name in names
            }
            for number, name in enumerate(turns(names, settings.num_rounds + 1)):
                [found] = ranks[name].call("turn", f"{folder}/{name}")
                if number >= len(names):  # The first round makes memory and files.
                    for what, seconds in found.items():
                        times[name].setdefault(what, []).append(seconds)
        ratios = {
            what: Spread.of_medians(values, times[BESIDE][what])
            for what, values in times[SHARDKIT].items()
        }
        return Report(
            title=f"{self.summary}, seconds of the processor",
            columns=("contender", *(f"{what} s" for what in ratios)),
            rows=[
                [name, *(f"{Spread.of(measured[what]):.3f}" for what in ratios)]
                for name, measured in times.items()
            ],
            notes=[
                f"{Target(f'{what} / beside', _BESIDE_LIMIT).verdict(ratio.median, 3)} "
                f"({ratio.low:.3f}..{ratio.high:.3f})"
                for what, ratio in ratios.items()
            ],
            measured=times,
        )


def _turn(ranks: Ranks, folder: Path, name: str, *, direct_first: bool) -> dict[str, float]:
    """Save and load once in each way; return seconds of the slowest rank, and bytes."""
    found: dict[str, float] = {}

    def save(what: str, call: str, path: Path) -> None:
        os.sync()  # Another contender's writes must not count.
        found[what] = max(ranks.call(call, str(path)))

    ways = [("save", "save", folder / "x")]
    if name == SHARDKIT:
        ways.insert(0 if direct_first else 1, ("dcp_save", "dcp_save", folder / "z"))
    for way in ways:
        save(*way)
    found["written"] = sum(file.stat().st_size for file in (folder / "x").iterdir())
    os.sync()
    ranks.call("evict", str(folder / "x"))
    found["load_cold"] = max(ranks.call("load", str(folder / "x")))
    found["load_warm"] = max(ranks.call("load", str(folder / "x")))
    ranks.call("evict", str(folder / "x"))
    found["load_again"] = max(ranks.call("load", str(folder / "x")))
    found["copy"] = max(ranks.call("copy"))
    save("async_blocked", "async_save", folder / "y")
    shutil.rmtree(folder)
    return found


def _report(title: str, times: dict[str, dict[str, list[float]]], nbytes: int) -> Report:
    rows = []
    for name, measured in times.items():
        cells = [
            f"{Spread.of(measured[what]):.2f}" if what in measured else ABSENT for what in _COLUMNS
        ]
        written = Spread.of([count / nbytes for count in measured["written"]])
        rows.append([name, *cells, f"{written.median:.4f}"])
    notes = [f"{nbytes / 1e9:.2f} GB of state"]
    if len(times) > 1:
        ours, theirs = times[SHARDKIT], times[FSDP2]
        pairs = {
            "save": (ours["save"], theirs["save"]),
            "dcp.save of a shardkit model": (ours["dcp_save"], theirs["save"]),
            "first load": (ours["load_cold"], theirs["load_cold"]),
            "load of evicted files": (ours["load_again"], theirs["load_again"]),
            "load of cached files": (ours["load_warm"], theirs["load_warm"]),
        }
        for what, (value, reference) in pairs.items():
            ratio = Spread.of_ratios(value, reference)
            target = Target(f"{what} / FSDP2", 1.0)
            notes.append(f"{target.verdict(ratio.median)} ({ratio.low:.2f}..{ratio.high:.2f})")
        blocked = Spread.of_ratios(ours["async_blocked"], ours["copy"])
        notes.append(Target("async_save blocks / plain copy", 1.0).verdict(blocked.median))
        written = max(ours["written"]) / nbytes
        notes.append(Target("bytes written / bytes of state", 1.01).verdict(written))
    return Report(
        title=title,
        columns=("contender", *_COLUMNS.values(), "written / state"),
        rows=rows,
        notes=notes,
        measured={"nbytes": nbytes, **times},
    )


class CheckpointRank:
    """One rank of a contender, after one step of training."""

    def __init__(self, device: torch.device, name: str, workload: Workload) -> None:
        """Train one step, so that the optimizer has its state."""
        trainer = build(name, workload, device)
        self._is_shardkit = name == SHARDKIT
        self._model, self._optimizer = trainer.model, trainer.optimizer
        tokens = torch.zeros(1, workload.shape.sequence, dtype=torch.int64, device=device)
        trainer.loss(tokens, tokens).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def nbytes(self) -> int:
        """Return the bytes of state on this rank."""
        return sum(tensor.nbytes for tensor in self._pieces())

    def _pieces(self) -> list[Tensor]:
        state = list(self._model.state_dict().values())
        state += [t for values in self._optimizer.state.values() for t in values.values()]
        return [t.to_local().detach() if hasattr(t, "to_local") else t for t in state]

    def save(self, path: str) -> float:
        """Save by the functions that the contender's users call; return seconds."""
        if self._is_shardkit:
            from shardkit import checkpoint

            return _timed(lambda: checkpoint.save(path, self._model, self._optimizer))
        return self.dcp_save(path)

    def dcp_save(self, path: str) -> float:
        """Save by torch's functions; return seconds."""
        return _timed(lambda: dcp.save(self._torch_state(), checkpoint_id=path))

    def _torch_state(self) -> dict[str, Any]:
        model, optim = torch_state.get_state_dict(self._model, self._optimizer)
        return {"model": model, "optim": optim}

    def load(self, path: str) -> float:
        """Load by the functions that the contender's users call; return seconds."""
        if self._is_shardkit:
            from shardkit import checkpoint

            return _timed(lambda: checkpoint.load(path, self._model, self._optimizer))
        return _timed(lambda: self._torch_load(path))

    def _torch_load(self, path: str) -> None:
        state = self._torch_state()
        dcp.load(state, checkpoint_id=path)
        torch_state.set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    def async_save(self, path: str) -> float:
        """Start a save in the background; return the seconds until training can go on."""
        handles: list[Any] = []
        if self._is_shardkit:
            from shardkit import checkpoint

            seconds = _timed(
                lambda: handles.append(checkpoint.async_save(path, self._model, self._optimizer))
            )
        else:
            seconds = _timed(
                lambda: handles.append(dcp.async_save(self._torch_state(), checkpoint_id=path))
            )
        handles.pop().result()
        dist.barrier()
        return seconds

    def copy(self) -> float:
        """Copy this rank's state to new memory; return seconds."""
        pieces = self._pieces()
        return _timed(lambda: [piece.to("cpu", copy=True) for piece in pieces])

    def evict(self, path: str) -> None:
        """Drop a checkpoint's files from the page cache, so that a load reads the disk."""
        for file in Path(path).iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        dist.barrier()


class _Tensors(nn.Module):
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(map(nn.Parameter, tensors))

    def forward(self) -> None:
        """Compute nothing: a module without a forward is not sharded."""


class BesideRank:
    """One rank of one source of shardkit, with models that have parameters only."""

    def __init__(self, device: torch.device, name: str) -> None:
        """Shard the models."""
        self._shardkit = shardkit_of(name)
        torch.manual_seed(0)
        mesh = self._shardkit.init_device_mesh(device.type, (1,))
        self._models = {}
        for what, (count, numel) in _MODELS.items():
            tensors = (torch.randn(numel, device=device) for _ in range(count))
            model = _Tensors(tensors)
            self._models[what] = self._shardkit.fully_shard(model, mesh=mesh)

    def turn(self, path: str) -> dict[str, float]:
        """Save and load each model once; return seconds of this process's processor time."""
        checkpoint = importlib.import_module(f"{self._shardkit.__name__}.checkpoint")
        found = {}
        for what, model in self._models.items():
            for call in ("save", "load"):
                act = getattr(checkpoint, call)
                begin = time.process_time()
                act(f"{path} {what}", model)
                found[f"{call} {what}"] = time.process_time() - begin
            shutil.rmtree(f"{path} {what}")
        return found


def _timed(act: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    kept = act()
    seconds = time.perf_counter() - begin
    del kept
    return seconds
