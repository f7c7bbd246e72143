"""How much memory files of whole tensors take on their way into sharded models and back."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import typing

import pytest
import safetensors.torch
import torch
from torch import nn

from reference import make_mesh
from shardkit import fully_shard
from shardkit.checkpoint import load_full, save_full

if typing.TYPE_CHECKING:
    from workers import Spawn

# --- memory ---------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 50  # 200 MiB; the head is the largest tensor, 20 MiB.
MIB = 2**20
SLACK_MIB = 6  # The allocator's and Python's own.


def big_model() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS - 5)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5 * WIDTH, bias=False))


def peak_mib(*, reset: bool = False) -> float:
    """Return this process's largest resident size since the last reset (the kernel's VmHWM)."""
    if reset:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # Else the allocator keeps what others have freed.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure_loading(path: str, device: str) -> tuple[float, float]:
    """Return MiB of this rank's shard, and by how much loading raised the peak above that."""
    with torch.device("meta"):
        model = big_model()
        for layer in model:
            fully_shard(layer, make_mesh((2,)))
        fully_shard(model, make_mesh((2,)))
    if device == "cpu":
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.to_local().zero_()
    shard_mib = sum(p.to_local().numel() for p in model.parameters()) * 4 / MIB
    before = peak_mib(reset=True)
    load_full(path, model)
    grown = peak_mib() - before - (shard_mib if device == "meta" else 0)
    for i, param in enumerate(model.parameters()):
        assert param.to_local().eq(i + 1).all()
    return shard_mib, grown


def measure_saving(folder: str) -> float:
    """Return by how many MiB saving raised the peak; the first save reads pages of torch's code."""
    model = big_model()
    for layer in model:
        fully_shard(layer, make_mesh((2,)))
    model = fully_shard(model, make_mesh((2,)))
    _save(folder, model[0])
    before = peak_mib(reset=True)
    _save(folder, model)
    return peak_mib() - before


def _save(folder: str, model: nn.Module) -> None:
    save_full(pathlib.Path(folder) / "saved.pt", model)
    save_full(pathlib.Path(folder) / "saved.safetensors", model, format="safetensors")


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("kind", ["model.pt", "model.safetensors"])
def test_loading_takes_a_tensor_above_the_shard(
    spawn: Spawn, tmp_path: pathlib.Path, kind: str, device: str
) -> None:
    state = {
        f"{i}.weight": torch.full_like(p, i + 1) for i, p in enumerate(big_model().parameters())
    }
    nbytes = [value.nbytes for value in state.values()]
    assert sum(nbytes) == 200 * MIB
    save = torch.save if kind == "model.pt" else safetensors.torch.save_file
    save(state, tmp_path / kind)
    for shard_mib, grown_mib in spawn(measure_loading, 2, str(tmp_path / kind), device):
        assert shard_mib == 100
        assert grown_mib <= max(nbytes) / MIB + SLACK_MIB


def test_saving_takes_less_than_a_tensor(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    for grown_mib in spawn(measure_saving, 2, str(tmp_path)):
        assert grown_mib <= 16 + SLACK_MIB
