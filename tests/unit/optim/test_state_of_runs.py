"""The state of `LocalOptimizer` where parameters of one run, or of other buckets, share tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import Parameters
from recording import recording_mesh
from shardkit import OptimizerError, fully_shard
from shardkit.optim import LocalOptimizer
from shardkit.optim._local import RunPart, SteppedRun


def set_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None


def test_masters_of_classes_without_state_are_kept() -> None:
    mesh, _ = recording_mesh((1,))
    model = fully_shard(Parameters({"weight": (4,)}, torch.bfloat16), mesh)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = LocalOptimizer([model.weight], torch.optim.SGD, lr=1e-4, master_dtype=torch.float32)
    for number in range(1, 4):
        set_gradients(model)
        optimizer.step()
        master = optimizer.state_dict()["state"][0]["master"].to_local()
        assert torch.allclose(master, torch.full((4,), 1 - number * 1e-4), rtol=0, atol=1e-7)
        optimizer.load_state_dict(optimizer.state_dict())  # The runs are made anew.


def test_masters_are_made_at_the_first_gradient() -> None:
    mesh, _ = recording_mesh((1,))
    model = Parameters({"weight": (4,), "frozen": (8,)}, torch.bfloat16)
    model.frozen.requires_grad_(False)
    fully_shard(model, mesh)
    optimizer = LocalOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-4, master_dtype=torch.float32
    )
    for expected in ([model.weight], [model.weight, model.frozen]):
        set_gradients(model)
        optimizer.step()
        stepped = [
            param for param in model.parameters() if "master" in optimizer.state.get(param, {})
        ]
        assert list(map(id, stepped)) == list(map(id, expected))
        model.frozen.requires_grad_()
    steps = [float(optimizer.state[param]["step"]) for param in model.parameters()]
    assert steps == [2, 1]


def test_state_of_a_model_with_other_buckets_is_refused() -> None:
    mesh, _ = recording_mesh((1,))
    one, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    for layer in other:
        fully_shard(layer, mesh)
    optimizers = [
        LocalOptimizer(fully_shard(model, mesh).parameters(), torch.optim.Adagrad)
        for model in (one, other)
    ]
    optimizers[0].step(lambda: None)  # Makes state; there are no gradients.
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    with pytest.raises(OptimizerError, match="sharded otherwise than the parameter"):
        optimizers[1].step(lambda: None)


def test_numbers_are_written_for_one_parameter() -> None:
    mesh, _ = recording_mesh((1,))
    model = fully_shard(Parameters({"weight": (4,), "bias": (4,)}), mesh)
    optimizer = LocalOptimizer(model.parameters(), torch.optim.Adagrad)
    optimizer.step(lambda: None)
    optimizer.state[model.weight]["step"].fill_(5)
    optimizer.step(lambda: None)
    steps = [float(optimizer.state[param]["step"]) for param in (model.weight, model.bias)]
    assert steps == [5, 0]


def test_state_outlives_a_step_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    param, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = LocalOptimizer([param], torch.optim.AdamW)
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": [other]})
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_put_state", raise_of_memory)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 2


def raise_of_memory(state: object) -> None:
    del state
    raise MemoryError


def test_integers_are_left_alone() -> None:
    mesh, _ = recording_mesh((1,))
    model = Parameters({"weight": (4,)})
    model.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    fully_shard(model, mesh)
    optimizer = LocalOptimizer(model.parameters(), torch.optim.SGD)
    set_gradients(model)
    optimizer.step()
    assert (model.codes.to_local() == 1).all()


def test_state_of_plain_parameters_goes_to_their_device() -> None:
    param = nn.Parameter(torch.empty(3, device="meta"))
    run = SteppedRun([RunPart(param, 0, 3, 0)], 0, 3, is_plain=True)
    assert run.join([torch.ones(3)], None).is_meta
