"""Schedules of torch.distributed.pipelining that run sharded stages, against plain training."""

from __future__ import annotations

import copy
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from reference import OPTIMIZERS, SGD_TOLERANCE, Differences, assert_within
from shardkit import fully_shard, init_device_mesh

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = [
    pytest.mark.helpers,
    pytest.mark.skipif(
        torch.__version__.startswith("2.9."),
        reason="torch 2.9 sends 8 bytes between CPU stages, plain ones too, where 4 are expected",
    ),
]

WIDTH, DEPTH, MICRO_BATCHES, STEPS = 12, 4, 4, 3
SCHEDULES: dict[str, tuple[typing.Any, int]] = {  # With the number of stages, on two ranks.
    "gpipe": (ScheduleGPipe, 2),
    "1f1b": (Schedule1F1B, 2),
    "looped": (ScheduleLoopedBFS, 4),
    "interleaved": (ScheduleInterleaved1F1B, 4),
}


class ShardedStage(PipelineStage):
    """Syncs in the last micro-batch only, as examples/pipeline.py does."""

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, typing.Any],
        last_backward: bool = False,  # noqa: FBT002 - as torch's
    ) -> typing.Any:
        self.submod.set_requires_gradient_sync(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def draw(pipeline: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + pipeline)
    x, y = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator)
    return x, y


def train_schedule(
    name: str, stage_class: type[PipelineStage], reshard: bool
) -> tuple[Differences, int]:
    """Train on two pipelines; return differences, and how many exchanges this rank began."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    make_schedule, num_stages = SCHEDULES[name]
    depth = DEPTH // num_stages
    stages, parts = [], []
    for index in range(mesh.get_local_rank("pp"), num_stages, 2):
        part = plain[index * depth : (index + 1) * depth]
        model = copy.deepcopy(part)
        for module in (*model, model):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
        device, group = torch.device("cpu"), mesh.get_group("pp")
        stages.append(stage_class(model, index, num_stages, device, group=group))
        parts.append(part)
    schedule = make_schedule(
        stages if len(stages) > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss
    )
    optimizer = OPTIMIZERS["sgd"]([p for stage in stages for p in stage.submod.parameters()])
    reference = OPTIMIZERS["sgd"](plain.parameters())
    differences = Differences()
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        for step in range(STEPS):
            x, y = draw(mesh.get_local_rank("dp"), step)
            inputs = [x] if mesh.get_local_rank("pp") == 0 else []
            schedule.step(*inputs, target=y)
            for pipeline in range(2):
                x, y = draw(pipeline, step)
                (F.mse_loss(plain(x), y) / 2).backward()
            for stage, part in zip(stages, parts, strict=True):
                differences.note_grads(stage.submod, part)
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
    for stage, part in zip(stages, parts, strict=True):
        differences.note_parameters(stage.submod, part)
    return differences, exchange.call_count


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("stage_class", [PipelineStage, ShardedStage])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_train_as_without_them(
    spawn: Spawn, name: str, stage_class: type[PipelineStage], reshard: bool
) -> None:
    found = spawn(train_schedule, 4, name, stage_class, reshard)
    differences = [each[0] for each in found]
    assert_within(differences, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_a_stage_that_knows_its_last_micro_batch_reduces_once_a_step(
    spawn: Spawn, name: str
) -> None:
    often = spawn(train_schedule, 4, name, PipelineStage, False)
    once = spawn(train_schedule, 4, name, ShardedStage, False)
    stages_per_rank = SCHEDULES[name][1] // 2
    # Small groups of one backward are reduced together, in one exchange.
    saved = STEPS * (MICRO_BATCHES - 1) * stages_per_rank
    assert [a[1] - b[1] for a, b in zip(often, once, strict=True)] == [saved] * 4
