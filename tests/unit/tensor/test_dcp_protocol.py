"""What sharded tensors answer to distributed checkpoints, and what these refuse."""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from models import Parameters
from recording import recording_mesh
from shardkit import ShardedTensorError, fully_shard

Shapes = dict[str, tuple[int, ...]]


def state_on(rank: int, shapes: Shapes, *, world_size: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(0)
    mesh, _ = recording_mesh((world_size,), rank=rank)
    return fully_shard(Parameters(shapes), mesh).state_dict()


def metadata_of(shapes: Shapes) -> Metadata:
    planners = []
    for rank in range(3):
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_on(rank, shapes), is_coordinator=rank == 0)
        planners.append(planner)
    _, metadata = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    return metadata


def test_items_say_what_a_file_holds() -> None:
    state = state_on(1, {"matrix": (7, 13)})
    items = state["matrix"].__create_write_items__("model.matrix", state["matrix"])
    start, stop = state["matrix"].spec.start, state["matrix"].spec.stop
    assert sum(math.prod(item.tensor_data.chunk.sizes) for item in items) == stop - start
    for item in items:
        assert item.index.fqn == "model.matrix"
        assert item.tensor_data.size == torch.Size((7, 13))
        properties = item.tensor_data.properties
        assert (properties.dtype, properties.requires_grad) == (torch.float32, False)
        memory = state["matrix"].__get_tensor_shard__(item.index)
        assert memory.shape == item.tensor_data.chunk.sizes
        assert memory.untyped_storage().nbytes() == memory.nbytes, "DCP would copy it"
        before = state["matrix"].to_local().clone()
        memory += 1
        changed = (state["matrix"].to_local() != before).sum()
        assert changed == memory.numel(), "it is a copy"
    chunks = state["matrix"].__create_chunk_list__()
    assert chunks == [item.tensor_data.chunk for item in items]


def test_a_tensor_without_elements_is_in_the_checkpoint() -> None:
    entry = metadata_of({"empty": (0, 4), "vector": (5,)}).state_dict_metadata["empty"]
    assert entry.size == torch.Size((0, 4))
    assert len(entry.chunks) == 1


def test_a_model_on_meta_cannot_be_saved() -> None:
    mesh, _ = recording_mesh((3,), rank=0)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    planner = DefaultSavePlanner()
    planner.set_up_planner(fully_shard(model, mesh).state_dict(), is_coordinator=True)
    with pytest.raises(ShardedTensorError, match=r"'weight' .*meta device.*to_empty\(\)"):
        planner.create_local_plan()


def test_a_box_of_another_rank_is_refused() -> None:
    matrix = state_on(0, {"matrix": (7, 13)})["matrix"]
    with pytest.raises(ShardedTensorError, match=r"'x' is asked for at offsets \(6, 0\)"):
        matrix.__get_tensor_shard__(MetadataIndex("x", (6, 0)))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"matrix": (7, 13)}, "Missing key in checkpoint state_dict: vector"),
        ({"matrix": (7, 13), "vector": (6,)}, "Size mismatch"),
    ],
)
def test_what_a_load_by_dcp_refuses(saved: Shapes, message: str) -> None:
    """Before anything is read; entries that nobody asked for are left out without a word."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state_on(0, {"matrix": (7, 13), "vector": (5,)}), metadata_of(saved))
    with pytest.raises((RuntimeError, ValueError), match=message):
        planner.create_local_plan()


def test_copies_of_a_cut_are_the_same_cut() -> None:
    matrix: typing.Any = state_on(0, {"matrix": (7, 13)})["matrix"]
    assert copy.deepcopy({"spec": matrix.spec})["spec"] is matrix.spec


def test_room_on_a_named_device_is_sharded_and_other_room_is_not() -> None:
    """Stagers copy a state dict to the host this way; `nn.init` wants room for a whole matrix."""
    matrix = state_on(1, {"matrix": (7, 13)})["matrix"]
    room: typing.Any = matrix.new_empty(matrix.shape, device="cpu")
    assert room.to_local().numel() == matrix.to_local().numel()
    assert type(matrix.new_empty(matrix.shape)) is Tensor
    assert type(matrix.new_empty((2, 2), device="cpu")) is Tensor
