"""A root that goes backward on a loss of its own inside its forward, and returns another one."""

from __future__ import annotations

import copy
import typing

import torch
from one_backward import MODES, TOLERANCE, compare_later_training
from torch import Tensor, nn

from models import CASES, MLP
from parity import Ranks, Run, on_meshes
from recording import recording_mesh
from reference import LOSS_TOLERANCE, Differences, assert_each_within
from shardkit import fully_shard


class OwnLoss(MLP):
    """Trains layer 1 inside its forward; the loss of what it returns trains the others."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers[0](x))
        own = self.layers[1](h.detach())
        if torch.is_grad_enabled():
            own.square().mean().backward()
        h = torch.tanh(own.detach()) + h.mean(1, keepdim=True)
        for layer in self.layers[2:]:
            h = layer(h)
        return h


def train_with_own_loss(ranks: Ranks, reshard_after_forward: bool | None) -> Differences:
    torch.manual_seed(0)
    plain = OwnLoss()
    case = CASES["mlp"]
    model = ranks.shard(case, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    differences = Differences()
    case.loss(model, ranks.batch(case, 0)).backward()
    for batch in ranks.rank_batches(case, 0):
        case.loss(plain, batch).backward()
    for param in plain.parameters():
        assert param.grad is not None
        param.grad /= ranks.world_size
    differences.note_grads(model, plain)
    for each in (model, plain):
        each.zero_grad()
    later = compare_later_training(ranks, model, plain)
    differences.update(later)
    return differences


@on_meshes((2,), (2, 2), xla=())
def test_training_is_as_unsharded_in_every_mode(run: Run) -> None:
    found = run.each(MODES, train_with_own_loss)
    assert_each_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def test_the_rest_of_the_pass_still_awaits_its_backward() -> None:
    mesh, _ = recording_mesh((2,))
    model: typing.Any = OwnLoss()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    output = model(torch.ones(2, model.layers[0].in_features))
    runtime = nn.Module.__getattribute__(model, "__dict__")["_shardkit_state"].runtime
    numbers = {group.name: group.index for group in runtime.groups}
    awaited = {name for name, number in numbers.items() if runtime.schedule.awaits_backward(number)}
    assert awaited == {name for name in numbers if name != "layers.1"}
    output.sum().backward()
    assert not any(map(runtime.schedule.awaits_backward, numbers.values()))
