"""What passes between host and devices: nothing comes back that is not asked for, graphs repeat."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import nn
from xla_graphs import num_compiles
from xla_ranks import XlaRanks, on_xla

from parity import Pair
from shardkit import DeviceMesh, fully_shard


def num_reads() -> int:
    """Return how often this process has taken something from the devices."""
    data = met.metric_data("TransferFromDeviceTime")
    return 0 if data is None else data[0]


def test_an_evaluation_without_sync_compiles_once(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "gpt")
    pair.step()
    with torch.no_grad():
        for i in range(5):
            if i == 2:
                before = num_compiles()
            plain, sharded = pair.losses(pair.draw())
            assert sharded.item() == pytest.approx(plain.item(), abs=2e-6)
    assert num_compiles() == before


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_step_takes_nothing_from_the_devices(device: str, mesh: DeviceMesh) -> None:
    plain = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model = on_xla(plain)
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        if i == 1:
            torch_xla.sync(wait=True)
            before = num_reads()
        model(torch.randn(8, 7).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    assert num_reads() == before


def test_a_batch_may_be_sharded_already(mesh: DeviceMesh) -> None:
    import torch_xla.distributed.spmd as xs

    pair = Pair(XlaRanks(mesh), "mlp")
    x, _ = pair.draw()
    devices = xs.Mesh(list(range(4)), (4,), ("any",))
    batch = x.to("xla")
    xs.mark_sharding(batch, devices, (None, None))
    torch.testing.assert_close(pair.sharded(batch).cpu(), pair.plain(x), rtol=0, atol=1e-6)


def test_forwards_of_one_graph_draw_different_numbers(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("xla"), mesh)
    xm.set_rng_state(3)
    x = torch.ones(8, 4)
    first, second = model(x) == 0, model(x) == 0
    assert not torch.equal(first.cpu(), second.cpu())
