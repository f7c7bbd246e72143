"""torchdata's StatefulDataLoader: its place in an epoch is saved beside the model."""

from __future__ import annotations

import typing

import pytest
import torch
from launched import TIMEOUT_S
from torch import nn

from shardkit import auto_shard, checkpoint

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.frameworks

STOP = 3  # of 8 batches in an epoch


def run(folder: str, *, resume: bool) -> list[tuple[list[int], float]]:
    """Train two epochs, saving in the middle of the first; return each batch and loss."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    torch.manual_seed(7 if resume else 0)
    samples = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = [(number, row) for number, row in enumerate(samples)]
    sampler = StatefulDistributedSampler(data, seed=3)
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
    auto_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    epoch, step, seen = 0, 0, []
    if resume:
        values = checkpoint.load(folder, model, optimizer, loader=loader)
        epoch, step = values["epoch"], STOP
    for number in range(epoch, 2):
        sampler.set_epoch(number)
        for numbers, rows in loader:
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((numbers.tolist(), float(loss.detach())))
            step += 1
            if step == STOP and not resume:
                checkpoint.save(folder, model, optimizer, loader=loader, epoch=number)
    return seen


def stop_and_go_on(folder: str) -> list[int]:
    once = run(folder, resume=False)
    rest = run(folder, resume=True)
    assert len(once) == 16
    assert rest == once[STOP:]
    return [number for numbers, _ in once[:8] for number in numbers]


def test_an_epoch_goes_on_where_it_was_saved(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    seen = spawn(stop_and_go_on, 2, str(tmp_path / "half"), timeout_s=TIMEOUT_S)
    assert sorted(seen[0] + seen[1]) == list(range(64))
