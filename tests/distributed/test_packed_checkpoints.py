"""Quantized weights in state dicts and checkpoints, on other numbers of ranks; what is refused."""

from __future__ import annotations

import io
import typing

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from models import Case
from quantized import (
    LAYERS,
    FourBitLinear,
    Model,
    Nibbles,
    NibblesLinear,
    Wrapper,
    quantized_case,
)
from recording import recording_mesh
from reference import shard
from shardkit import (
    ShardedTensorError,
    StateError,
    WrapError,
    auto_shard,
    checkpoint,
    fully_shard,
    register_parts,
    summon_full_params,
)
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.helpers

KINDS = list(LAYERS)


def make(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Model(kind)


def sharded(kind: str, seed: int) -> nn.Module:
    case = quantized_case(kind)
    return shard(Case(case.make, case.groups, case.batch, case.loss), make(kind, seed))


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 12).view(2, 6))


# --- saved and loaded -----------------------------------------------------------------------------

Ways = dict[str, tuple[typing.Any, typing.Any]]


def load_by_dcp(folder: str, model: nn.Module) -> None:
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)


def load_full(folder: str, model: nn.Module) -> None:
    checkpoint.load_full(f"{folder}.safetensors", model)


WAYS: Ways = {
    "dcp": (lambda f, m: dcp.save({"model": m.state_dict()}, checkpoint_id=f), load_by_dcp),
    "directory": (checkpoint.save, checkpoint.load),
    "whole file": (
        lambda f, m: checkpoint.save_full(f"{f}.safetensors", m, format="safetensors"),
        load_full,
    ),
}


def save(folder: str, choice: tuple[str, str]) -> Tensor:
    kind, way = choice
    model = sharded(kind, seed=1)
    WAYS[way][0](f"{folder}/{kind}, {way}", model)
    return output(model)


def load(folder: str, choice: tuple[str, str]) -> Tensor:
    kind, way = choice
    model = sharded(kind, seed=2)
    before = output(model)
    WAYS[way][1](f"{folder}/{kind}, {way}", model)
    after = output(model)
    assert not torch.equal(after, before)
    return after


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 1)])
def test_checkpoints_load_on_other_numbers_of_ranks(
    spawn: Spawn, tmp_path: Path, saved: int, loaded: int
) -> None:
    choices = {f"{kind}, {way}": (kind, way) for kind in ("wrapper", "8 bit") for way in WAYS}
    written = spawn_each(spawn, choices, save, saved, str(tmp_path))
    read = spawn_each(spawn, choices, load, loaded, str(tmp_path))
    for what, (kind, _) in choices.items():
        expected = written[what][0]
        assert torch.equal(expected, output(make(kind, seed=1))), what
        assert all(torch.equal(found, expected) for found in read[what]), what


# Not "8 bit": torch looks for an attribute by the name of each key, unsharded as well.
@pytest.mark.parametrize("kind", KINDS[:-1])
@on_ranks(2)
def test_full_state_dicts_go_from_model_to_model(kind: str) -> None:
    options = StateDictOptions(full_state_dict=True)
    first, second = sharded(kind, seed=1), sharded(kind, seed=2)
    whole = get_model_state_dict(first, options=options)
    assert type(whole["blocks.0.base.weight"]) is Tensor
    set_model_state_dict(second, whole, options=options)
    assert torch.equal(output(first), output(second))


@on_ranks(2)
def test_state_dicts_go_from_unsharded_models_and_back() -> None:
    """What an unsharded model has under the same name is of the weight's class."""
    model, plain = sharded("wrapper", seed=1), make("wrapper", seed=2)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(output(model), output(plain))
    back = {name: param.full_tensor() for name, param in model.named_parameters()}
    third = make("wrapper", seed=3)
    third.load_state_dict(back, assign=True)
    assert torch.equal(output(third), output(plain))


def test_a_weight_of_other_parts_is_refused_by_name() -> None:
    mesh, _ = recording_mesh((1,))
    model = fully_shard(make("wrapper", seed=1), mesh)
    other = Model("wrapper", width=32).state_dict()
    with pytest.raises(RuntimeError, match=r"'blocks.0.base.weight' is a Nibbles over .* got a"):
        model.load_state_dict(other)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_have_the_same_names_while_weights_are_whole(kind: str) -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(make(kind, seed=1), mesh)
    names = list(model.state_dict())
    model.unshard()
    assert list(model.state_dict()) == names


# --- refused --------------------------------------------------------------------------------------


def test_a_pickle_is_refused_with_the_remedy() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(make("wrapper", seed=1), mesh)
    with pytest.raises(
        ShardedTensorError, match=r"'blocks.0.base.weight' is a Nibbles.*shardkit.checkpoint.save"
    ):
        torch.save(model.state_dict(), io.BytesIO())


class Unregistered(nn.Parameter):
    """Keeps its scales where nobody looks."""


def unregistered() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = Unregistered(layer.weight.detach(), requires_grad=False)
    layer.weight.scales = torch.ones(4)
    return layer


def trainable() -> nn.Module:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(Nibbles.of(layer.weight))
    return layer


def on_several_devices() -> nn.Module:
    layer = NibblesLinear(torch.randn(4, 8))
    layer.weight.codes = layer.weight.codes.to("meta")
    return layer


class Copied(nn.Parameter):
    """Is put together over copies of its parts."""


register_parts(
    Copied,
    lambda param: ({"codes": param.detach().as_subclass(Tensor)}, None),
    lambda parts, _: parts["codes"].clone().as_subclass(Copied),
)


def copying() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = torch.ones(4, 4).as_subclass(Copied)
    return layer


def tensor_parallel() -> nn.Module:
    layer = nn.Linear(8, 4, bias=False)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    local = Nibbles.of(layer.weight)
    whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    layer.weight = nn.Parameter(whole, requires_grad=False)
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "trainable": (trainable, r"'weight' is a Nibbles that is to be trained.*Freeze it"),
    "unregistered": (
        unregistered,
        r"'weight' is a frozen Unregistered.*'scales'.*shardkit.register_parts",
    ),
    "not quantized": (
        lambda: FourBitLinear(torch.randn(4, 8), quantized=False),
        r"'weight', a FourBit, is not quantized yet.*module.to\(device='cpu'\)",
    ),
    "copies": (
        copying,
        r"'weight' is a Copied, whose part 'codes' is a copy when it is put together",
    ),
    "devices": (on_several_devices, r"'weight' is a Nibbles on cpu, whose part 'codes' is.*meta"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_packed_is_refused_by_name(what: str) -> None:
    make_layer, message = REFUSED[what]
    mesh, _ = recording_mesh((2,))
    layer = make_layer()
    cls, weight = type(layer), layer.weight
    for call in (fully_shard, auto_shard):
        with pytest.raises(WrapError, match=message):
            call(layer, mesh)
    assert type(layer) is cls
    assert layer.weight is weight


def test_a_whole_weight_that_was_replaced_by_a_plain_one_is_refused() -> None:
    mesh, _ = recording_mesh((1,))
    model = fully_shard(make("wrapper", seed=1), mesh)
    expected, layer = output(model), model.blocks[0].base

    def replace() -> None:
        with summon_full_params(model):
            layer.weight = nn.Parameter(layer.weight.meaning(), requires_grad=False)

    with pytest.raises(StateError, match=r"'blocks.0.base.weight' is a Nibbles over .* a Param"):
        replace()
    assert torch.equal(output(model), expected)


@on_ranks(1)
def test_a_quantized_weight_split_by_tensor_parallelism_is_refused() -> None:
    with pytest.raises(WrapError, match=r"'weight' is a DTensor over a Nibbles"):
        fully_shard(tensor_parallel())


@pytest.mark.parametrize("given", [Tensor, nn.Parameter, int, "Nibbles"])
def test_only_classes_of_tensors_are_registered(given: typing.Any) -> None:
    with pytest.raises(WrapError, match="register_parts takes a class of tensors"):
        register_parts(given, lambda _: ({}, None), lambda _parts, _context: None)


def test_only_functions_take_a_class_apart() -> None:
    wrong: typing.Any = None
    with pytest.raises(WrapError, match="flatten and unflatten must be functions, got None"):
        register_parts(Nibbles, wrong, lambda _parts, _context: None)


def test_a_frozen_weight_that_is_ignored_stays_as_it_is() -> None:
    mesh, _ = recording_mesh((2,))
    layer = NibblesLinear(torch.randn(4, 8))
    model = nn.Sequential(layer, nn.Linear(4, 4))
    fully_shard(model, mesh, ignored_params={layer.weight})
    assert isinstance(layer.weight, Wrapper)
