"""Frozen weights over several tensors: cut, gathered in their few bits, of their class in use."""

from __future__ import annotations

import copy
import functools
import math
import typing

import pytest
import torch
from torch import nn

from allocated import past_shared_memory
from parity import compare_training
from quantized import LAYERS, Nibbles, live_nbytes, nbytes_at_rest, quantized_case
from recording import recording_mesh
from reference import Differences, assert_within, make_mesh, my_batch, shard
from shardkit import (
    CPUOffloadPolicy,
    FreedParameterError,
    MixedPrecisionPolicy,
    ShardedTensor,
    auto_shard,
    fully_shard,
    summon_full_params,
)
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers

KINDS = list(LAYERS)
TOLERANCE = 2e-6  # Of losses and gradients near 1, over six steps.


def train(
    kind: str, mesh_shape: tuple[int, ...], optimizer: str, width: int, **options: typing.Any
) -> Differences:
    case = quantized_case(kind, width)
    plain, model = case.make(), case.make()
    shard(case, model, make_mesh(mesh_shape), **options)
    differences = compare_training(case, model, plain, optimizer)
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return differences


@pytest.mark.parametrize(
    ("kind", "mesh_shape", "optimizer"),
    [
        *(("wrapper", shape, "sgd") for shape in [(1,), (2,), (3,), (4,), (2, 2)]),
        *((kind, (2, 2), "sgd") for kind in KINDS[1:]),
        *((kind, (3,), "adamw") for kind in KINDS),
        *((kind, (1,), "sgd") for kind in KINDS[1:]),
    ],
    ids=str,
)
def test_adapters_train_as_in_plain_training(
    spawn: Spawn, kind: str, mesh_shape: tuple[int, ...], optimizer: str
) -> None:
    found = spawn(train, math.prod(mesh_shape), kind, mesh_shape, optimizer, 24)
    tolerance = TOLERANCE if optimizer == "sgd" else 2e-5
    assert_within(found, loss=TOLERANCE, grad=tolerance, parameter=tolerance)


@pytest.mark.parametrize("kind", ["wrapper", "8 bit"])
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"offload_policy": CPUOffloadPolicy()},
    ],
    ids=["kept", "partly kept", "offload"],
)
@on_ranks(4)
def test_options_make_no_difference(kind: str, options: dict[str, typing.Any]) -> None:
    assert_within(
        [train(kind, (4,), "sgd", 24, **options)],
        loss=TOLERANCE,
        grad=TOLERANCE,
        parameter=TOLERANCE,
    )


def train_few_elements() -> Differences:
    """One group of two weights of few bytes: one rank has a piece of both."""
    case = quantized_case("wrapper", width=1)
    plain, model = case.make(), case.make()
    fully_shard(model)
    sizes = [block.base.weight.to_local().numel() for block in model.blocks]
    differences = compare_training(case, model, plain)
    differences["empty"] = sizes.count(0)
    return differences


def test_ranks_that_own_nothing_of_a_weight_gather_it(spawn: Spawn) -> None:
    found = spawn(train_few_elements, 4)
    assert [differences.pop("empty") for differences in found] == [1, 0, 1, 1]
    assert_within(found, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


# --- memory and traffic ---------------------------------------------------------------------------


SLACK = 4096  # Bytes of small tensors that steps make.


@past_shared_memory()
def measure_memory(kind: str) -> tuple[int, int, int]:
    """Return the bytes of a large model before it is sharded, after that, and after two steps."""
    case = quantized_case(kind, width=2**14)
    empty = live_nbytes()
    model = case.make()
    whole = live_nbytes() - empty
    for block in model.blocks:
        for each in (block.up, block.down):
            each.requires_grad_(requires_grad=False)
    shard(case, model)
    cut = live_nbytes() - empty
    for step in range(2):
        case.loss(model, my_batch(case, step)).backward()
    model.zero_grad()
    return whole, cut, nbytes_at_rest(empty + cut + SLACK) - empty


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_holds_its_part_of_the_bits(spawn: Spawn, kind: str, world_size: int) -> None:
    for whole, cut, later in spawn(measure_memory, world_size, kind):
        # Whole on every rank: one scale for each row of 8-bit weights, as long as the bias is.
        rows = 4 * (2**14 + 16) if kind == "8 bit" else 0
        expected = (whole - rows) / world_size + rows
        assert cut <= 1.02 * expected + SLACK
        assert later <= cut + SLACK


def recorded(kind: str) -> tuple[nn.Module, typing.Any]:
    mesh, log = recording_mesh((2,))
    model = quantized_case(kind).make()
    for block in model.blocks:
        fully_shard(block, mesh)
    return fully_shard(model, mesh), log


def test_four_bits_travel() -> None:
    model, log = recorded("wrapper")
    log.clear()
    model(torch.ones(1, 6)).sum().backward()
    # 24 x 16 codes of half a byte, 48 scales of one, a step of four (on 16), the table's 16 floats.
    # Beside them the elements of the adapter.
    assert ("start all_gather", (192 + 48 + 16 + 64) + (16 * 2 + 2 * 24 + 24)) in log


@pytest.mark.parametrize("kind", KINDS)
def test_all_quantized_weights_of_a_group_travel_at_once(kind: str) -> None:
    mesh, log = recording_mesh((2,))
    model = fully_shard(quantized_case(kind).make(), mesh)
    log.clear()
    model(torch.ones(1, 6)).sum().backward()
    gathers = [numel for what, numel in log if what == "start all_gather"]
    assert len(gathers) == 1


# --- between steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_between_steps_a_weight_is_its_bytes(kind: str) -> None:
    model, _ = recorded(kind)
    weight = model.blocks[0].base.weight
    assert isinstance(weight, ShardedTensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.dtype == torch.uint8
    assert weight.ndim == 1
    assert not weight.requires_grad
    assert f"packed={type(LAYERS[kind](torch.ones(8, 8)).weight).__name__}(" in repr(weight)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_whole_weights_are_of_their_class_and_copies_are_their_own(kind: str) -> None:
    case = quantized_case(kind)
    plain, model = case.make(), case.make()
    shard(case, model)
    mine, theirs = (each.blocks[1].base.weight for each in (model, plain))
    whole = mine.full_tensor()
    assert type(whole) is type(theirs)
    assert whole.shape == theirs.shape
    assert whole.dtype == theirs.dtype
    x = my_batch(case, 0)[0]
    expected = model(x)
    with summon_full_params(model):
        assert type(model.blocks[1].base.weight) is type(theirs)
        for block in model.blocks:
            if kind == "wrapper":
                block.base.weight.codes.copy_(block.base.weight.codes.flip(0))
    changed = kind == "wrapper"
    assert torch.equal(model(x), expected) != changed
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    assert twin.blocks[1].base.weight.local_piece.data_ptr() != mine.local_piece.data_ptr()


@on_ranks(2)
def test_a_copy_of_a_used_model_is_independent() -> None:
    """The layers of the copy keep nothing that belongs to the first model."""
    case = quantized_case("8 bit")
    model = shard(case, case.make())
    x = my_batch(case, 0)[0]
    expected = model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.blocks:
            block.base.weight.zero_()
    assert torch.equal(twin(x), expected)
    assert not torch.equal(model(x), expected)


def test_parts_that_leak_raise_with_the_name_of_the_weight() -> None:
    model, _ = recorded("wrapper")
    kept = []
    layer = model.blocks[0].base
    layer.register_forward_pre_hook(lambda module, _: kept.append(module.weight))
    model(torch.ones(1, 6)).sum().backward()
    for use in (lambda: kept[0] + 1, lambda: kept[0].codes + 1, lambda: kept[0].scales.step + 1):
        with pytest.raises(FreedParameterError, match=r"'blocks\.0\.base\.weight'"):
            use()
    assert type(kept[0]) is not Nibbles


def test_layers_that_ran_before_are_sharded_as_well() -> None:
    """A layer for 8 bits has taken codes and scales from its parameter then."""
    mesh, _ = recording_mesh((1,))
    model = quantized_case("8 bit").make()
    x = torch.ones(2, 6)
    with torch.no_grad():
        expected = model(x)
    assert model.blocks[0].base.weight.CB is None
    fully_shard(model, mesh)
    assert model.blocks[0].base.state.CB is None
    assert torch.equal(model(x), expected)


def test_quantized_weights_are_not_cast() -> None:
    mesh, log = recording_mesh((2,))
    model = quantized_case("wrapper").make()
    for block in model.blocks:
        fully_shard(block, mesh, MixedPrecisionPolicy(output_dtype=torch.float32))
    fully_shard(model, mesh)
    model.to(torch.bfloat16)
    assert model.blocks[0].base.weight.dtype == torch.uint8
    assert model.blocks[0].up.weight.dtype == torch.bfloat16
    del log


def test_plans_count_the_bits() -> None:
    mesh, _ = recording_mesh((2,))
    plan = auto_shard(quantized_case("wrapper", width=2**12).make(), mesh, apply=False)
    weights = 2 * 2**12 * 16 * (1 / 2 + 1 / 8)
    others = 4 * sum(p.numel() for p in quantized_case("wrapper", 2**12).make().parameters())
    assert weights < sum(group.nbytes for group in plan.groups) < weights + others / 2


# --- forwards that write --------------------------------------------------------------------------

WRITES: dict[str, typing.Any] = {
    "wrapper": lambda weight: weight.codes.bitwise_xor_(17),
    "registered": lambda weight: weight.scale.mul_(0.9),
    "4 bit": lambda weight: weight.quant_state.absmax.bitwise_xor_(1),
}


def write_to_parts(kind: str, module: typing.Any, args: object) -> None:
    del args
    WRITES[kind](module.weight)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", WRITES)
@on_ranks("mesh_shape")
def test_what_a_forward_writes_to_parts_is_kept(kind: str, mesh_shape: tuple[int, ...]) -> None:
    """A forward changes parts of its quantized weight."""
    case = quantized_case(kind, 24)
    plain, model = case.make(), case.make()
    for each in (plain, model):
        for block in each.blocks:
            block.base.register_forward_pre_hook(functools.partial(write_to_parts, kind))
    shard(case, model, make_mesh(mesh_shape))
    assert_within(
        [compare_training(case, model, plain, "sgd")],
        loss=TOLERANCE,
        grad=TOLERANCE,
        parameter=TOLERANCE,
    )
