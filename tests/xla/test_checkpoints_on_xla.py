"""Checkpoints of models on XLA: read back there and on the CPU, bit for bit, and from there."""

from __future__ import annotations

import os
import subprocess
import sys
import typing

import pytest
import torch
import torch_xla
from xla_graphs import adamw, sharding_of
from xla_ranks import XlaRanks

from checkpoints import assert_same
from parity import Pair
from shardkit import DeviceMesh, checkpoint

if typing.TYPE_CHECKING:
    import pathlib


def trained(mesh: DeviceMesh, *, steps: int, seed: int = 0) -> Pair:
    pair = Pair(XlaRanks(mesh), "tiny", adamw)
    pair.generator.manual_seed(seed)
    for _ in range(steps):
        pair.step()
    return pair


def whole(pair: Pair) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer state of the sharded model, as plain tensors."""
    result = {}
    optimizer = pair.optimizers[1]
    for name, param in pair.sharded.named_parameters():
        result[name] = param.full_tensor().detach().cpu()
        for key, value in optimizer.state[param].items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            result[f"{name}.{key}"] = full.detach().cpu()
    return result


def test_a_checkpoint_goes_on_where_it_was_saved(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    pair = trained(mesh, steps=2)
    checkpoint.save(tmp_path / "saved", model=pair.sharded, optimizer=pair.optimizers[1])
    expected = whole(pair)
    other = trained(mesh, steps=1, seed=9)
    checkpoint.load(tmp_path / "saved", model=other.sharded, optimizer=other.optimizers[1])
    assert_same(whole(other), expected)
    torch_xla.sync()
    for param in other.sharded.parameters():
        assert sharding_of(param.local_piece) == "{devices=[4]0,1,2,3}"
    batch = pair.draw()
    losses = []
    for each in (pair, other):
        loss = each.case.loss(each.sharded, tuple(part.to("xla") for part in batch))
        losses.append(loss.item())
    assert losses[0] == losses[1]


ON_CPU = """
import sys, torch, torch.distributed as dist
sys.path[:0] = {path!r}
import models
from shardkit import checkpoint, fully_shard, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(3)
case = models.CASES["tiny"]
model = case.make()
mesh = init_device_mesh("cpu", (1,))
for module in case.groups(model):
    fully_shard(module, mesh)
fully_shard(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
if {load!r}:
    checkpoint.load({load!r}, model=model, optimizer=optimizer)
else:
    case.loss(model, case.batch(torch.Generator().manual_seed(1))).backward()
    optimizer.step()
    checkpoint.save({save!r}, model=model, optimizer=optimizer)
found = dict()
for name, param in model.named_parameters():
    found[name] = param.full_tensor().detach()
    for key, value in optimizer.state[param].items():
        found[f"{{name}}.{{key}}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
torch.save(found, {out!r})
"""


def on_cpu(out: pathlib.Path, *, load: str = "", save: str = "") -> dict[str, torch.Tensor]:
    """Load or save in a process of one gloo rank; return what it holds."""
    code = ON_CPU.format(path=sys.path, load=load, save=save, out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={key: value for key, value in os.environ.items() if not key.startswith("XLA")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, torch.Tensor] = torch.load(out)
    return result


def test_a_checkpoint_from_xla_is_read_on_the_cpu(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    pair = trained(mesh, steps=2)
    checkpoint.save(tmp_path / "saved", model=pair.sharded, optimizer=pair.optimizers[1])
    assert_same(on_cpu(tmp_path / "out", load=str(tmp_path / "saved")), whole(pair))


def test_a_checkpoint_from_the_cpu_is_read_on_xla(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    expected = on_cpu(tmp_path / "out", save=str(tmp_path / "saved"))
    pair = trained(mesh, steps=1)
    checkpoint.load(tmp_path / "saved", model=pair.sharded, optimizer=pair.optimizers[1])
    assert_same(whole(pair), expected)


@pytest.mark.parametrize(("kind", "shape"), [("torch", "mesh"), ("safetensors", "mesh_2d")])
def test_whole_models_are_written_and_read(
    kind: typing.Any, shape: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    mesh = request.getfixturevalue(shape)
    pair = trained(mesh, steps=1)
    checkpoint.save_full(tmp_path / "whole", pair.sharded, format=kind)
    fresh = Pair(XlaRanks(mesh), "tiny")
    checkpoint.load_full(tmp_path / "whole", fresh.sharded)
    for name, param in fresh.sharded.named_parameters():
        expected = pair.sharded.get_parameter(name).full_tensor()
        assert torch.equal(param.full_tensor().detach().cpu(), expected.detach().cpu())
