"""Meshes that cannot be made say why; each in a process of its own, before SPMD mode is on."""

from __future__ import annotations

import typing

from processes import run_python

if typing.TYPE_CHECKING:
    import subprocess

USED = "import torch, torch_xla; torch.ones(1, device='xla').cpu()"
TWO_HOSTS = "import torch_xla.runtime as xr; xr.process_count = lambda: 2"
MAKE = "from shardkit import init_device_mesh; init_device_mesh('xla', (4,))"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", code], most_seconds=100)


def test_a_device_that_was_used_before_forbids_it() -> None:
    done = run(f"{USED}\n{MAKE}")
    assert done.returncode == 1
    assert "MeshError" in done.stderr
    assert "before any tensor or module is moved" in done.stderr


def test_several_hosts_are_refused() -> None:
    done = run(f"{TWO_HOSTS}\n{MAKE}")
    assert done.returncode == 1
    assert "MeshError: XLA devices of 2 hosts: shardkit supports those of one host" in done.stderr


def test_without_a_mesh_all_devices_are_one() -> None:
    code = (
        "import torch_xla.runtime as xr; xr.use_spmd()\n"
        "from torch import nn; from shardkit import fully_shard\n"
        "model = fully_shard(nn.Linear(5, 3).to('xla'))\n"
        "assert model.weight.device_mesh.shape == (4,), model.weight.device_mesh\n"
        "model(__import__('torch').ones(4, 5)).sum().backward()\n"
        "assert model.bias.grad.full_tensor().tolist() == [4.0] * 3\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_a_mesh_a_root_needs_no_parameters_of_its_own() -> None:
    code = (
        "import torch_xla.runtime as xr; xr.use_spmd()\n"
        "from torch import nn; from shardkit import fully_shard\n"
        "model = nn.Sequential(nn.Linear(5, 3)).to('xla')\n"
        "fully_shard(model[0])\n"
        "fully_shard(model)\n"
        "model(__import__('torch').ones(4, 5)).sum().backward()\n"
        "assert model[0].bias.grad.full_tensor().tolist() == [4.0] * 3\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]
