"""Adapters of peft added before and after `fully_shard`, under `install`, beside FSDP2."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from accelerate_runs import make
from launched import TIMEOUT_S
from zoo import ZOO

import shardkit

if typing.TYPE_CHECKING:
    from torch import Tensor

    from workers import Spawn

pytestmark = pytest.mark.frameworks

TOLERANCE = 3e-6  # Losses lie between 4 and 5.


DEFAULT = ("the mesh that fully_shard makes",)


def tune(
    names: tuple[str, ...] | None, *, before: bool, is_safe: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Add adapters and shard, as scripts for FSDP2 do; train; return losses and whole tensors."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = None
    if names != DEFAULT:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=names)
    model = make("llama")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    if before:
        model = get_peft_model(model, config)
    inner = model.get_base_model() if before else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not before:
        torch.manual_seed(3)
        model = get_peft_model(model, config)
        for name, module in model.named_modules():
            if name.endswith((".lora_A.default", ".lora_B.default")):
                fully_shard(module, mesh=mesh)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(trained) == 2 * 2 * len(inner.model.layers)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(1_000 * step + dist.get_rank())
        tokens, labels = ZOO["llama"].batch(generator)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        losses.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    adapters = get_peft_model_state_dict(model)
    merged = model.merge_and_unload(safe_merge=is_safe)
    whole = {**adapters, **dict(merged.named_parameters())}
    return losses, {
        name: getattr(value, "full_tensor", lambda v=value: v)().detach().clone()
        for name, value in whole.items()
    }


def beside_fsdp2(names: tuple[str, ...] | None, before: bool) -> None:
    wanted, expected = tune(names, before=before)
    with shardkit.install():
        found, whole = tune(names, before=before, is_safe=(names is None) == before)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-5, msg=name)
    if names is None and before:  # FSDP2 merges nothing then, without a word.
        _, unmerged = tune(names, before=before, is_safe=True)
        plain = make("llama").state_dict()
        targets = [name for name in expected if name.endswith(("q_proj.weight", "v_proj.weight"))]
        assert targets
        for name in targets:
            assert torch.equal(unmerged[name], plain[name]), name
            assert not torch.equal(expected[name], plain[name]), name


@pytest.mark.parametrize("names", [None, ("fsdp",), DEFAULT], ids=["none", "fsdp", "default"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_adapters_train_and_merge_as_with_fsdp2(
    spawn: Spawn, names: tuple[str, ...] | None, before: bool
) -> None:
    spawn(beside_fsdp2, 2, names, before, timeout_s=TIMEOUT_S)
