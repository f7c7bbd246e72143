"""`checkpoint_activations` and torch's own wrappers on every backend, beside plain training."""

from __future__ import annotations

import copy
import itertools
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from models import CASES, Block
from parity import Ranks, Run, compare_training, on_meshes
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    SGD_TOLERANCE,
    TRAINED,
    Differences,
    assert_within,
    full_grads,
    make_mesh,
    train,
)
from shardkit import checkpoint, checkpoint_activations, fully_shard
from workers import on_ranks

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable


pytestmark = pytest.mark.helpers

MESHES = ((2,), (4,), (2, 2))
OPERATORS: dict[str, typing.Any] = {
    "nothing": None,
    "matmuls": "matmuls",
    "half": "every_second_matmul",
    "list": [torch.ops.aten.gelu, torch.ops.aten.addmm],
}


class Normalized(nn.Module):
    """A convolution with statistics and dropout: what a repetition must not do twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, 6, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.convolution(x), 0.25, self.training)
        return torch.relu(self.norm(x))


def group_modules(model: nn.Module, where: str) -> list[nn.Module]:
    """Return which modules of the GPT are groups: the blocks, what is in them, or both."""
    inside = [module for block in model.blocks for module in (block.qkv, block.fc1, block.fc2)]
    return {"blocks": list(model.blocks), "inside": inside, "nested": inside + list(model.blocks)}[
        where
    ]


def train_chosen(
    ranks: Ranks, where: str, every: int, choice: tuple[str, str]
) -> dict[str, Differences]:
    """Train blocks that compute again beside the plain model, and beside the same without."""
    order, operators = choice
    case = CASES["gpt"]
    plain = case.make()
    models = {}
    for again in (True, False):
        model = ranks.put(plain)
        options = {"every": every, "operators": OPERATORS[operators]}
        if again and order == "before":
            checkpoint_activations(model, **options)
        for module in group_modules(model, where):
            fully_shard(module, ranks.mesh)
        fully_shard(model, ranks.mesh)
        if again and order == "after":
            checkpoint_activations(model, **options)
        models[again] = model
    batch = ranks.batch(case, 9)
    beside = Differences()
    losses = {}
    for again, model in models.items():
        losses[again] = case.loss(model, batch)
        losses[again].backward()
    beside.note("loss", losses[True], losses[False])
    for (name, grad), expected in zip(
        full_grads(models[True]).items(), full_grads(models[False]).values(), strict=True
    ):
        beside.note("grad", grad, expected, name)
    models[True].zero_grad()
    return {"beside": beside, "plain": compare_training(case, models[True], plain, ranks=ranks)}


def check(found: dict[str, list[dict[str, Differences]]]) -> None:
    within = {"loss": LOSS_TOLERANCE, "grad": SGD_TOLERANCE, "parameter": SGD_TOLERANCE}
    for what, by_rank in found.items():
        # The same operators in the same order.
        assert_within([each["beside"] for each in by_rank], what, loss=0.0, grad=0.0)
        assert_within([each["plain"] for each in by_rank], what, **within)


def choices(orders: Iterable[str], operators: Iterable[str]) -> dict[str, tuple[str, str]]:
    return {", ".join(choice): choice for choice in itertools.product(orders, operators)}


@on_meshes(*MESHES, xla=((4,),))
def test_chosen_blocks_train_as_the_plain_model(run: Run) -> None:
    check(run.each(choices(["before", "after"], OPERATORS), train_chosen, "blocks", 1))


@pytest.mark.parametrize("where", ["inside", "nested"])
@on_meshes((2,))
def test_chosen_blocks_that_hold_groups(run: Run, where: str) -> None:
    check(run.each(choices(["before"], ["nothing", "list"]), train_chosen, where, 2))
    check(run.each(choices(["after"], ["nothing", "list"]), train_chosen, where, 1))


def train_root(ranks: Ranks, order: str, operators: str) -> Differences:
    """Let the root compute all of itself again, its groups inside included."""
    case = CASES["gpt"]
    plain = case.make()
    model = ranks.put(plain)
    options = {"policy": lambda name, _: not name, "operators": OPERATORS[operators]}
    if order == "before":
        assert checkpoint_activations(model, **options) == [""]
    for block in model.blocks:
        fully_shard(block, ranks.mesh)
    fully_shard(model, ranks.mesh)
    if order == "after":
        assert checkpoint_activations(model, **options) == [""]
    return compare_training(case, model, plain, ranks=ranks)


@pytest.mark.parametrize("operators", ["nothing", "matmuls"])
@pytest.mark.parametrize("order", ["before", "after"])
@on_meshes((2,))
def test_a_root_may_compute_again(run: Run, order: str, operators: str) -> None:
    assert_within(run(train_root, order, operators), **TRAINED)


def write_statistics(ranks: Ranks, operators: str) -> Differences:
    """Train with statistics of each rank and random numbers, beside the same without."""
    torch.manual_seed(0)
    plain = nn.Sequential(Normalized(3), Normalized(6))
    found = []
    for again in (True, False):
        model = ranks.put(plain)
        if again:
            checkpoint_activations(model, operators=OPERATORS[operators])
        for layer in model:
            fully_shard(layer, ranks.mesh)
        fully_shard(model, ranks.mesh)
        case = CASES["conv"]
        for step in range(2):
            model.zero_grad()
            seed_ranks(step)
            model(ranks.batch(case, step)[0]).square().mean().backward()
            ranks.end_step()
        values = {name: buffer.cpu().double() for name, buffer in model.named_buffers()}
        found.append({**values, **full_grads(model)})
    assert found[0]["0.norm.num_batches_tracked"] == 2
    differences = Differences()
    for name, value in found[0].items():
        differences.note("value", value, found[1][name], name)
    return differences


def seed_ranks(step: int) -> None:
    """Have the next random numbers be those of a step, on XLA devices too."""
    torch.manual_seed(step)
    try:
        import torch_xla.core.xla_model as xm
    except ModuleNotFoundError:
        return
    xm.set_rng_state(step + 1)


@pytest.mark.parametrize("operators", ["nothing", "matmuls"])
@on_meshes((2,), (2, 2), xla=((2, 2),))
def test_statistics_are_written_once_and_dropout_repeats(run: Run, operators: str) -> None:
    # On XLA the graphs differ, and with them what is fused.
    assert_within(run(write_statistics, operators), value=1e-7)


# --- torch's own wrappers -----------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["REENTRANT", "NO_REENTRANT"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", ["wrapper", "apply"])
@on_ranks(2)
def test_torchs_wrapper_of_activation_checkpointing(how: str, order: str, impl: str) -> None:
    """Let torch's wrapper of FSDP1's users hold blocks."""
    mesh_shape = (2,)
    case = CASES["gpt"]
    plain = case.make()
    model = copy.deepcopy(plain)
    mesh = make_mesh(mesh_shape)
    kind = CheckpointImpl[impl]
    if order == "after":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    if how == "wrapper":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, kind)
    else:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda block: checkpoint_wrapper(block, kind),
            check_fn=lambda module: isinstance(module, Block),
        )
    if order == "before":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ranks = Ranks(mesh)
    differences = Differences()
    runs = (
        train(case, each, OPTIMIZERS["sgd"](each.parameters()), (batch(i) for i in range(3)))
        for each, batch in (
            (model, lambda i: ranks.batch(case, i)),
            (plain, lambda i: ranks.global_batch(case, i)),
        )
    )
    for mine, expected in zip(*runs, strict=True):
        differences.note("loss", ranks.mean(mine), expected.double())
    # Parameters are seen through the wrapper, a state dict is not.
    assert "blocks.0._checkpoint_wrapped_module.fc1.weight" in dict(model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in model.state_dict().items():
        whole = value.full_tensor()
        differences.note("parameter", whole, plain.state_dict()[name], name)
    assert_within([differences], loss=LOSS_TOLERANCE, parameter=SGD_TOLERANCE)


@on_ranks(2)
def test_checkpoints_do_not_see_torchs_wrapper(tmp_path: pathlib.Path) -> None:
    """Save with torch's wrapper and load without, and the other way."""
    folder = str(tmp_path)
    case = CASES["gpt"]
    differences = Differences()
    for saved_wrapped in (True, False):
        models = []
        for seed, is_wrapped in enumerate((saved_wrapped, not saved_wrapped)):
            torch.manual_seed(seed)
            model = case.make()
            for i, block in enumerate(model.blocks):
                model.blocks[i] = checkpoint_wrapper(block) if is_wrapped else block
                fully_shard(model.blocks[i])
            models.append(fully_shard(model))
        path = f"{folder}/{saved_wrapped}"
        checkpoint.save(path, models[0])
        checkpoint.load(path, models[1])
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            differences.note("parameter", other.full_tensor(), one.full_tensor())
    assert_within([differences], parameter=0.0)
