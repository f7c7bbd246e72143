"""Parameters that some ranks, or all, do not use in a step; and that are frozen."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from one_backward import (
    MODES,
    TOLERANCE,
    assert_same_gradients,
    compare_later_training,
    compare_one_backward,
    sharded_and_plain,
)
from torch import Tensor, nn

from models import CASES
from parity import Ranks, Run, on_meshes
from reference import LOSS_TOLERANCE, Differences, assert_each_within, full_grads, make_mesh
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn

# --- unused parameters --------------------------------------------------------------------------


class Experts(nn.Module):
    """Parameters of one group, of which a forward uses the one it is told."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.zeros(5)) for _ in range(num_experts))

    def forward(self, expert: int) -> Tensor:
        return self.experts[expert].sum()


def each_rank_uses_its_own() -> list[list[float] | None]:
    model = fully_shard(Experts())
    model(dist.get_rank()).backward()
    return [None if grad is None else grad.tolist() for grad in full_grads(model).values()]


def test_ranks_that_use_different_parameters_average_the_right_ones(spawn: Spawn) -> None:
    """A rank that did not use a parameter adds zero to its mean; nobody used the last one."""
    assert spawn(each_rank_uses_its_own, 2) == [[[0.5] * 5, [0.5] * 5, None]] * 2


def experts_over_several_steps(synced: bool) -> list[list[float] | None]:
    """Use expert 0 on rank 0 in the first micro-batch and expert 1 everywhere in the second."""
    model = fully_shard(Experts())
    model.set_requires_gradient_sync(synced)
    model(2 if dist.get_rank() else 0).backward()
    model.set_requires_gradient_sync(True)
    model(1).backward()
    return [None if grad is None else grad.tolist() for grad in full_grads(model).values()]


@pytest.mark.parametrize("synced", [True, False])
def test_different_parameters_in_different_micro_batches(spawn: Spawn, synced: bool) -> None:
    assert spawn(experts_over_several_steps, 2, synced) == [[[0.5] * 5, [1.0] * 5, [0.5] * 5]] * 2


def experts_with_late_all_reduce() -> list[list[float] | None]:
    """Use expert r on rank r while the all-reduce is off, and expert 0 everywhere when it is on."""
    model = fully_shard(Experts(num_experts=5), make_mesh((2, 2)))
    model.set_requires_all_reduce(False)
    model(dist.get_rank()).backward()
    model.set_requires_all_reduce(True)
    model(0).backward()
    return [None if grad is None else grad.tolist() for grad in full_grads(model).values()]


def test_different_parameters_before_a_late_all_reduce(spawn: Spawn) -> None:
    expected = [[1.25] * 5, [0.25] * 5, [0.25] * 5, [0.25] * 5, None]
    assert spawn(experts_with_late_all_reduce, 4) == [expected] * 4


class Head(nn.Module):
    """A layer whose forward may use no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, *, is_used: bool) -> Tensor:
        return x * self.weight if is_used else 2 * x


class Tasks(nn.Module):
    """A head for each of two tasks; a forward enters one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(2))

    def forward(self, head: int, *, is_used: bool) -> Tensor:
        x = torch.ones(5, requires_grad=True)
        output: Tensor = self.heads[head](x, is_used=is_used)
        return output.sum()


def a_head_of_an_earlier_micro_batch(
    mesh_shape: tuple[int, ...], freezes: bool
) -> list[list[float]]:
    """Return the gradients of both heads; rank 0 alone used the first one, in a micro-batch."""
    model, mesh = Tasks(), make_mesh(mesh_shape)
    for head in model.heads:
        fully_shard(head, mesh)
    fully_shard(model, mesh)
    with model.no_sync():
        model(0, is_used=dist.get_rank() == 0).backward()
    model.heads[0].requires_grad_(not freezes)
    model(1, is_used=True).backward()
    return [grad.tolist() for grad in full_grads(model).values() if grad is not None]


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("freezes", [False, True])
def test_a_layer_that_the_synced_backward_does_not_enter(
    spawn: Spawn, mesh_shape: tuple[int, ...], *, freezes: bool
) -> None:
    """Ranks without unsynced gradients of it reduce it as well."""
    num = torch.Size(mesh_shape).numel()
    found = spawn(a_head_of_an_earlier_micro_batch, num, mesh_shape, freezes)
    assert found == [[[1 / num] * 5, [1.0] * 5]] * num


def unused_with_weight_decay() -> list[bool]:
    """Return whether the parameter that nobody uses is as it was, and the used ones are not."""
    model = fully_shard(Experts())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        model(dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.equal(parameter.full_tensor(), torch.ones(5)) for parameter in model.parameters()]


def test_a_parameter_unused_everywhere_does_not_decay(spawn: Spawn) -> None:
    """Its gradient is None as in plain PyTorch; a zero would let AdamW decay it."""
    assert spawn(unused_with_weight_decay, 2) == [[False, False, True]] * 2


class Heads(nn.Module):
    """Layers, and before the first of them in backward the parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.heads = nn.ModuleList([nn.Linear(5, 1), nn.Linear(5, 1)])

    def forward(self, x: Tensor, num_heads: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.stack([head(x).mean() for head in self.heads[:num_heads]]).sum()


def two_losses_of_one_forward(model: nn.Module, x: Tensor, rank: int) -> None:
    loss = model(x, 1 + rank)
    loss.sin().backward(retain_graph=True)
    loss.cos().backward()


def three_forwards_before_the_first_backward(model: nn.Module, x: Tensor, rank: int) -> None:
    losses = [model(x * factor, 1 + rank) for factor in (1, 2, 3)]
    for index in (1, 2, 0):
        losses[index].sin().backward()


def different_heads_in_several_backwards(
    go_backward: Callable[[nn.Module, Tensor, int], None],
) -> list[bool]:
    torch.manual_seed(0)
    plain = Heads()
    model = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    batches = torch.randn(2, 3, 5)
    for rank, batch in enumerate(batches):
        go_backward(plain, batch, rank)
    go_backward(model, batches[dist.get_rank()], dist.get_rank())
    pairs = zip(full_grads(model).values(), full_grads(plain).values(), strict=True)
    return [torch.allclose(found, whole / 2) for found, whole in pairs]


@pytest.mark.parametrize(
    "go_backward", [two_losses_of_one_forward, three_forwards_before_the_first_backward]
)
def test_backwards_without_a_forward_of_their_own(
    spawn: Spawn, go_backward: Callable[[nn.Module, Tensor, int], None]
) -> None:
    """Groups are complete at different moments on ranks that use different parameters."""
    assert spawn(different_heads_in_several_backwards, 2, go_backward) == [[True] * 8] * 2


class RankedExperts(nn.Module):
    """A layer of more than 1 MiB; a forward uses an expert of it, all (None), or nothing (-1)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.wide = nn.Linear(5, 60_000)

    def forward(self, x: Tensor, chosen: int | None) -> Tensor:
        if chosen == -1:
            return 2 * x
        experts = self.experts if chosen is None else [self.experts[chosen]]
        y = torch.stack([expert(x) for expert in experts]).sum(0) + self.wide(x)[:, :5]
        return x + torch.tanh(y)


class ExpertLayers(nn.Module):
    """Layers whose experts are chosen by the rank; with ends, between parameters of the root.

    `chosen` is the choice of all layers, or a list with one for each.
    """

    def __init__(self, has_ends: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5) if has_ends else nn.Identity()
        self.layers = nn.ModuleList(RankedExperts() for _ in range(3))
        self.last = nn.Linear(5, 1) if has_ends else nn.Identity()

    def forward(self, x: Tensor, chosen: int | list[int | None] | None) -> Tensor:
        x = self.first(x)
        choices = chosen if isinstance(chosen, list) else [chosen] * len(self.layers)
        for layer, choice in zip(self.layers, choices, strict=True):
            x = layer(x, choice)
        return self.last(x).mean()


def choice_of(rank: int) -> int | None:
    return rank or None


def detached_target(model: nn.Module, x: Tensor, rank: int) -> None:
    target = model(x + 1, choice_of(rank)).detach()
    (model(x, choice_of(rank)) - target).square().backward()


def two_forwards_before_two_backwards(model: nn.Module, x: Tensor, rank: int) -> None:
    losses = [model(x + index, choice_of(rank)) for index in range(2)]
    for loss in losses:
        loss.sin().backward()


def a_product_of_two_forwards(model: nn.Module, x: Tensor, rank: int) -> None:
    (model(x, choice_of(rank)) * model(x + 1, 1 + rank)).backward()


def a_product_of_two_forwards_twice(model: nn.Module, x: Tensor, rank: int) -> None:
    """The second backward goes through the retained graph."""
    loss = model(x, choice_of(rank)) * model(x + 1, 1 + rank)
    loss.backward(retain_graph=True)
    loss.backward()


def nothing_used_before_a_forward_without_input_gradients(
    model: nn.Module, x: Tensor, rank: int
) -> None:
    """All gradients of the first layer have come on one rank before backward is done with it."""
    loss = model(x.clone().requires_grad_(), -1 if rank else None) + model(x + 1, None)
    loss.backward(retain_graph=True)
    loss.backward()


def the_first_layer_twice(model: nn.Module, x: Tensor, rank: int) -> None:
    """The layer's first forward has inputs that require no gradients; autograd reports no exit."""
    (model.layers[0](x, choice_of(rank)).mean() * model(x, choice_of(rank))).backward()


def a_kept_output_of_a_later_forward(model: nn.Module, x: Tensor, rank: int) -> None:
    """The later forward has inputs that require no gradients, and never goes backward."""
    loss = model(x, choice_of(rank))
    kept = model.layers[2](x, None)
    loss.backward()
    assert kept.requires_grad


def nothing_used_of_the_last_layer(model: nn.Module, x: Tensor, rank: int) -> None:
    """On one rank no gradient has come when backward leaves the layer."""
    model(x, [None, None, -1 if rank else None]).backward()


def experts_of_ranks(
    go_backward: Callable[[nn.Module, Tensor, int], None], has_ends: bool
) -> Differences:
    torch.manual_seed(0)
    plain = ExpertLayers(has_ends).double()
    model = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for batches in torch.randn(2, 2, 3, 5, dtype=torch.float64):
        for rank, batch in enumerate(batches):
            go_backward(plain, batch, rank)
        go_backward(model, batches[dist.get_rank()], dist.get_rank())
    assert model.memory_stats()["unsharded_nbytes"] == 0
    found, expected = full_grads(model), full_grads(plain)
    assert found.keys() == expected.keys()
    return {name: (found[name] - grad / 2).abs().max().item() for name, grad in expected.items()}


@pytest.mark.parametrize(
    ("go_backward", "has_ends"),
    [
        (detached_target, True),
        (two_forwards_before_two_backwards, True),
        (a_product_of_two_forwards, True),
        (a_product_of_two_forwards_twice, True),
        (nothing_used_before_a_forward_without_input_gradients, False),
        (the_first_layer_twice, False),
        (a_kept_output_of_a_later_forward, True),
        (nothing_used_of_the_last_layer, False),
    ],
)
def test_layers_of_which_ranks_use_different_parameters_while_other_forwards_wait(
    spawn: Spawn, go_backward: Callable[[nn.Module, Tensor, int], None], has_ends: bool
) -> None:
    """Whether a layer is complete must not depend on the gradients that came on this rank."""
    for differences in spawn(experts_of_ranks, 2, go_backward, has_ends):
        assert max(differences.values()) < 1e-12


def unused_group(ranks: Ranks) -> list[bool]:
    model, _ = sharded_and_plain(ranks, "unused")
    case = CASES["unused"]
    case.loss(model, ranks.batch(case, 0)).backward()
    return [
        parameter.grad is None
        for name, parameter in model.named_parameters()
        if name.startswith("unused")
    ]


@on_meshes((2,))
def test_a_group_unused_everywhere_keeps_none(run: Run) -> None:
    assert all(found == [True, True] for found in run(unused_group))


# --- freezing -----------------------------------------------------------------------------------


def frozen_before_trainable(ranks: Ranks, reshard_after_forward: bool | None) -> Differences:
    """Backward needs the frozen weight after the last gradient of its group has arrived."""
    plain = nn.Sequential(*(half_frozen_group() for _ in range(3)), nn.Linear(7, 5))
    model = ranks.put(plain)
    for layer in model[:-1]:
        fully_shard(layer, ranks.mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, ranks.mesh, reshard_after_forward=reshard_after_forward)
    differences = compare_one_backward(
        ranks, model, plain, lambda each, batch: CASES["mlp"].loss(each, batch).backward()
    )
    return differences | compare_later_training(ranks, model, plain)


def half_frozen_group() -> nn.Sequential:
    """Make a group of a frozen linear layer and, after it, a trainable one."""
    group = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7))
    group[0].requires_grad_(requires_grad=False)
    return group


@on_meshes((2,))
def test_a_frozen_linear_before_a_trainable_layer_of_its_group(run: Run) -> None:
    found = run.each(MODES, frozen_before_trainable)
    assert_each_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def freeze_and_thaw(ranks: Ranks) -> Differences:
    model, plain = sharded_and_plain(ranks)
    differences = Differences()
    for frozen in (True, False, True):
        for each in (model, plain):
            each.zero_grad()
            each.layers[1].requires_grad_(requires_grad=not frozen)
        differences |= compare_one_backward(
            ranks, model, plain, lambda each, batch: CASES["mlp"].loss(each, batch).backward()
        )
    return differences


@on_meshes((2,))
def test_layers_frozen_and_thawed_after_sharding(run: Run) -> None:
    assert_same_gradients(run(freeze_and_thaw))


def freeze_amid_accumulation(ranks: Ranks) -> Differences:
    """What was not synced when a layer was frozen comes with the next synced backward."""
    model, plain = sharded_and_plain(ranks)
    case = CASES["mlp"]
    for batch in ranks.rank_batches(case, 7):
        case.loss(plain, batch).backward()
    with model.no_sync():
        case.loss(model, ranks.batch(case, 7)).backward()
    for each in (model, plain):
        each.layers[1].requires_grad_(requires_grad=False)
    differences = compare_one_backward(
        ranks, model, plain, lambda each, batch: case.loss(each, batch).backward()
    )
    assert model.memory_stats()["unsynced_grad_nbytes"] == 0
    return differences


@on_meshes((2,), (2, 2), xla=())
def test_layers_frozen_amid_accumulation(run: Run) -> None:
    assert_same_gradients(run(freeze_amid_accumulation))
