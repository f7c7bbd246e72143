"""Laws of distributed checkpoints: what N ranks write, M ranks read, bit for bit.

No processes: one rank after the other is played on a mesh that only records, and torch's own
planners say what each writes and reads.
"""

from __future__ import annotations

import copy
import math
import typing

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import strategies
from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard

Shape = tuple[int, ...]
Entry = tuple[Shape, torch.dtype]
File = dict[typing.Any, Tensor]

entries = st.tuples(strategies.shapes, strategies.floating_dtypes)
meshes = st.one_of(
    st.tuples(strategies.world_sizes), st.tuples(st.integers(1, 3), strategies.world_sizes)
)


class Entries(nn.Module):
    """Parameters of any shapes and dtypes, and a buffer."""

    def __init__(self, described: list[Entry], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, (shape, dtype) in enumerate(described):
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(values, requires_grad=i % 3 != 2))
        self.register_buffer("counted", torch.tensor(seed))

    def forward(self) -> None:
        """Never run."""


def on_rank(model: nn.Module, mesh_shape: Shape, rank: int) -> dict[str, Tensor]:
    """Return the state dict of a model on one rank of a mesh."""
    mesh, _ = recording_mesh(mesh_shape, rank=rank)
    return fully_shard(copy.deepcopy(model), mesh).state_dict()


def write(states: list[dict[str, Tensor]]) -> tuple[File, typing.Any]:
    """Plan and carry out what every rank writes."""
    planners = [DefaultSavePlanner() for _ in states]
    for i, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=i == 0)
    local = [planner.create_local_plan() for planner in planners]
    plans, metadata = planners[0].create_global_plan(local)
    file: File = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            assert item.type in (WriteItemType.SHARD, WriteItemType.TENSOR)
            assert item.index not in file, "two ranks write the same"
            file[item.index] = planner.resolve_data(item).detach().clone()
            assert file[item.index].shape == item.tensor_data.chunk.sizes
    return file, metadata


def read(state: dict[str, Tensor], file: File, metadata: typing.Any) -> None:
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    for item in planner.finish_plan(planner.create_local_plan()).items:
        source = file[item.storage_index]
        for dim, (offset, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            source = source.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        assert target.shape == source.shape
        target.copy_(source)


@given(st.lists(entries, min_size=1, max_size=6), meshes, meshes)
@example([((), torch.float32)], (3,), (1,))
@example([((0, 4), torch.float32), ((7, 5), torch.bfloat16)], (2, 2), (5,))
def test_what_n_ranks_write_m_ranks_read(
    described: list[Entry], saved: Shape, loaded: Shape
) -> None:
    original = Entries(described, seed=0)
    file, metadata = write([on_rank(original, saved, r) for r in range(math.prod(saved))])
    written = sum(tensor.numel() for tensor in file.values())
    assert written == sum(value.numel() for value in original.state_dict().values())
    for name, value in original.state_dict().items():
        entry = metadata.state_dict_metadata[name]
        assert (entry.size, entry.properties.dtype) == (value.shape, value.dtype)
    other = Entries(described, seed=1)
    for rank in range(math.prod(loaded)):
        state = on_rank(other, loaded, rank)
        read(state, file, metadata)
        for name, value in original.state_dict().items():
            piece = state[name]
            if isinstance(piece, ShardedTensor):
                assert torch.equal(piece.to_local(), piece.spec.slice_full(value)), name
            else:
                assert torch.equal(piece, value), name
