"""Compare the step times that `shardkit plan --hardware` predicts with measured ones.

python benchmarks/foreseen.py RANKS [--device cuda] [--folder FOLDER]

It calibrates and measures in turns, because the speed of a machine drifts. Then it plans. For 4
ranks this takes about three minutes. Nothing else should run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit import (
    DeviceMesh,
    MixedPrecisionPolicy,
    checkpoint_activations,
    fully_shard,
    init_device_mesh,
    plan,
)
from shardkit.planning._calibrate import Calibration
from shardkit.planning._profile import profile_text

_DEPTH = 6
_SHAPES = {"cpu": (128, 384), "cuda": (8192, 2048)}
_ROUNDS, _STEPS = 10, 2


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(_DEPTH)
        )
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Choice:
    """A way to shard.

    Attributes:
        mesh: Size of each axis.
        blocks: Number of blocks in a group; 0: the whole model is one group.
        reshard: Whether groups are freed between forward and backward.
        recompute: Whether blocks compute their activations again.
    """

    mesh: tuple[int, ...]
    blocks: int
    reshard: bool
    recompute: bool

    def shard(self, device: str, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a model for a type of device."""
        if self.recompute:
            checkpoint_activations(model)
        in_bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        policy = MixedPrecisionPolicy() if device == "cpu" else in_bf16
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": self.reshard}
        blocks = [*model.get_submodule("blocks").children()]
        for begin in range(0, len(blocks) if self.blocks else 0, self.blocks or 1):
            fully_shard(blocks[begin : begin + self.blocks], **options)
        fully_shard(model, **options)


def _choices(num_ranks: int) -> list[Choice]:
    meshes = [(num_ranks,), *([(num_ranks // 2, 2)] if num_ranks > 2 else [])]  # noqa: PLR2004
    kinds = [(True, False), (True, True), (False, False)]
    found = [Choice(m, b, *kind) for m, b, kind in product(meshes, (1, 2, 0), kinds)]
    return [c for c in found if c.reshard or c.blocks]  # A root alone is kept in any case.


def _model_and_rows(device: str) -> tuple[nn.Module, Tensor]:
    rows = torch.randn(_SHAPES[device], device=device)
    return _Mlp(rows.shape[1]).to(device), rows


def _step(choice: Choice, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model, rows = _model_and_rows(device)
    choice.shard(device, model, init_device_mesh(device, choice.mesh))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        _loss(model(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss(output: Tensor) -> Tensor:
    return output.square().sum()


def _measure(device: str, profile: Path, path: Path) -> None:
    """Measure as a rank: write a profile and the step times; each round runs all choices."""
    torch.set_num_threads(1)
    calibration = Calibration(device)
    steps = [_step(choice, device) for choice in _choices(int(os.environ["WORLD_SIZE"]))]
    times: list[list[float]] = [[] for _ in steps]
    for step in steps * 2:
        step()
    for _ in range(_ROUNDS):
        calibration.measure()
        for step, own in zip(steps, times, strict=True):
            _await_all(device)
            begin = time.perf_counter()
            for _ in range(_STEPS):
                step()
            _await_all(device)
            own.append((time.perf_counter() - begin) / _STEPS)
    found = calibration.profile()
    if os.environ["RANK"] == "0":
        profile.write_text(profile_text(found, "Of a benchmark."), encoding="utf-8")
        path.write_text(json.dumps(times), encoding="utf-8")
    dist.destroy_process_group()


def _await_all(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()


def _compare(num_ranks: int, device: str, profile: Path, measured: Path) -> str:
    """Return a table of the predicted and the measured times."""
    rounds = json.loads(measured.read_text(encoding="utf-8"))
    real, *halves = (
        [statistics.median(own[part]) for own in rounds]
        for part in (slice(None), slice(0, None, 2), slice(1, None, 2))
    )
    foreseen = []
    for choice in _choices(num_ranks):
        with torch.device("meta"):
            model, rows = _Mlp(_SHAPES[device][1]), torch.empty(_SHAPES[device])
        shard = partial(choice.shard, device)
        found = plan(
            model, rows, mesh=choice.mesh, device=device, loss=_loss, shard=shard,
            hardware=str(profile),
        )  # fmt: skip
        assert found.time is not None
        foreseen.append(found.time.seconds)
    errors = [a / b - 1 for a, b in zip(foreseen, real, strict=True)]
    lines = ["| choice | measured, ms | foreseen, ms | error |", "| --- | --- | --- | --- |"]
    for choice, a, b, error in zip(_choices(num_ranks), real, foreseen, errors, strict=True):
        lines.append(f"| {choice} | {a * 1e3:.1f} | {b * 1e3:.1f} | {error:+.1%} |")
    sizes = sorted(map(abs, errors))
    lines.append(
        f"median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, rank correlation "
        f"{_rank_correlation(real, foreseen):.2f}; of two halves of the rounds with each other "
        f"{_rank_correlation(*halves):.2f}"
    )
    return "\n".join(lines)


def _rank_correlation(one: list[float], other: list[float]) -> float:
    order = torch.tensor([one, other]).argsort().argsort().double()
    return torch.corrcoef(order)[0, 1].item()


def main() -> None:
    """Calibrate, measure and compare; with ``--measure`` act as a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--device", choices=_SHAPES, default="cpu")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        _measure(options.device, *options.measure)
        return
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    profile, measured = folder / "profile.toml", folder / "measured.json"
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    device = options.device
    measuring = [__file__, str(options.ranks), "--device", device]
    measuring += ["--measure", str(profile), str(measured)]
    subprocess.run([*launch, *measuring], env=environment, check=True)  # noqa: S603 - our own
    sys.stdout.write(_compare(options.ranks, device, profile, measured) + "\n")


if __name__ == "__main__":
    main()
