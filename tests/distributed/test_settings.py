"""Everything that can be chosen for a group trains as plain training does."""

from __future__ import annotations

import copy
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from custom_collectives import Gather, Scatter
from models import CASES
from parity import Ranks, Run, compare_training, on_meshes
from reference import (
    STEPS,
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
    make_mesh,
    my_batch,
    shard,
)
from shardkit import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    StateError,
    fully_shard,
)
from shardkit._compat import torch_fsdp2
from shardkit.optim import LocalOptimizer, MatrixOptimizer
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Callable


TOLERANCE = 1e-6


# --- what leaves the numbers as they are --------------------------------------------------------


def sharded_children(model: nn.Module) -> list[FSDPModule]:
    return [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]


def prefetch_two(model: typing.Any) -> None:
    layers = sharded_children(model)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])


def prefetch_nothing(model: typing.Any) -> None:
    model.set_prefetch_policy(forward=False, backward="none")


def prefetch_late(model: typing.Any) -> None:
    model.set_prefetch_policy(backward="post")


def keep_after_backward(model: typing.Any) -> None:
    model.set_reshard_after_backward(False)


def many_buffers(model: typing.Any) -> None:
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_force_sum_reduction_for_comms(True)


def skip_unused(model: typing.Any) -> None:
    model.set_reduce_scatter_unused_params(False)


def custom_collectives(model: typing.Any) -> None:
    for module in [model, *sharded_children(model)]:
        # What is set later counts: buffers of these objects.
        module.set_allocate_memory_from_process_group_for_comm(True)
        module.set_custom_all_gather(Gather())
        module.set_custom_reduce_scatter(Scatter())


SETTINGS = {
    choose.__name__: choose
    for choose in (
        prefetch_two,
        prefetch_nothing,
        prefetch_late,
        keep_after_backward,
        many_buffers,
        skip_unused,
    )
}


def train_with_setting(ranks: Ranks, name: str, choose: Callable[[nn.Module], None]) -> Differences:
    case = CASES[name]
    reference = case.make()
    model = ranks.shard(case, reference)
    choose(model)
    return compare_training(case, model, reference, ranks=ranks)


@on_meshes((2,), (2, 2), xla=[(4,)])
def test_settings_leave_the_numbers_as_they_are(run: Run) -> None:
    assert_each_within(run.each(SETTINGS, train_with_setting, "mlp"), **TRAINED)


@on_meshes((2, 2), xla=())  # To save time.
def test_settings_leave_the_numbers_of_gpt_as_they_are(run: Run) -> None:
    assert_each_within(run.each(SETTINGS, train_with_setting, "gpt"), **TRAINED)


def train_with_custom_collectives(ranks: Ranks, name: str) -> Differences:
    Gather.calls = Scatter.calls = 0
    differences = train_with_setting(ranks, name, custom_collectives)
    groups = len(list(CASES[name].groups(CASES[name].make())))
    assert Scatter.calls == STEPS * (groups + (name == "gpt"))  # The MLP's root has no parameters.
    assert Gather.calls > Scatter.calls
    return differences


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@on_meshes((2,), (2, 2), xla=())  # They take process groups.
def test_custom_collectives_leave_the_numbers_as_they_are(run: Run, name: str) -> None:
    assert_within(run(train_with_custom_collectives, name), **TRAINED)


# --- symmetric memory -----------------------------------------------------------------------------


class MadeFor:
    """As FSDP2's collectives out of symmetric memory: each is made for one group of ranks."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        assert backend == "NCCL"
        dist.barrier(group)
        made.append((type(self), group))
        self._group = group

    def __call__(self, *args: typing.Any, group: typing.Any, **options: typing.Any) -> typing.Any:
        assert group is self._group
        return super().__call__(*args, group=group, **options)  # type: ignore[misc]


class GatherFor(MadeFor, Gather):
    pass


class ScatterFor(MadeFor, Scatter):
    pass


made: list[tuple[type, dist.ProcessGroup]] = []


@on_ranks(2)
def test_symmetric_memory_is_set_up_where_it_is_used() -> None:
    case, mesh = CASES["mlp"], make_mesh((2,))
    reference = case.make()
    model: typing.Any = fully_shard(copy.deepcopy(reference), mesh)

    def choose(max_bytes: int, expected: list[type]) -> None:
        made.clear()
        model.set_symm_mem_for_comm(max_bytes=max_bytes)
        assert [kind for kind, _ in made] == expected

    with mock.patch.object(torch_fsdp2, "symmetric_kinds", return_value=[GatherFor, ScatterFor]):
        choose(0, [])
        choose(1 << 20, [GatherFor])
        model.set_force_sum_reduction_for_comms(True)
        choose(1 << 20, [GatherFor, ScatterFor])
        differences = compare_training(case, model, reference)
        # Reductions have a group of their own on gloo.
        assert [kind for kind, _ in made] == [GatherFor, ScatterFor, ScatterFor]
        choose(0, [])
        calls = Gather.calls
        case.loss(model, my_batch(case, 0)).backward()
        assert Gather.calls == calls
        model.set_custom_all_gather(Gather())
        with pytest.raises(StateError, match="communicates by functions of yours"):
            model.set_symm_mem_for_comm()
    assert_within([differences], **TRAINED)


class Partly(nn.Module):
    """A small parameter, all of which the first rank has, before a large one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(2, 2))
        self.large = nn.Parameter(torch.ones(20, 20), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.small).sum() * self.large.mean()


@pytest.mark.parametrize("wrapper", [LocalOptimizer, MatrixOptimizer])
@on_ranks(2)
def test_what_is_kept_after_backward_is_gathered_again_on_all_ranks(
    wrapper: type[LocalOptimizer | MatrixOptimizer],
) -> None:
    """Also on a rank that has nothing of the parameters that the optimizer stepped."""
    model: typing.Any = fully_shard(Partly(), make_mesh((2,)))
    model.set_reshard_after_backward(False)
    optimizer = wrapper(model.parameters(), torch.optim.SGD, lr=0.25)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 2))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == [4.0, 3.0, 2.0]


def train_with_options(name: str, options: dict[str, typing.Any]) -> Differences:
    case = CASES[name]
    reference = case.make()
    mesh = make_mesh((dist.get_world_size(),))
    model = shard(case, copy.deepcopy(reference), mesh, **options)
    return compare_training(case, model, reference)


def shard_dim_one(parameter: nn.Parameter) -> typing.Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.ndim > 1 else None


OPTIONS: dict[str, dict[str, typing.Any]] = {
    "over 2 of 4": {"reshard_after_forward": 2},
    "over all": {"reshard_after_forward": 4},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, not pinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "placement": {"shard_placement_fn": shard_dim_one},
}


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_options_leave_the_numbers_as_they_are(spawn: Spawn, name: str) -> None:
    assert_each_within(spawn_each(spawn, OPTIONS, train_with_options, 4, name), **TRAINED)


def train_over_one() -> Differences:
    with pytest.warns(UserWarning, match="keeps whole parameters"):
        return train_with_options("mlp", {"reshard_after_forward": 1})


def test_over_one_rank_is_a_warning_and_keeps_whole_parameters(spawn: Spawn) -> None:
    assert_within(spawn(train_over_one, 2), **TRAINED)


# --- what changes them --------------------------------------------------------------------------


def double(gradients: Tensor) -> None:
    gradients.mul_(2)


def grads_with(ranks: Ranks, change: str) -> tuple[Differences, int]:
    """Compare gradients with the reference's, times what the setting makes of them."""
    case = CASES["mlp"]
    reference = case.make()
    model = ranks.shard(case, reference)
    factor, calls = 2.0, []
    for module in [model, *sharded_children(model)]:
        if change == "divide":
            module.set_gradient_divide_factor(ranks.world_size / 2)
        else:

            def hook(gradients: Tensor) -> None:
                calls.append(gradients.shape)
                double(gradients)

            module.set_all_reduce_hook(hook)
    case.loss(model, ranks.batch(case, 0)).backward()
    case.loss(reference, ranks.global_batch(case, 0)).backward()
    for parameter in reference.parameters():
        parameter.grad *= factor
    differences = Differences()
    differences.note_grads(model, reference)
    return differences, len(calls)


@pytest.mark.parametrize("change", ["divide", "hook"])
@on_meshes((1,), (2,), (2, 2))
def test_factors_and_hooks_reach_every_gradient(run: Run, change: str) -> None:
    found = run(grads_with, change)
    assert_within([differences for differences, _ in found], grad=TOLERANCE)
    groups = len(list(CASES["mlp"].groups(CASES["mlp"].make())))
    assert all(calls == (groups if change == "hook" else 0) for _, calls in found), found


def micro_batches(ranks: Ranks, is_last: list[bool]) -> Differences:
    """Sync every micro-batch; only some are told to be the last one."""
    case = CASES["mlp"]
    reference = case.make()
    model = ranks.shard(case, reference)
    differences = Differences()
    for _ in range(2):
        for i, last in enumerate(is_last):
            model.set_is_last_backward(last)
            case.loss(model, ranks.batch(case, i)).backward()
            case.loss(reference, ranks.global_batch(case, i)).backward()
        differences.note_grads(model, reference)
    return differences


@pytest.mark.parametrize("is_last", [[False, False, True], [True, False, True]], ids=str)
@on_meshes((2,))
def test_a_backward_that_is_not_the_last_is_finished_by_it(run: Run, is_last: list[bool]) -> None:
    assert_within(run(micro_batches, is_last), grad=4 * TOLERANCE)


# --- frozen reads -------------------------------------------------------------------------------


@on_ranks(2)
def test_an_embedding_need_not_be_gathered_in_backward() -> None:
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4))
    model = copy.deepcopy(reference)
    mesh = make_mesh((dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    model[0].set_unshard_in_backward(False)
    differences = Differences()
    for step in range(3):
        parts = [
            torch.randint(11, (5,), generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(dist.get_world_size())
        ]
        model(parts[dist.get_rank()]).square().mean().backward()
        reference(torch.cat(parts)).square().mean().backward()
        differences.note_grads(model, reference)
    assert_within([differences], grad=TOLERANCE)


# --- sums that wait for an all-reduce -----------------------------------------------------------


class Either(nn.Module):
    """Uses both layers or the second one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        return self.second(self.first(x) if both else x)


def either_on_copies() -> tuple[nn.Module, typing.Any]:
    """Return the model, plain and on a hybrid mesh."""
    torch.manual_seed(2)
    plain = Either()
    model = copy.deepcopy(plain)
    mesh = make_mesh((2, 2))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh)
    return plain, model


@on_ranks(4)
def test_sums_that_wait_are_reduced_although_nobody_uses_the_group() -> None:
    """The group that has sums waiting is not used by the micro-batch that all-reduces."""
    reference, model = either_on_copies()
    differences = Differences()
    for step in range(2):
        for micro, both in enumerate((True, False)):
            model.set_requires_all_reduce(micro == 1)
            xs = [torch.full((2, 4), float(rank + micro + step)) for rank in range(4)]
            model(xs[dist.get_rank()], both=both).square().mean().backward()
            reference(torch.cat(xs), both=both).square().mean().backward()
        differences.note_grads(model, reference)
        model.zero_grad()
        reference.zero_grad()
    assert_within([differences], grad=1e-5)


@on_ranks(4)
def test_syncing_again_also_reduces_over_copies_again() -> None:
    """As in FSDP2: a step that waits by one setter may end by the other."""
    reference, model = either_on_copies()
    differences = Differences()
    for step in range(2):
        for micro in range(3):
            if micro == 2:
                model.set_requires_gradient_sync(requires_gradient_sync=True)
            else:
                model.set_requires_gradient_sync(micro == step)
                model.set_requires_all_reduce(requires_all_reduce=False)
            xs = [torch.full((2, 4), float(rank + micro + step)) for rank in range(4)]
            model(xs[dist.get_rank()], both=True).square().mean().backward()
            reference(torch.cat(xs), both=True).square().mean().backward()
            assert all((p.grad is None) == (micro < 2) for p in model.parameters())
        differences.note_grads(model, reference)
        model.zero_grad()
        reference.zero_grad()
    assert_within([differences], grad=1e-5)


def sum_in_bf16(mesh_shape: tuple[int, int]) -> float:
    """Return the largest relative error of gradients that waited as partial sums.

    Against sums in fp64 of gradients that were rounded to bf16 one by one. They are small beside
    their sum: added up in bf16 it would stay at 32, half of what it should be.
    """
    num_micro = 500
    mesh = make_mesh(mesh_shape)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(6, 8, bias=False), mesh, mp_policy=policy)
    world_size = dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    xs = torch.rand(num_micro, world_size, 1, 6, generator=generator) * 0.02 + 0.1
    for micro, by_rank in enumerate(xs):
        model.set_requires_all_reduce(micro == num_micro - 1)
        model(by_rank[dist.get_rank()]).sum().backward()
    rounded = xs.bfloat16().double().sum(dim=(0, 1, 2)) / world_size
    found = model.weight.grad.full_tensor().double()
    return float(((found - rounded) / rounded).abs().max())


@pytest.mark.parametrize(("world_size", "mesh_shape"), [(2, (2, 1)), (4, (2, 2))])
def test_sums_that_wait_for_an_all_reduce_are_not_rounded(
    spawn: Spawn, world_size: int, mesh_shape: tuple[int, int]
) -> None:
    """The whole sum is, once before the wire and once by the sum on it: by 2 ** -8 each."""
    assert max(spawn(sum_in_bf16, world_size, mesh_shape)) <= 2**-7
