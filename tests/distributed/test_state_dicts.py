"""State dicts by parameter names: full ones, from rank 0, templates for what was saved."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoints import (
    CHECKPOINT_CASES,
    assert_same,
    make_sharded,
    train_on_shares,
    whole,
    whole_state,
)
from reference import full, make_mesh
from shardkit import CheckpointError, ShardedTensor, fully_shard
from shardkit.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardkit.checkpoint._files.disk import TensorInfo
from shardkit.checkpoint._state.model_and_optimizer import optimizer_template, put_optimizer_state
from workers import Spawn, in_each, on_ranks


def trained(name: str, mesh_shape: tuple[int, ...], seed: int = 0) -> typing.Any:
    case = CHECKPOINT_CASES[name]
    model, optimizer = make_sharded(case, mesh_shape, seed=seed)
    train_on_shares(case, model, optimizer, range(2))
    return case, model, optimizer


def is_plain(state: dict[str, typing.Any]) -> bool:
    return all(not isinstance(leaf, ShardedTensor) for leaf in state.values())


def bring_full_state(name: str, mesh_shape: tuple[int, ...], how: str) -> None:
    """A full state dict of one model goes into another of other values."""
    case, model, optimizer = trained(name, mesh_shape)
    cpu_offload = how == "rank 0 sends"
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    expected = whole_state(model, optimizer)
    losses = train_on_shares(case, model, optimizer, range(2, 4))
    if cpu_offload and dist.get_rank() > 0:
        assert (model_state, optim_state) == ({}, {})
    else:
        assert_same(model_state, expected["model"])
    options.broadcast_from_rank0 = cpu_offload
    other, other_optimizer = make_sharded(case, mesh_shape, seed=7)
    if how == "a flat one":
        optim_state = get_optimizer_state_dict(
            model,
            optimizer,
            options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
        )
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optim_state,
        options=options,
    )
    if how != "a flat one":  # That was taken later.
        assert_same(whole_state(other, other_optimizer), expected)
        assert train_on_shares(case, other, other_optimizer, range(2, 4)) == losses
    else:
        state = whole(other_optimizer.state_dict())
        assert_same(state, whole(optimizer.state_dict()))


@pytest.mark.parametrize(
    ("name", "mesh_shape"), [("gpt", (2,)), ("tiny", (2, 2)), ("frozen", (2,)), ("unused", (3,))]
)
@on_ranks("mesh_shape", timeout_s=120)
def test_full_state_round(name: str, mesh_shape: tuple[int, ...]) -> None:
    ways = {how: how for how in ("every rank has it", "rank 0 sends", "a flat one")}
    in_each(ways, bring_full_state, name, mesh_shape)


def infos_of(state: dict[str, typing.Any]) -> dict[str, typing.Any]:
    return {
        name: {
            key: TensorInfo(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            for key, value in entries.items()
        }
        for name, entries in state.items()
    }


@pytest.mark.parametrize("name", ["gpt", "tiny", "unused"])
@on_ranks(2)
def test_a_template_is_filled_without_a_step(name: str) -> None:
    case, model, optimizer = trained(name, (2,))
    saved = get_optimizer_state_dict(model, optimizer)
    other, other_optimizer = make_sharded(case, (2,), seed=7)
    set_model_state_dict(other, get_model_state_dict(model))
    template = optimizer_template(other, other_optimizer, infos_of(saved["state"]))
    assert not other_optimizer.state
    assert template["state"].keys() == saved["state"].keys()
    for param, entries in template["state"].items():
        for key, room in entries.items():
            value = saved["state"][param][key]
            assert type(room) is type(value), (param, key)
            assert (room.shape, room.dtype) == (value.shape, value.dtype)
            room.copy_(value)
    put_optimizer_state(other, other_optimizer, {**template, "param_groups": saved["param_groups"]})
    assert_same(whole_state(other, other_optimizer), whole_state(model, optimizer))
    for param in other.parameters():
        state = other_optimizer.state.get(param, {})
        for key in ("exp_avg", "exp_avg_sq"):
            if state and len(param.spec.layout.shapes) > 1 and param.to_local().numel():
                assert state[key].flat is not None, "list operators would run piece by piece"
    losses = train_on_shares(case, model, optimizer, range(2, 4))
    assert train_on_shares(case, other, other_optimizer, range(2, 4)) == losses


@on_ranks(2)
def test_rank_0_fills_a_model_on_meta() -> None:
    case, model, _ = trained("tiny", (2,))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    with torch.device("meta"):
        empty = case.make()
    for module in case.groups(empty):
        fully_shard(module, make_mesh((2,)))
    fully_shard(empty, make_mesh((2,)))
    options.broadcast_from_rank0 = True
    set_model_state_dict(empty, state, options=options)
    assert_same(whole(empty.state_dict()), whole(model.state_dict()))
    batch = case.batch(torch.Generator().manual_seed(0))
    assert torch.equal(case.loss(empty, batch), case.loss(model, batch))


def other_shape(from_rank_0: bool, with_optimizer: bool) -> None:
    _, source, source_optimizer = trained("mlp", (2,), seed=1)
    _, model, optimizer = trained("mlp", (2,))
    options = StateDictOptions(full_state_dict=True)
    state, optim = get_state_dict(source, source_optimizer, options=options)
    before = whole_state(model, optimizer)
    state[list(state)[-1]] = torch.zeros(3)
    options.broadcast_from_rank0 = from_rank_0
    try:
        if with_optimizer:
            both = {"model_state_dict": state, "optim_state_dict": optim}
            set_state_dict(model, optimizer, **both, options=options)
        else:
            set_model_state_dict(model, state, options=options)
    finally:
        assert_same(whole_state(model, optimizer), before)


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("from_rank_0", [False, True])
def test_another_shape_is_found_before_anything_is_set(
    spawn_errors: Spawn, from_rank_0: bool, with_optimizer: bool
) -> None:
    """The last of all names is wrong; no value of the model or the optimizer is changed."""
    for error in spawn_errors(other_shape, 2, from_rank_0, with_optimizer):
        assert error.type_name == "CheckpointError"
        assert "has shape (3,) in the state dict" in error.message


class Turned(nn.Module):
    """Its weight was saved transposed by an earlier version; a scale as torch 0.3 saved numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_load_state_dict_pre_hook(turn)


def turn(module: nn.Module, state_dict: typing.Any, prefix: str, *_: object) -> None:
    if isinstance(module, Turned):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()


@on_ranks(2)
def test_hooks_of_modules_may_give_values_another_shape() -> None:
    model = nn.Sequential(Turned(), nn.Linear(2, 2))
    fully_shard(model)
    state = whole(model.state_dict())
    saved = torch.arange(12.0).view(4, 3)
    state |= {"0.weight": saved, "0.scale": torch.ones(1)}
    set_model_state_dict(model, state)
    assert torch.equal(full(model[0].weight), saved.t())
    assert full(model[0].scale).item() == 1.0
    state["1.weight"] = saved
    with pytest.raises(CheckpointError, match=r"'1\.weight' has shape \(4, 3\)"):
        set_model_state_dict(model, state)


@pytest.mark.parametrize("from_rank_0", [False, True])
@on_ranks(2)
def test_a_model_on_meta_and_its_optimizer(from_rank_0: bool) -> None:
    """The optimizer's state comes to where the parameters are by then."""
    case, model, optimizer = trained("mlp", (2,))
    options = StateDictOptions(full_state_dict=True)
    state, optim = get_state_dict(model, optimizer, options=options)
    with torch.device("meta"):
        empty = fully_shard(case.make(), make_mesh((2,)))
    other = type(optimizer)(empty.parameters())
    options.broadcast_from_rank0 = from_rank_0
    both = {"model_state_dict": state, "optim_state_dict": optim}
    set_state_dict(empty, other, **both, options=options)
    assert_same(whole_state(empty, other), whole_state(model, optimizer))
    losses = train_on_shares(case, model, optimizer, range(2, 4))
    assert train_on_shares(case, empty, other, range(2, 4)) == losses


@on_ranks(2)
def test_what_cannot_be_copied_leaves_parameter_and_gradient() -> None:
    _, model, _ = trained("mlp", (2,))
    param = next(model.parameters())
    gradient = torch.rand(param.shape)
    param.grad = torch.zeros_like(param).copy_(gradient)
    kept, flat, values = param.grad, param.flat, full(param)
    with pytest.raises(NotImplementedError, match="meta"):
        param.data = torch.empty(param.shape, dtype=torch.bfloat16, device="meta")
    assert param.grad is kept
    assert param.flat is flat
    assert torch.equal(full(param.grad), gradient)
    assert torch.equal(full(param), values)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2)
def test_rank_0_sends_another_dtype(device: str) -> None:
    """A model that has values keeps its dtype, one on meta takes over that of the state.

    Ranks may have begun with different values, as all are replaced.
    """
    torch.manual_seed(dist.get_rank())
    with torch.device(device):
        model = fully_shard(nn.Linear(6, 4), make_mesh((2,)))
    sent = {"weight": torch.rand(4, 6).double(), "bias": torch.rand(4).double()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, sent if dist.get_rank() == 0 else {}, options=options)
    dtype = torch.float32 if device == "cpu" else torch.float64
    assert {param.dtype for param in model.parameters()} == {dtype}
    dist.broadcast(sent["bias"], src=0)
    assert torch.equal(model.bias.full_tensor(), sent["bias"].to(dtype))
    model(torch.ones(2, 6, dtype=dtype)).sum().backward()


@on_ranks(2)
def test_values_of_another_dtype_that_are_assigned() -> None:
    """What ranks were sharded with is not compared any more."""
    torch.manual_seed(dist.get_rank())
    model = fully_shard(nn.Linear(6, 4), make_mesh((2,)))
    state = {"weight": torch.ones(4, 6).double(), "bias": torch.ones(4).double()}
    model.load_state_dict(state, assign=True)
    model(torch.ones(2, 6).double()).sum().backward()


def optimizer_of_other_shapes() -> None:
    _, model, optimizer = trained("mlp", (2,))
    _, other, other_optimizer = trained("tiny", (2,))
    state = get_optimizer_state_dict(other, other_optimizer)
    set_optimizer_state_dict(model, optimizer, state)


def test_optimizer_state_of_other_parameters_is_refused(spawn_errors: Spawn) -> None:
    for error in spawn_errors(optimizer_of_other_shapes, 2):
        assert error.type_name == "CheckpointError"
        assert "'layers.0.weight'" in error.message
        assert "strict=False" in error.message


# --- modules that save under other names ----------------------------------------------------------


class Renaming(nn.Linear):
    """Saves its weight under another name, and its bias in two parts."""

    def _save_to_state_dict(self, destination: typing.Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}kernel"] = self.weight if keep_vars else self.weight.detach()
        for index, part in enumerate(self.bias.detach().chunk(2)):
            destination[f"{prefix}bias{index}"] = part


def rename_in_hook(_module: nn.Module, state: typing.Any, prefix: str, _: object) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


def move_in_hook(_module: nn.Module, state: typing.Any, prefix: str, _: object) -> None:
    state["kernel"] = state.pop(f"{prefix}weight")
    state["bias"] = state.pop(f"{prefix}bias")


def saved_amid_a_step(way: str) -> list[bool]:
    layer = Renaming(4, 4) if way == "method" else nn.Linear(4, 4)
    wanted = {name: value.clone() for name, value in layer.state_dict().items()}
    if way != "method":
        wanted["kernel"] = wanted.pop("weight")
        layer.register_state_dict_post_hook(rename_in_hook if way == "hook" else move_in_hook)
        layer.register_buffer("mask", torch.eye(4).to_sparse())
    model = fully_shard(nn.Sequential(layer, nn.Linear(4, 4)))
    loss = model(torch.ones(1, 4)).sum()
    state = model.state_dict() if way == "hook that leaves out the module" else layer.state_dict()
    is_sharded = isinstance(state["kernel"], ShardedTensor)
    loss.backward()
    wholes = {name: full(value) for name, value in state.items()}
    return [is_sharded, *(torch.equal(wholes[name], value) for name, value in wanted.items())]


@pytest.mark.helpers
@pytest.mark.parametrize("way", ["method", "hook", "hook that leaves out the module"])
def test_what_is_saved_under_another_name_outlives_the_step(spawn: Spawn, way: str) -> None:
    for found in spawn(saved_amid_a_step, 2, way):
        assert all(found), found


@pytest.mark.helpers
@pytest.mark.parametrize(
    ("mesh_shape", "parts", "whose"),
    [
        ((2,), "both", "torch"),
        ((2, 2), "both", "torch"),
        ((2,), "optimizer", "torch"),
        ((2,), "both", "shardkit"),
    ],
    ids=str,
)
@on_ranks("mesh_shape")
def test_other_ranks_than_0_may_have_nothing(
    mesh_shape: tuple[int, ...], parts: str, whose: str
) -> None:
    """Rank 0 alone has the state; what the others pass is not looked at."""
    from torch.distributed.checkpoint import state_dict as of_torch

    case, model, optimizer = trained("mlp", mesh_shape)
    options = StateDictOptions(full_state_dict=True)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    other, other_optimizer = make_sharded(case, mesh_shape, seed=7)
    before = whole_state(other, other_optimizer)["model"]
    if dist.get_rank() > 0 or parts == "optimizer":
        model_state = {}
    if dist.get_rank() > 0:
        optim_state = {}
    options.broadcast_from_rank0 = True
    put = of_torch.set_state_dict if whose == "torch" else set_state_dict
    put(
        other,
        other_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optim_state,
        options=options,
    )
    wanted, found = whole_state(model, optimizer), whole_state(other, other_optimizer)
    assert_same(found["model"], before if parts == "optimizer" else wanted["model"])
    assert_same(found["optimizers"], wanted["optimizers"])
