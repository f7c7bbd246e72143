"""Train with checkpoints, and go on automatically after a crash.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --crash-at 25

With ``--crash-at`` one rank dies at that step, once, without an error message. torchrun ends the
others and starts all ranks again. They find the latest checkpoint and go on. The printed losses are
those of a run that did not crash. If you run the script again, it goes on from the last checkpoint.
A run with another number of processes can do so too.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from shardkit import checkpoint, fully_shard

WIDTH, DEPTH, BATCH = 256, 4, 32

console = Console(highlight=False)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Draw this rank's samples of a step; they do not depend on anything that a crash loses."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x.roll(1, dims=1).sin()


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    say = console.print if dist.get_rank() == 0 else lambda *_: None
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(DEPTH)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    step = 0
    latest = checkpoint.latest(options.folder)
    if latest is not None:
        step = checkpoint.load(latest, model, optimizer, scheduler=scheduler)["step"]
        say(f"[green]going on from {latest}[/]")

    saving = None
    while step < options.steps:
        x, y = batch_of(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 5 == 0:
            dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
            say(f"step {step:4}  loss {loss.item():.6f}")
        if step % options.every == 0 or step == options.steps:
            # Training waits only for a copy in memory; the next save waits for this save.
            saving = checkpoint.async_save(
                options.folder / f"step-{step:06}",
                model,
                optimizer,
                keep_last=2,
                overwrite=True,  # Replaces damaged checkpoints, which `latest` skipped.
                scheduler=scheduler,
                step=step,
            )
        if step == options.crash_at and is_first_attempt() and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if saving is not None:
        saving.result()  # Raises if the last checkpoint could not be written.
    dist.destroy_process_group()


def is_first_attempt() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints (10)")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--crash-at", type=int, help="step after which a rank dies, once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
