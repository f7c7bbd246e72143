"""A script in the manner of torchtitan trains with shardkit after `install`, without a change.

Meta device, activation checkpointing, groups by module with a policy, prefetch lists, gradients
that are summed instead of averaged, clipping, and states that a distributed checkpoint asks for.
"""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist

import shardkit

if typing.TYPE_CHECKING:
    import pathlib

    from torch import Tensor

    from workers import Spawn

pytestmark = pytest.mark.helpers

SCRIPT = """
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.w1 = nn.Linear(dim, 3 * dim, bias=False)
        self.w2 = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.w2(torch.nn.functional.silu(self.w1(self.norm(x))))

    def init_weights(self):
        self.norm.reset_parameters()
        for linear in (self.w1, self.w2):
            nn.init.trunc_normal_(linear.weight, std=0.2)


class Decoder(nn.Module):
    def __init__(self, vocabulary=37, dim=10, num_layers=3):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(num_layers)})
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("scale", torch.ones(dim), persistent=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) * self.scale
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))

    def init_weights(self):
        with torch.no_grad():
            self.scale.fill_(2.0)
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=0.3)


def parallelize(model, mesh, reshard_policy, *, checkpoints, compiles):
    if checkpoints:
        for name, block in model.layers.named_children():
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
            model.layers.register_module(name, wrapped)
    if compiles:
        for name, block in model.layers.named_children():
            block = torch.compile(block, backend="eager", fullgraph=True)
            model.layers.register_module(name, block)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    config = {"mesh": mesh, "mp_policy": policy}
    always = {"always": True, "never": False, "default": True}[reshard_policy]
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=always)
    for block in model.layers.values():
        fully_shard(block, **config, reshard_after_forward=always)
    fully_shard(
        [model.norm, model.output], **config, reshard_after_forward=reshard_policy == "always"
    )
    fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    blocks = list(model.layers.values())
    model.tok_embeddings.set_modules_to_forward_prefetch([blocks[0]])
    for block, following in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    blocks[-1].set_modules_to_forward_prefetch([model.norm, model.output])
    model.output.set_modules_to_backward_prefetch([blocks[-1]])
    for block, before in zip(reversed(blocks), reversed(blocks[:-1])):
        block.set_modules_to_backward_prefetch([before])
    blocks[0].set_modules_to_backward_prefetch([model.tok_embeddings])


class ModelState(Stateful):
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state):
        set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))


class OptimizerState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


class TrainState(Stateful):
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


@torch.no_grad()
def clip(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def start(seed):
    names = ("dp_replicate", "dp_shard")[-len(mesh_shape):]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    with torch.device("meta"):
        model = Decoder()
    parallelize(model, mesh, reshard_policy, checkpoints=checkpoints, compiles=compiles)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train_state = TrainState()
    states = {
        "model": ModelState(model),
        "optimizer": OptimizerState(model, optimizer),
        "lr_scheduler": schedule,
        "train_state": train_state,
    }
    return model, optimizer, schedule, train_state, states


def train(model, optimizer, schedule, train_state, states, steps):
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        micro_batches = batches[train_state.step]
        num_tokens = sum(labels.numel() for _, labels in micro_batches) * world_size
        total = 0.0
        for number, (tokens, labels) in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            logits = model(tokens).flatten(0, 1)
            summed = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            loss = summed / num_tokens
            loss.backward()
            total += loss.detach()
        norm = clip(list(model.parameters()), 0.5)
        optimizer.step()
        schedule.step()
        train_state.step += 1
        found.append((float(total), float(norm)))
    return found


first = start(seed=0)
losses = train(*first, steps=3)
dcp.save(first[-1], checkpoint_id=folder)
went_on = train(*first, steps=2)
second = start(seed=1)
dcp.load(second[-1], checkpoint_id=folder)
resumed = train(*second, steps=2)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
whole = get_model_state_dict(first[0], options=options)
kind = type(first[0].tok_embeddings.weight).__name__
"""

STEPS, MICRO, BATCH, LENGTH, VOCABULARY = 5, 2, 2, 6, 37


def draw(rank: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Draw the micro-batches of a rank, by step."""
    generator = torch.Generator().manual_seed(rank)
    shape = (STEPS, MICRO, 2, BATCH, LENGTH)
    numbers = torch.randint(VOCABULARY, shape, generator=generator)
    return [[(tokens, labels) for tokens, labels in step] for step in numbers]


def run_script(
    folder: str, mesh_shape: tuple[int, ...], **options: object
) -> dict[str, typing.Any]:
    names: dict[str, typing.Any] = {
        "batches": draw(dist.get_rank()),
        "folder": folder,
        "mesh_shape": mesh_shape,
        "world_size": dist.get_world_size(),
        "reshard_policy": "default",
        "checkpoints": False,
        "compiles": False,
        **options,
    }
    exec(SCRIPT, names)
    return names


def train_plain(names: dict[str, typing.Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train the script's model alone on the batches of all ranks."""
    model = names["Decoder"]()
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    by_rank = [draw(rank) for rank in range(dist.get_world_size())]
    losses = []
    for step in range(STEPS):
        pairs = [pair for batches in by_rank for pair in batches[step]]
        tokens, labels = (torch.cat(each) for each in zip(*pairs, strict=True))
        logits = model(tokens).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses, copy.deepcopy(model.state_dict())


def compare(folder: str, mesh_shape: tuple[int, ...], options: dict[str, object]) -> None:
    with shardkit.install():
        names = run_script(folder, mesh_shape, **options)
    assert names["kind"] == "ShardedTensor"
    assert names["resumed"] == names["went_on"]
    found = [loss for loss, _ in names["losses"] + names["went_on"]]
    total = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(total)  # Each rank's loss is its part of the sum over all tokens.
    losses, expected = train_plain(names)
    torch.testing.assert_close(total.tolist(), losses, rtol=0, atol=3e-6)  # Of losses around 4.
    assert len(names["whole"]) == (len(expected) if dist.get_rank() == 0 else 0)
    for name, value in names["whole"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-5, msg=name)


CASES = {
    "2 ranks": ((2,), {}),
    "3 ranks, recomputed": ((3,), {"checkpoints": True, "reshard_policy": "always"}),
    "replicas, kept": ((2, 2), {"reshard_policy": "never"}),
    "compiled": ((2,), {"compiles": True}),
    "compiled, recomputed": ((2,), {"compiles": True, "checkpoints": True}),
}


@pytest.mark.parametrize(("mesh_shape", "options"), CASES.values(), ids=CASES)
def test_a_script_in_the_manner_of_torchtitan(
    spawn: Spawn, tmp_path: pathlib.Path, mesh_shape: tuple[int, ...], options: dict[str, object]
) -> None:
    ranks = torch.Size(mesh_shape).numel()
    spawn(compare, ranks, str(tmp_path / "saved"), mesh_shape, options, timeout_s=180)
