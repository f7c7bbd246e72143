"""A script for FSDP2 trains with shardkit after `install`, and with torch before and after it."""

from __future__ import annotations

import copy
import typing

import torch
import torch.distributed as dist
from torch import nn

import shardkit

if typing.TYPE_CHECKING:
    from workers import Spawn

SCRIPT = """
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
assert isinstance(model, FSDPModule)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    model.set_requires_gradient_sync(step % 2 == 1)
    (model(batches[step][mesh.get_rank()]).square().mean() / 2).backward()
    if step % 2 == 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
sharded = model.state_dict()
by_name = {k: p.full_tensor() if hasattr(p, "_local_tensor") else p for k, p in sharded.items()}
by_class = {k: p.full_tensor() if isinstance(p, DTensor) else p for k, p in sharded.items()}
whole = StateDictOptions(full_state_dict=True)
of_optimizer = get_optimizer_state_dict(model, optimizer, options=whole)
with torch.no_grad():
    for param in (*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())):
        param.zero_()
sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, dict(state), options=sent)
set_optimizer_state_dict(model, optimizer, of_optimizer, options=sent)
set_back = get_model_state_dict(model, options=whole)
averages = {k: s["exp_avg"] for k, s in get_optimizer_state_dict(
    model, optimizer, options=whole)["state"].items()}
kind = fully_shard.__module__.split(".")[0]
"""


def run_script(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, typing.Any]:
    """Run the script as it is."""
    names: dict[str, typing.Any] = {"model": model, "batches": batches}
    exec(SCRIPT, names)
    return names


def compare_scripts() -> tuple[list[str], list[bool]]:
    """Run it with torch, with shardkit, and with torch again; gathers and sets whole states."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    batches = [torch.randn(2, 4, 5) for _ in range(6)]
    found = [run_script(copy.deepcopy(plain), batches)]
    with shardkit.install():
        found.append(run_script(copy.deepcopy(plain), batches))
    found.append(run_script(copy.deepcopy(plain), batches))
    dist.barrier()
    ways = ("state", "by_name", "by_class", "set_back", "averages")
    wholes = {(way, i): each[way] for i, each in enumerate(found) for way in ways}
    for whole in wholes.values():
        assert all(type(value) is torch.Tensor for value in whole.values())
    wanted = {"averages": wholes["averages", 0]}
    same = [
        all(
            torch.allclose(whole[name], wanted.get(way, wholes["state", 0])[name], atol=1e-6)
            for name in plain.state_dict()
        )
        for (way, _), whole in wholes.items()
        if whole  # Torch's are on rank 0 only where they are offloaded.
    ]
    return [each["kind"] for each in found], same


def test_a_script_for_fsdp2_runs_as_it_is(spawn: Spawn) -> None:
    for kinds, same in spawn(compare_scripts, 2):
        assert kinds == ["torch", "shardkit", "torch"]
        assert same == [True] * 15
