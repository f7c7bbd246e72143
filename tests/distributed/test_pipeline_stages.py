"""Stages of a pipeline, each sharded over its own submesh of a 3-D mesh, in training at once."""

from __future__ import annotations

import copy
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit
from models import regression_batch
from reference import OPTIMIZERS, SGD_TOLERANCE, Differences, assert_within, step_all
from shardkit import ShardedTensor, checkpoint, fully_shard
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    import pathlib


AXES = ("pp", "dp_replicate", "dp_shard")
STEPS = 4


class Stages(nn.Module):
    """A model in two parts of different sizes, so that nothing of one fits the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh()),
                nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 9), nn.Linear(9, 5)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def make_submesh(kind: str, shape: tuple[int, int, int]) -> typing.Any:
    """Return this rank's mesh of data parallelism, cut out of a mesh of three axes."""
    make = dist.init_device_mesh if kind == "torch" else shardkit.init_device_mesh
    return make("cpu", shape, mesh_dim_names=AXES)["dp_replicate", "dp_shard"]


def exchange(tensor: Tensor, partner: int, *, sends: bool) -> Tensor:
    """Send a tensor to the rank of the other stage, or receive one of its shape."""
    if sends:
        dist.send(tensor.detach().contiguous(), partner)
    else:
        tensor = torch.empty_like(tensor)
        dist.recv(tensor, partner)
    return tensor


def draw(replica: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    return regression_batch(torch.Generator().manual_seed(100 * step + 10 * micro + replica))


def run_stage(
    stage: nn.Module, number: int, partner: int, micro_batches: list[tuple[Tensor, Tensor]]
) -> None:
    """Run one stage of two: all forwards, then all backwards, of which the last is synced."""
    waiting = []
    for x, y in micro_batches:
        if number == 0:
            waiting.append((x, stage(x)))
            exchange(waiting[-1][1], partner, sends=True)
        else:
            received = exchange(torch.empty(len(x), 13), partner, sends=False).requires_grad_()
            loss = (stage(received) - y).square().mean() / len(micro_batches)
            waiting.append((received, loss))
    for i, (received, output) in enumerate(waiting):
        stage.set_requires_gradient_sync(i == len(waiting) - 1)
        if number == 0:
            output.backward(exchange(output, partner, sends=False))
        else:
            output.backward()
            exchange(received.grad, partner, sends=True)


def train_stages(
    kind: str, shape: tuple[int, int, int], micro_batches: int, reshard: bool | None
) -> Differences:
    """Train a pipeline of two stages; each is compared with its part of the whole model."""
    plain = Stages()
    rank = dist.get_rank()
    num_replicas = shape[1] * shape[2]
    number, replica = divmod(rank, num_replicas)
    partner = (1 - number) * num_replicas + replica
    stage = copy.deepcopy(plain.stages[number])
    mesh = make_submesh(kind, shape)
    for layer in stage:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh, reshard_after_forward=reshard)
    fully_shard(stage, mesh, reshard_after_forward=reshard)
    optimizer = OPTIMIZERS["sgd"](stage.parameters())
    reference = OPTIMIZERS["sgd"](plain.parameters())
    differences = Differences()
    for step in range(STEPS):
        run_stage(stage, number, partner, [draw(replica, step, i) for i in range(micro_batches)])
        for each in range(num_replicas):
            for micro in range(micro_batches):
                x, y = draw(each, step, micro)
                loss = (plain(x) - y).square().mean()
                (loss / micro_batches / num_replicas).backward()
        differences.note_grads(stage, plain.stages[number])
        step_all((optimizer, reference))
    differences.note_parameters(stage, plain.stages[number])
    return differences


@pytest.mark.parametrize("reshard_after_forward", [True, None])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)], ids=str)
def test_stages_of_a_pipeline_on_submeshes_of_torch(
    spawn: Spawn,
    shape: tuple[int, int, int],
    micro_batches: int,
    reshard_after_forward: bool | None,
) -> None:
    found = spawn(train_stages, 4, "torch", shape, micro_batches, reshard_after_forward)
    assert_within(found, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def test_stages_of_a_pipeline_on_submeshes_of_shardkit(spawn: Spawn) -> None:
    found = spawn(train_stages, 4, "shardkit", (2, 1, 2), 1, None)
    assert_within(found, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def norms_of_stages() -> tuple[float, float]:
    """Return the norm of a stage's gradients by clipping, and of the same gradients whole."""
    torch.manual_seed(dist.get_rank() // 2)
    mesh = make_submesh("torch", (2, 1, 2))
    stage = nn.Linear(7 + dist.get_rank() // 2, 5)
    fully_shard(stage, mesh)
    stage(torch.ones(2, stage.in_features)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(stage.parameters(), 1e9)
    whole = [param.grad.full_tensor() for param in stage.parameters()]
    return norm.item(), nn.utils.get_total_norm(whole).item()


def test_each_stage_has_its_own_norm(spawn: Spawn) -> None:
    found = spawn(norms_of_stages, 4)
    for norm, whole in found:
        assert norm == pytest.approx(whole, rel=1e-6)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


@on_ranks(3)
def test_ranks_may_be_in_different_numbers_of_groups() -> None:
    dist.new_group([1, 2])
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    for layer in model:
        fully_shard(layer, reshard_after_forward=3)
    fully_shard(model)
    model(torch.ones(2, 7)).sum().backward()


# --- stages that torch.export has cut -------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train_exported_stages() -> float:
    """Shard both stages on both ranks; run them one behind the other."""
    from torch.distributed.pipelining import SplitPoint, pipeline  # Takes seconds.

    torch.manual_seed(0)
    plain = Stack()
    split = {"layers.2": SplitPoint.BEGINNING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch's own.
        pipe = pipeline(copy.deepcopy(plain), (torch.ones(2, 4),), split_spec=split)
    stages = [fully_shard(pipe.get_stage_module(index)) for index in range(2)]
    params = [param for stage in stages for param in stage.parameters()]
    assert all(isinstance(param, ShardedTensor) for param in params)
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (params, plain.parameters())]
    x = torch.randn(2, 4)
    for _ in range(3):
        stages[1](stages[0](x)).square().sum().backward()
        plain(x).square().sum().backward()
        step_all(optimizers)
    pairs = zip(params, plain.parameters(), strict=True)
    return max((param.full_tensor() - other).abs().max().item() for param, other in pairs)


@pytest.mark.helpers
def test_stages_of_an_exported_model_are_sharded(spawn: Spawn) -> None:
    assert max(spawn(train_exported_stages, 2)) < 1e-6


# --- checkpoints ----------------------------------------------------------------------------------


def make_part(
    numbers: tuple[int, ...], mesh: typing.Any, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return some of the stages, with the names that they have in the whole, and an optimizer."""
    torch.manual_seed(seed)
    part = Stages()
    for stage in {0, 1} - {*numbers}:
        part.stages[stage] = nn.Identity()
    if mesh is not None:
        fully_shard(part, mesh)
    names = dict(part.named_parameters())
    groups = [
        {
            "params": [p for n, p in names.items() if n.startswith(f"stages.{i}.") and kind in n],
            "lr": seed + 0.1 * (i + 1),
            "weight_decay": 0.01 * (kind == "weight"),
        }
        for i in numbers
        for kind in ("weight", "bias")
    ]
    return part, torch.optim.AdamW(groups)


def options_of(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def load_stages(path: str) -> list[str]:
    """Save two stages into one checkpoint, load each, and return what is refused."""
    number = dist.get_rank() // 2
    mesh = make_submesh("torch", (2, 1, 2))
    stage, optimizer = make_part((number,), mesh, 0)
    stage(torch.ones(2, 7 if number == 0 else 13)).sum().backward()
    optimizer.step()
    checkpoint.save(path, stage, optimizer, step=3)

    loaded, its_optimizer = make_part((number,), mesh, 1)
    assert checkpoint.load(path, loaded, its_optimizer) == {"step": 3}
    for ours, theirs in zip(stage.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        for key, value in optimizer.state[ours].items():
            assert torch.equal(value, its_optimizer.state[theirs][key]), key
    assert options_of(its_optimizer) == options_of(optimizer)

    whole, one_optimizer = make_part((0, 1), None, 1)
    checkpoint.load(path, whole, one_optimizer)
    assert options_of(one_optimizer) == options_of(make_part((0, 1), None, 0)[1])
    assert set(one_optimizer.state) == set(whole.parameters())

    refused = []
    for name in ("more", "fewer"):
        other, _ = make_part((number,), None, 1)
        if name == "more" and number == 0:
            other.stages[0].append(nn.Linear(13, 13))
        if name == "fewer" and number == 1:
            del other.stages[1][3]
        with pytest.raises(checkpoint.CheckpointError) as found:
            checkpoint.load(path, other)
        refused.append(str(found.value))
    return refused


@pytest.mark.helpers
def test_stages_load_their_own_entries(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    """What another stage takes is not left over; what is missing, or nobody's, is named."""
    for more, fewer in spawn(load_stages, 4, str(tmp_path / "x")):
        assert "[ranks 0, 1] entries do not fit" in more
        assert more.count("missing: model: 'stages.0.4.") == 2
        assert "unexpected" not in more
        assert fewer.count("unexpected: model: 'stages.1.3.") == 2
        assert fewer.count("unexpected") == 2
        assert "missing" not in fewer


def save_stages(path: str, num_stages: int) -> list[Tensor]:
    """Save with as many ranks for each stage; return what the first rank of each has, whole."""
    number = dist.get_rank() * num_stages // dist.get_world_size()
    mesh = make_submesh("torch", (num_stages, 1, dist.get_world_size() // num_stages))
    stage, optimizer = make_part((number,), mesh, 0)
    stage(torch.ones(2, 7 if number == 0 else 13)).sum().backward()
    optimizer.step()
    checkpoint.save(path, stage, optimizer, step=3)
    return [param.full_tensor().detach() for param in stage.parameters()]


def load_alone(path: str, number: int, group_ranks: list[int] | None) -> list[str]:
    """Load one stage, by the ranks of one group, and return what is refused of others."""
    group = None if group_ranks is None else dist.new_group(group_ranks)
    if group_ranks is not None and dist.get_rank() not in group_ranks:
        return []
    stage, optimizer = make_part((number,), None, 1)
    assert checkpoint.load(path, stage, optimizer, process_group=group) == {"step": 3}
    assert options_of(optimizer) == options_of(make_part((number,), None, 0)[1])
    assert set(optimizer.state) == set(stage.parameters())
    assert checkpoint.load(path, stage, process_group=group) == {"step": 3}
    torch.save(stage.state_dict(), f"{path}-{number}.pt")
    refused = []
    for name in ("more", "fewer"):
        other, _ = make_part((number,), None, 1)
        layers = other.stages[number]
        if name == "more":
            layers.append(nn.Linear(13, 13))
        else:
            layers[2] = nn.Identity()
        with pytest.raises(checkpoint.CheckpointError) as found:
            checkpoint.load(path, other, process_group=group)
        refused.append(str(found.value))
        if name == "fewer":
            its_optimizer = torch.optim.AdamW(other.parameters())
            with pytest.raises(checkpoint.CheckpointError) as found:
                checkpoint.load(path, other, its_optimizer, process_group=group)
            refused.append(str(found.value))
    return refused


@pytest.mark.helpers
@pytest.mark.parametrize(
    ("world_size", "loaders", "group_ranks"),
    [(2, 1, None), (4, 2, None), (4, 4, [2, 3])],
    ids=["one process", "two ranks", "a group of two"],
)
def test_a_stage_is_loaded_by_its_own_ranks_alone(
    spawn: Spawn,
    tmp_path: pathlib.Path,
    world_size: int,
    loaders: int,
    group_ranks: list[int] | None,
) -> None:
    """What was saved by another stage is no fault; missing and unknown entries are."""
    path = str(tmp_path / "x")
    saved = spawn(save_stages, world_size, path, 2)
    for number in (0, 1):
        found = spawn(load_alone, loaders, path, number, group_ranks)
        refused = next(filter(None, found))
        more, fewer, with_state = refused
        assert more.count(f"missing: model: 'stages.{number}.4.") == 2
        assert "unexpected" not in more
        for text in (fewer, with_state):
            assert "missing" not in text
            assert text.count("unexpected: model:") == 2
            assert text.count(f"unexpected: model: 'stages.{number}.2.") == 2
            assert f"stages.{1 - number}." not in text
        assert f"unexpected: optimizer: 'stages.{number}.2.weight" in with_state
        loaded = torch.load(f"{path}-{number}.pt")
        for ours, theirs in zip(saved[number * world_size // 2], loaded.values(), strict=True):
            assert torch.equal(ours, theirs)
