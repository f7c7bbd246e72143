"""Mixtures of experts of transformers, whose tokens travel, train as in one process."""

from __future__ import annotations

import copy
import dataclasses
import typing

import pytest
import torch
import torch.distributed as dist
from routed_experts import batches, loss_of, make, routes, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zoo import TIMEOUT_S

from reference import step_all
from shardkit.checkpoint import load, save, save_full
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    import pathlib


pytestmark = pytest.mark.models

# The sums over tokens and ranks are taken in another order, in fp64. Parts that transformers
# computes in fp32 (routers, norms) compute each token by itself.
EXACT = 1e-12

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model and how ranks are used."""

    name: str  # The model.
    # Replicas, ranks that hold the same experts, ranks that hold different ones.
    shape: tuple[int, int, int]
    tp: int = 1  # Ranks that split attention.
    keeps_routers: bool = False  # Whether routers are no shardkit parameters, but plain ones.
    recomputes: bool = False  # Whether layers run again in backward, and send their tokens again.


def make_both(layout: Layout) -> tuple[typing.Any, typing.Any]:
    plain = make(layout.name)
    model: typing.Any = copy.deepcopy(plain)
    replicas, fsdp, ep = layout.shape
    whole = init_device_mesh(
        "cpu", (replicas, fsdp, ep, layout.tp), mesh_dim_names=("replicate", "fsdp", "ep", "tp")
    )
    if layout.tp > 1:
        split_attention(model, whole["tp"])
    ignored = {p for n, p in model.named_parameters() if "gate.weight" in n}
    names = ("fsdp", "ep") if replicas == 1 else ("replicate", "fsdp", "ep")
    options = {"ignored_params": ignored} if layout.keeps_routers else {}
    shard(layout.name, model, whole[names], **options)
    if layout.recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return plain, model


def split_attention(model: nn.Module, tp: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"o_proj": RowwiseParallel()}
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in styles.items()}
    parallelize_module(model, tp, plan)


def average_plain(model: nn.Module) -> None:
    """Average the gradients of parameters that shardkit does not have, as their owner must."""
    for param in model.parameters():
        if type(param) is nn.Parameter and param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def full(tensor: typing.Any) -> torch.Tensor:
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()


def largest_difference(plain: nn.Module, model: nn.Module, *, grads: bool) -> float:
    worst = 0.0
    for (name, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        wanted, found = (whole.grad, param.grad) if grads else (whole, param)
        assert wanted is not None, name
        assert found is not None, name
        worst = max(worst, (full(found) - wanted).abs().max().item())
    return worst


def compare_training(layout: Layout) -> None:
    plain, model = make_both(layout)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (plain, model)]
    for number in range(STEPS):
        own, whole = batches(number, layout.tp)
        losses = [loss_of(plain, whole), loss_of(model, own)]
        for loss in losses:
            loss.backward()
        average_plain(model)
        mean = losses[1].detach().clone()
        dist.all_reduce(mean)
        assert abs(mean / dist.get_world_size() - losses[0].detach()) < EXACT
        assert largest_difference(plain, model, grads=True) < EXACT
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (plain, model)]
        assert norms[0] > 0.5
        assert abs(full(norms[1]).item() - norms[0].item()) < EXACT
        step_all(optimizers)
    assert largest_difference(plain, model, grads=False) < 1e3 * EXACT
    of_ranks: list[typing.Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, routes)
    sent = [[route[0] for route in of_rank] for of_rank in of_ranks]
    assert all(sent[0] != other for other in sent[layout.tp :: layout.tp])  # Ranks differ.
    assert any(0 in counts for of_rank in sent for counts in of_rank)  # Nothing for an expert.


LAYOUTS = [
    Layout("qwen3_moe", (1, 2, 2)),
    Layout("deepseek_v3", (1, 2, 2)),
    Layout("mixtral", (2, 1, 2), recomputes=True),
    Layout("mixtral", (1, 1, 4), keeps_routers=True),
    Layout("mixtral", (1, 1, 2), tp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_equals_one_process(spawn: Spawn, layout: Layout) -> None:
    spawn(compare_training, 4, layout, timeout_s=TIMEOUT_S)


@pytest.mark.eight_ranks
def test_tensor_parallel_attention_beside_experts(spawn: Spawn) -> None:
    spawn(compare_training, 8, Layout("mixtral", (1, 2, 2), tp=2), timeout_s=TIMEOUT_S)


# --- checkpoints ----------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


ELASTIC = {
    4: [
        Layout("mixtral", (1, 1, 4)),
        Layout("mixtral", (2, 1, 2)),
        Layout("mixtral", (1, 4, 1)),
    ],
    8: [
        Layout("mixtral", (1, 1, 8)),
        Layout("mixtral", (1, 4, 2)),
        Layout("mixtral", (2, 4, 1)),
        Layout("mixtral", (1, 2, 2), tp=2),
    ],
}


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.eight_ranks)])
@on_ranks("ranks", timeout_s=TIMEOUT_S)
def test_checkpoints_know_the_stack_whatever_ep_is(ranks: int, tmp_path: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM

    plain, model = make_both(ELASTIC[ranks][0])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (plain, model)]
    own, whole = batches(0)
    step(plain, optimizers[0], whole)
    step(model, optimizers[1], own)
    before = tmp_path / "first"
    save(before, model, optimizers[1])
    for layout in ELASTIC[ranks][1:]:
        _, model = make_both(layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load(before, model, optimizer)
        assert largest_difference(plain, model, grads=False) < EXACT
        own, whole = batches(1)
        step(plain, optimizers[0], whole)
        # Ranks of tensor parallelism need equal tokens: all of them.
        step(model, optimizer, whole if layout.tp > 1 else own)
        assert largest_difference(plain, model, grads=False) < 1e2 * EXACT
        before = tmp_path / str(layout)
        save(before, model, optimizer)
    alone = make("mixtral")
    of_one = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    load(before, alone, of_one)
    assert largest_difference(plain, alone, grads=False) < 1e2 * EXACT
    save_full(tmp_path / "whole", model, format="safetensors")
    if dist.get_rank() == 0:
        plain.config.save_pretrained(tmp_path / "whole")
        loaded, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "whole", output_loading_info=True, dtype=torch.float64
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        for (name, wanted), found in zip(
            alone.named_parameters(), loaded.parameters(), strict=True
        ):
            assert torch.equal(found, wanted), name
    dist.barrier()
