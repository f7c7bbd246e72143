"""State dicts in memory, of all ranks or of the first one alone, into sharded models."""

from __future__ import annotations

import itertools
import typing

import pytest
import torch
import torch.distributed as dist
from test_full_model_memory import LAYERS, MIB, SLACK_MIB, WIDTH, big_model, peak_mib
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import set_model_state_dict as torch_set
from whole_files import assert_holds, draw

from models import CASES
from reference import make_mesh, my_batch, shard
from shardkit import fully_shard
from shardkit.checkpoint import load_full, set_model_state_dict
from shardkit.checkpoint._files import disk
from workers import Spawn, in_each, on_ranks

pytestmark = pytest.mark.helpers


def load_in_memory(name: str, mesh_shape: tuple[int, ...], choice: tuple[str, object]) -> None:
    device, others = choice
    case = CASES[name]
    state = draw(case.make().state_dict())
    with torch.device(device):
        model = shard(case, case.make(), make_mesh(mesh_shape))
    before = list(map(id, model.parameters()))
    disk.PART_NBYTES, kept = 64, disk.PART_NBYTES  # So that tensors come in parts.
    try:
        if others == "all":
            loaded = load_full({"model": state}, model)
        else:
            mine: typing.Any = state if dist.get_rank() == 0 else others
            loaded = load_full(mine, model, broadcast_from_rank0=True)
    finally:
        disk.PART_NBYTES = kept
    assert loaded == ([], [], [])
    assert_holds(model, state)
    assert list(map(id, model.parameters())) == before
    case.loss(model, my_batch(case, 0)).backward()


@pytest.mark.parametrize(
    ("name", "mesh_shape"), [("gpt", (2,)), ("conv", (2, 2)), ("tied", (2,))], ids=str
)
@on_ranks("mesh_shape", timeout_s=180)
def test_values_are_those_of_the_state_dict(name: str, mesh_shape: tuple[int, ...]) -> None:
    choices = itertools.product(("cpu", "meta"), (None, {}, "all"))
    in_each({str(choice): choice for choice in choices}, load_in_memory, name, mesh_shape)


@on_ranks(2)
def test_tensors_that_are_not_contiguous() -> None:
    """Columns first, and in another dtype."""
    torch.manual_seed(0)
    weight = torch.randn(6, 5, dtype=torch.float64).t()
    with torch.device("meta"):
        model = fully_shard(nn.Linear(6, 5, bias=False), make_mesh((2,)))
    mine = {"weight": weight} if dist.get_rank() == 0 else None
    load_full(mine, model, broadcast_from_rank0=True)
    assert torch.equal(model.weight.full_tensor(), weight.float())


@on_ranks(2)
def test_ranks_without_elements_gather_anew() -> None:
    model = fully_shard(nn.Linear(1, 1, bias=False), make_mesh((2,)), reshard_after_forward=False)
    ones = torch.ones(1, 1)
    with torch.no_grad():
        model(ones)
        mine = {"weight": 3 * ones} if dist.get_rank() == 0 else None
        load_full(mine, model, broadcast_from_rank0=True)
        assert model(ones).item() == 3


def load_wrong(kind: str) -> None:
    model = fully_shard(nn.Linear(4, 4), make_mesh((2,)))
    state: typing.Any = {
        "none": None,
        "sharded": model.state_dict(),
        "missing": {"weight": torch.ones(4, 4)},
        "shape": {"weight": torch.ones(4, 5), "bias": torch.ones(4)},
    }[kind]
    load_full(state if dist.get_rank() == 0 else None, model, broadcast_from_rank0=True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "the first rank must have it"),
        ("sharded", "'weight' in the state dict is a ShardedTensor"),
        ("missing", "missing in the file: 'bias'"),
        ("shape", "expected another shape: 'weight'"),
    ],
)
def test_all_ranks_say_what_is_wrong(spawn_errors: Spawn, kind: str, message: str) -> None:
    for error in spawn_errors(load_wrong, 2, kind):
        assert error.type_name == "CheckpointError"
        assert message in error.message


# --- memory ---------------------------------------------------------------------------------------


def measure(way: str) -> tuple[int, float, float]:
    """Return this rank, MiB of its shard, and by how much loading raised the peak above that."""
    with torch.device("meta"):
        model = big_model()
        for layer in model:
            fully_shard(layer, make_mesh((2,)))
        fully_shard(model, make_mesh((2,)))
    shapes = {name: param.shape for name, param in model.named_parameters()}
    shard_mib = sum(p.to_local().numel() for p in model.parameters()) * 4 / MIB
    state: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        state = {f"{i}.weight": torch.full(s, i + 1.0) for i, s in enumerate(shapes.values())}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    small = nn.Linear(2, 2)
    torch_set(small, small.state_dict(), options=options)  # Torch imports much when first called.
    dist.barrier()
    before = peak_mib(reset=True)
    if way == "load_full":
        load_full(state, model, broadcast_from_rank0=True)
    elif way == "set":
        set_model_state_dict(model, state, options=options)
    else:
        model.to_empty(device="cpu")
        torch_set(model, state, options=options)
    grown = peak_mib() - before - shard_mib
    for i, param in enumerate(model.parameters()):
        assert param.to_local().eq(i + 1).all()
    return dist.get_rank(), shard_mib, grown


LARGEST_MIB = WIDTH * WIDTH * 5 * 4 / MIB


@pytest.mark.parametrize(
    ("way", "above"),
    [
        ("load_full", disk.PART_NBYTES / MIB),
        ("set", disk.PART_NBYTES / MIB),
        ("torch", 2 * LARGEST_MIB),
    ],
)
def test_memory_above_the_shard(spawn: Spawn, way: str, above: float) -> None:
    """A part of a tensor; torch takes a whole one, and its first rank copies it as well."""
    assert LAYERS * WIDTH * WIDTH * 4 / MIB == 200
    for _, shard_mib, grown_mib in spawn(measure, 2, way):
        assert shard_mib == 100
        assert grown_mib <= above + SLACK_MIB
