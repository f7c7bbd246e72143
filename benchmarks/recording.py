"""The cost of `shardkit.record`: microseconds for each event, and the share of a step.

python benchmarks/recording.py [WIDTH DEPTH ROWS] [--rounds N] [--steps N]

Two gloo ranks, or one rank on a card, train with and without recording, in turns. Nothing else
should run.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardkit import fully_shard, init_device_mesh, record

_NUM_RANKS = {"cpu": 2, "cuda": 1}


def _train(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Time rounds on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    num_ranks = _NUM_RANKS[options.device]
    store = dist.FileStore(f"{folder}/store", num_ranks)
    engine = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(engine, store=store, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh(options.device, (num_ranks,))
    torch.manual_seed(0)
    width = options.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(options.depth)]
    model = nn.Sequential(*layers, nn.Linear(width, 1)).to(options.device)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(options.rows, width, device=options.device)

    def steps() -> tuple[float, float]:
        """Return the seconds of a step: of the processor, and of the clock."""
        dist.barrier()
        began = time.perf_counter(), time.thread_time()
        for _ in range(options.steps):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if options.device != "cpu":
            torch.accelerator.synchronize()
        ended = time.perf_counter(), time.thread_time()
        wall_s, own_s = (after - before for before, after in zip(began, ended, strict=True))
        return own_s / options.steps, wall_s / options.steps

    steps()
    extra_us, written_us, walls, shares, num_events = [], [], [], [], 0
    for number in range(options.rounds):
        # The second run may be faster, so the order changes from round to round.
        if number % 2:
            without_s, wall_s = steps()
        with record(model, folder) as run:
            with_s, _ = steps()
            ended = time.thread_time()
        written_s = time.thread_time() - ended
        if number % 2 == 0:
            without_s, wall_s = steps()
        num_events = run.num_events // options.steps
        extra_us.append((with_s - without_s) / num_events * 1e6)
        written_us.append(written_s / run.num_events * 1e6)
        shares.append((with_s - without_s) / wall_s)
        walls.append(wall_s)
    if rank == 0:
        first, middle, last = statistics.quantiles(extra_us)
        sys.stdout.write(
            f"{num_events} events a step of {statistics.median(walls) * 1e3:.1f} ms\n"
            f"{middle:.2f} us an event ({first:.2f}..{last:.2f}), "
            f"{statistics.median(shares):.2%} of a step; "
            f"{statistics.median(written_us):.2f} us to write one\n"
        )
    dist.destroy_process_group()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("width", type=int, nargs="?", default=64)
    parser.add_argument("depth", type=int, nargs="?", default=48)
    parser.add_argument("rows", type=int, nargs="?", default=64)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=_NUM_RANKS, default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_train, (options, str(Path(folder))), nprocs=_NUM_RANKS[options.device])


if __name__ == "__main__":
    _main()
