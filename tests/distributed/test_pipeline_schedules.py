"""Schedules of torch.distributed.pipelining that run sharded stages, against plain training."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from parity import in_turns
from reference import Differences, assert_within, step_all
from shardkit import DeviceMesh, checkpoint, fully_shard, init_device_mesh
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    import pathlib


pytestmark = [
    pytest.mark.helpers,
    pytest.mark.skipif(
        torch.__version__.startswith("2.9."),
        reason="torch 2.9 sends 8 bytes between CPU stages, plain ones too, where 4 are expected",
    ),
]

WIDTH, MICRO_BATCHES, STEPS, PIPELINES = 12, 4, 3, 2
# fp64: sums are taken in another order, some units in the last place (2e-16) of numbers near 1.
TOLERANCE = 1e-12
TIMEOUT_S = 180  # The first call of each rank imports torch's pipelines, on busy machines for long.


class Case(typing.NamedTuple):
    """A schedule on two ranks of a pipeline."""

    schedule: typing.Any  # Class of the schedule.
    layers: tuple[int, ...]  # Number of layers of each stage.
    # Whether the first rank has the first stage and the last one, and so on inwards.
    is_v: bool = False


CASES = {
    "gpipe": Case(ScheduleGPipe, (1, 3)),
    "1f1b": Case(Schedule1F1B, (3, 1)),
    "looped": Case(ScheduleLoopedBFS, (1, 2, 1, 1)),
    "interleaved": Case(ScheduleInterleaved1F1B, (1, 2, 1, 1)),
    "interleaved-zero-bubble": Case(ScheduleInterleavedZeroBubble, (1, 2, 1, 2)),
    "zbv-zero-bubble": Case(ScheduleZBVZeroBubble, (2, 1, 1, 2), is_v=True),
    "dual-pipe-v": Case(ScheduleDualPipeV, (1, 2, 2, 1), is_v=True),
}
if torch.__version__.startswith(("2.10.", "2.11.")):
    # Its stages ask their neighbours once more, and gloo sends nothing from a rank to itself.
    CASES = {name: case for name, case in CASES.items() if not case.is_v}
APART = tuple(
    name for name in ("interleaved-zero-bubble", "zbv-zero-bubble", "dual-pipe-v") if name in CASES
)
"""Those that compute the gradients of inputs and of weights apart."""
UNSHARDED_BY_SCHEDULE = ("looped", "interleaved", *APART)
"""Those that gather and free stages themselves."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH, bias=False)
        # Backward of the gate reads the parameter.
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gate.square()
        return y


class Body(nn.Module):
    """Layers, and a parameter of the stage itself.

    It is used once: with weights apart torch cannot go backward to one of two places, plain or not.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x + self.shift.sin())
        return y


def draw(pipeline: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + pipeline)
    x, y = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def make_plain(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    stages = [nn.Sequential(*(Layer() for _ in range(depth))) for depth in case.layers]
    return nn.Sequential(*map(Body, stages)).double()


def stages_of(case: Case, mesh: DeviceMesh) -> list[int]:
    rank, num_stages = mesh.get_local_rank("pp"), len(case.layers)
    if case.is_v:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, 2))


def make_stages(
    case: Case, mesh: DeviceMesh, *, has_lists: bool = False, **options: typing.Any
) -> dict[int, PipelineStage]:
    """Return this rank's stages by number; some groups of `has_lists` have several modules."""
    stages = {}
    for index in stages_of(case, mesh):
        model = typing.cast("Body", make_plain(case)[index])
        for layer in model.layers:
            if has_lists:
                several: list[nn.Module] = [layer.norm, layer.up]  # type: ignore[list-item]
                fully_shard(several, mesh=mesh["dp"], **options)
            fully_shard(layer, mesh=mesh["dp"], **options)
        fully_shard(model, mesh=mesh["dp"], **options)
        stages[index] = PipelineStage(
            model, index, len(case.layers), torch.device("cpu"), group=mesh.get_group("pp")
        )
    return stages


def make_schedule(
    case: Case, stages: dict[int, PipelineStage], **options: typing.Any
) -> typing.Any:
    given = [*stages.values()]
    return case.schedule(
        given if len(case.layers) > 2 else given[0],
        n_microbatches=MICRO_BATCHES,
        loss_fn=F.mse_loss,
        **options,
    )


def run_step(
    schedule: typing.Any, case: Case, mesh: DeviceMesh, step: int, **options: typing.Any
) -> None:
    x, y = draw(mesh.get_local_rank("dp"), step)
    has_first = 0 in stages_of(case, mesh)
    schedule.step(*([x] if has_first else []), target=y, **options)


def plain_backward(plain: nn.Module, num_pipelines: int, step: int) -> None:
    for pipeline in range(num_pipelines):
        x, y = draw(pipeline, step)
        (F.mse_loss(plain(x), y) / num_pipelines).backward()


def params_of(stages: dict[int, PipelineStage]) -> list[nn.Parameter]:
    return [param for stage in stages.values() for param in stage.submod.parameters()]


def clip_over_stages(stages: dict[int, PipelineStage], mesh: DeviceMesh, max_norm: float) -> None:
    """As docs/howto/pipelines.md says: norms of stages are put together over the pipeline."""
    grads = [param.grad for param in params_of(stages) if param.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    norm = typing.cast("typing.Any", norm).full_tensor() ** 2
    dist.all_reduce(norm, group=mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(params_of(stages), max_norm, norm.sqrt())


def train_schedule(name: str, num_pipelines: int, options: dict[str, typing.Any]) -> Differences:
    """Train on pipelines of two ranks; return the differences from plain training."""
    case = CASES[name]
    mesh = init_device_mesh("cpu", (2, num_pipelines), mesh_dim_names=("pp", "dp"))
    plain, stages = make_plain(case), make_stages(case, mesh, **options)
    schedule = make_schedule(case, stages)
    optimizer = torch.optim.SGD(params_of(stages), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    differences = Differences()
    for step in range(STEPS):
        run_step(schedule, case, mesh, step)
        plain_backward(plain, num_pipelines, step)
        clip_over_stages(stages, mesh, 0.1)
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
        for index, stage in stages.items():
            differences.note_grads(stage.submod, plain[index])
            assert stage.submod.memory_stats()["unsharded_nbytes"] == 0
        step_all((optimizer, reference))
    for index, stage in stages.items():
        differences.note_parameters(stage.submod, plain[index])
    return differences


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", APART)
def test_groups_of_several_modules_get_the_gradients_of_weights(
    spawn: Spawn, name: str, reshard: bool
) -> None:
    options = {"reshard_after_forward": reshard, "has_lists": True}
    found = spawn(train_schedule, 2, name, 1, options, timeout_s=TIMEOUT_S)
    assert_within(found, grad=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "num_pipelines", "reshard"), in_turns(CASES, [1, 2], [True, False])
)
def test_schedules_of_torch_train_as_without_them(
    spawn: Spawn, name: str, num_pipelines: int, reshard: bool
) -> None:
    options = {"reshard_after_forward": reshard}
    found = spawn(
        train_schedule, 2 * num_pipelines, name, num_pipelines, options, timeout_s=TIMEOUT_S
    )
    assert_within(found, grad=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.skipif(
    "finalize_gradients" not in inspect.signature(ScheduleGPipe.step).parameters,
    reason="torch before 2.15 reduces at the end of each step of a schedule",
)
@pytest.mark.parametrize("name", CASES)
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_steps_of_schedules_accumulate_gradients(name: str) -> None:
    """Reductions of one stage are awaited after those of another one have started."""
    case = CASES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    plain, stages = make_plain(case), make_stages(case, mesh)
    defers = "defer_reduce_grad_wait" in inspect.signature(case.schedule.__init__).parameters
    options = {"defer_reduce_grad_wait": True} if defers else {}
    schedule = make_schedule(case, stages, **options)
    differences = Differences()
    for step in range(4):
        run_step(schedule, case, mesh, step, finalize_gradients=step % 2 == 1)
        plain_backward(plain, PIPELINES, step)
        if step % 2 == 0:
            continue
        for index, stage in stages.items():
            differences.note_grads(stage.submod, plain[index])
            assert stage.submod.memory_stats()["unsharded_nbytes"] == 0
            stage.submod.zero_grad()
        plain.zero_grad()
    assert_within([differences], grad=TOLERANCE)


def count_collectives(name: str, reshard: bool) -> dict[str, list[int]]:
    """Return how often each group of this rank was gathered and reduced in the second step."""
    case = CASES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = make_stages(case, mesh, reshard_after_forward=reshard)
    for index, stage in stages.items():
        stage.submod.set_debug(print_memory=f"stage {index}")
    schedule = make_schedule(case, stages)
    with contextlib.redirect_stderr(io.StringIO()):
        run_step(schedule, case, mesh, 0)  # Runs each stage once more, to see what it returns.
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        run_step(schedule, case, mesh, 1)
    found = re.findall(r"\[(stage \d) rank \d\] (gather|reduce) (.*?): ", lines.getvalue())
    counts: dict[str, list[int]] = {}
    for stage_name, what, names in found:
        for group in names.split(", "):
            key = f"{stage_name}: {group}"
            counts.setdefault(key, [0, 0])[["gather", "reduce"].index(what)] += 1
    num_groups = sum(1 + case.layers[index] for index in stages)
    assert len(counts) == num_groups, counts
    return counts


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_each_group_is_gathered_and_reduced_once_a_step(
    spawn: Spawn, name: str, reshard: bool
) -> None:
    for counts in spawn(count_collectives, 4, name, reshard, timeout_s=TIMEOUT_S):
        gathers = {gathered for gathered, _ in counts.values()}
        assert {reduced for _, reduced in counts.values()} == {1}
        if name in UNSHARDED_BY_SCHEDULE or not reshard:
            assert gathers == {1}
        else:  # Each forward gathers and frees; backwards keep what they gather.
            assert 1 < max(gathers) <= MICRO_BATCHES + 1, counts


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_stages_that_are_loaded_go_on(tmp_path: pathlib.Path) -> None:
    """Train a step, save, load into new stages, and train on; compare with plain training."""
    case = [*CASES.values()][-1]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    plain = make_plain(case)
    reference = torch.optim.AdamW(plain.parameters())
    differences = Differences()
    for step in range(STEPS):
        stages = make_stages(case, mesh)
        models = nn.ModuleDict({str(index): stage.submod for index, stage in stages.items()})
        optimizer = torch.optim.AdamW(models.parameters())
        if step > 0:
            with torch.no_grad():
                for param in models.parameters():
                    param.zero_()
            checkpoint.load(tmp_path / str(step - 1), models, optimizer)
        run_step(make_schedule(case, stages), case, mesh, step)
        plain_backward(plain, PIPELINES, step)
        step_all((optimizer, reference))
        checkpoint.save(tmp_path / str(step), models, optimizer)
        for index, stage in stages.items():
            differences.note_parameters(stage.submod, plain[index])
    assert_within([differences], parameter=TOLERANCE)
