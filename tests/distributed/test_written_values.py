"""What ranks write to parameters by loads and resets is compared, and never what is right."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import math
import re
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import make_mesh
from shardkit import RankMismatchError, checkpoint, fully_shard, summon_full_params
from shardkit.optim import LocalOptimizer
from workers import Spawn, in_each

if typing.TYPE_CHECKING:
    Change = typing.Callable[[typing.Any], None]

pytestmark = pytest.mark.helpers


class Block(nn.Module):
    """Two layers, of which one begins as vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def reset(self) -> None:
        nn.init.trunc_normal_(self.up.weight)
        self.down.weight.data.normal_(std=0.1)
        nn.init.zeros_(self.up.bias)
        self.down.bias.data.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


def sharded(mesh_shape: tuple[int, ...], *, on_meta: bool = False) -> typing.Any:
    with torch.device("meta" if on_meta else "cpu"):
        model = blocks()
    mesh = make_mesh(mesh_shape)
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_alone(model: typing.Any) -> None:
    if dist.get_rank() == 0:
        model.load_state_dict(blocks(1).state_dict())


def load_others(model: typing.Any) -> None:
    model.load_state_dict(blocks(dist.get_rank()).state_dict())


def assign_others(model: typing.Any) -> None:
    model.load_state_dict(blocks(dist.get_rank()).state_dict(), assign=True)


def reset_by_other_seeds(model: typing.Any) -> None:
    torch.manual_seed(dist.get_rank())
    for block in model[:2]:
        block.reset()


def reset_a_row_alone(model: typing.Any) -> None:
    with torch.no_grad():
        if dist.get_rank() == 1:
            model[1].up.weight[0].zero_()


def load_a_file_alone(model: typing.Any) -> None:
    if dist.get_rank() == 0:
        checkpoint.load_full(dict(blocks(1).state_dict()), model)


def load_other_files(model: typing.Any) -> None:
    checkpoint.load_full(dict(blocks(dist.get_rank()).state_dict()), model)


def summon_others(model: typing.Any) -> None:
    with summon_full_params(model):
        nn.init.constant_(model[0].up.weight, dist.get_rank())


def scale_alone(model: typing.Any) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].up.weight.mul_(2)


def clamp_a_list_alone(model: typing.Any) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            torch._foreach_clamp_max_(list(model[0].parameters()), 0.01)


WRONG = {
    each.__name__: each
    for each in (
        scale_alone,
        clamp_a_list_alone,
        load_alone,
        load_others,
        assign_others,
        reset_by_other_seeds,
        reset_a_row_alone,
        load_a_file_alone,
        load_other_files,
        summon_others,
    )
}


def load_all(model: typing.Any) -> None:
    model.load_state_dict(blocks(1).state_dict())


def reset_all(model: typing.Any) -> None:
    torch.manual_seed(7)
    for block in model[:2]:
        block.reset()
        with torch.no_grad():
            block.up.weight[0].zero_()
            block.up.weight.mul_(2)


def other_seeds_and_then_load_all(model: typing.Any) -> None:
    reset_by_other_seeds(model)
    load_all(model)


def other_seeds_and_then_pieces(model: typing.Any) -> None:
    """As what loads checkpoints does."""
    reset_by_other_seeds(model)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(0.1)


def load_twice_on_one_rank(model: typing.Any) -> None:
    load_alone(model)
    load_all(model)


def load_on_one_replica(model: typing.Any) -> None:
    mesh = model[0].up.weight.device_mesh
    if mesh.ndim == 1 or mesh.get_local_rank(0) == 0:
        load_all(model)


def send_from_first_replica(model: typing.Any) -> None:
    """Torch's collectives write to pieces, and raise no version counter."""
    mesh = model[0].up.weight.device_mesh
    if mesh.ndim > 1:
        group = mesh.get_group(0)
        for param in model.parameters():
            dist.broadcast(param.to_local(), dist.get_global_rank(group, 0), group)


def load_on_one_replica_and_send(model: typing.Any) -> None:
    load_on_one_replica(model)
    send_from_first_replica(model)


def write_where_there_are_pieces(model: typing.Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.to_local().numel():
                param.copy_(torch.full(param.shape, 0.1))


def load_one_file(model: typing.Any) -> None:
    checkpoint.load_full(dict(blocks(1).state_dict()), model)


def load_the_first_ranks_file(model: typing.Any) -> None:
    state = dict(blocks(1).state_dict()) if dist.get_rank() == 0 else None
    checkpoint.load_full(state, model, broadcast_from_rank0=True)


def look_at_wholes(model: typing.Any) -> None:
    with summon_full_params(model):
        sum(param.sum() for param in model.parameters())


@torch.no_grad()
def update_by_hand(model: typing.Any) -> None:
    for param in model.parameters():
        param.sub_(param, alpha=0.01)
    torch._foreach_add_(list(model.parameters()), 0.01)


@torch.no_grad()
def scale_where_there_are_pieces(model: typing.Any) -> None:
    for param in model.parameters():
        if param.to_local().numel():
            param.mul_(0.9)


def step_another_optimizer(model: typing.Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    step(model, optimizer)


def step_that_raises_before_it_is_right(model: typing.Any) -> None:
    """The end of the first one is never told."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with contextlib.suppress(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    step(model, optimizer)
    update_by_hand(model)


RIGHT = {
    each.__name__: each
    for each in (
        update_by_hand,
        scale_where_there_are_pieces,
        load_all,
        reset_all,
        other_seeds_and_then_load_all,
        other_seeds_and_then_pieces,
        load_twice_on_one_rank,
        load_on_one_replica_and_send,
        write_where_there_are_pieces,
        load_one_file,
        load_the_first_ranks_file,
        look_at_wholes,
    )
}
RIGHT_IN_TRAINING = {
    each.__name__: each for each in (step_another_optimizer, step_that_raises_before_it_is_right)
}


def train(
    mesh_shape: tuple[int, ...], when: int, on_meta: bool, foreach: bool, change: Change
) -> int:
    """Train; change values before a step; return how many steps were taken."""
    model = sharded(mesh_shape, on_meta=on_meta)
    if on_meta:
        model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=foreach)
    taken = 0
    for number in range(4):
        if number == when:
            change(model)
        step(model, optimizer)
        taken += 1
    return taken


def mismatch(mesh_shape: tuple[int, ...], when: int, change: Change) -> str:
    """Return what ranks are told that train after a change that is wrong."""
    with pytest.raises(RankMismatchError) as caught:
        train(mesh_shape, when, False, True, change)
    return str(caught.value)


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_what_was_not_written_alike_is_an_error(
    spawn: Spawn, shape: tuple[int, ...], when: int
) -> None:
    for told in spawn(in_each, math.prod(shape), WRONG, mismatch, shape, when, timeout_s=120):
        for change, message in told.items():
            assert "ranks hold different values: parameter" in message, change
            # The first one in the model of which both ranks have pieces.
            of_block = "1" if change == "reset_a_row_alone" else "0"
            assert re.search(rf"'{of_block}\.(up|down)\.weight'", message), (change, message)


def test_what_one_replica_alone_was_given_is_an_error(spawn: Spawn) -> None:
    for when in (0, 2):
        for message in spawn(mismatch, 4, (2, 2), when, load_on_one_replica):
            assert "parameter '0.up.weight'" in message


def train_replicas_of_other_seeds(sends: bool) -> int:
    """Begin with other values on each replica; return how many steps were taken."""
    mesh = make_mesh((2, 2))
    model: typing.Any = blocks(mesh.get_local_rank(0))
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if sends:
        send_from_first_replica(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer)
    return 3


def test_the_first_replica_may_send_its_values_to_the_others(
    spawn: Spawn, spawn_errors: Spawn
) -> None:
    assert spawn(train_replicas_of_other_seeds, 4, True) == [3] * 4
    for error in spawn_errors(train_replicas_of_other_seeds, 4, False):
        assert error is not None
        assert "ranks hold different values: parameter" in error.message


@pytest.mark.parametrize(
    ("shape", "when", "on_meta", "foreach"),
    [
        ((2,), 0, False, False),
        ((2,), 2, False, True),
        ((2, 2), 2, False, False),
        ((4,), 0, True, True),
    ],
    ids=str,
)
def test_what_is_right_passes(
    spawn: Spawn, shape: tuple[int, ...], when: int, on_meta: bool, foreach: bool
) -> None:
    changes, call = RIGHT | RIGHT_IN_TRAINING, (train, shape, when, on_meta, foreach)
    for taken in spawn(in_each, math.prod(shape), changes, *call, timeout_s=120):
        assert taken == dict.fromkeys(changes, 4)


@pytest.mark.parametrize("change", ["load_alone", "reset_by_other_seeds"])
def test_a_model_from_meta(spawn_errors: Spawn, change: str) -> None:
    for error in spawn_errors(begin_on_meta, 2, change):
        assert error is not None
        assert "ranks hold different values: parameter" in error.message


def begin_on_meta(change: str) -> None:
    model = sharded((2,), on_meta=True)
    model.to_empty(device="cpu")
    WRONG[change](model)
    model(torch.randn(4, 6))


# --- forwards without a backward ------------------------------------------------------------------


def infer(mesh_shape: tuple[int, ...], num_before: int, change: Change) -> int:
    """Train a step, run forwards without gradients, change values; return how many ran after."""
    model = sharded(mesh_shape)
    model.set_reshard_after_forward(True, recurse=False)
    step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    ran = 0
    with torch.no_grad():
        for _ in range(num_before):
            model(torch.randn(4, 6))
        change(model)
        with contextlib.suppress(RankMismatchError):
            for _ in range(2 * num_before):
                model(torch.randn(4, 6))
                ran += 1
            return -1
        load_all(model)
        for _ in range(4):
            model(torch.randn(4, 6))
    return ran


def test_what_was_not_written_alike_is_found_without_a_backward(spawn: Spawn) -> None:
    changes = {each.__name__: each for each in (load_alone, load_others, reset_a_row_alone)}
    for shape, num_before, num_after in (((2,), 1, 0), ((2, 2), 1, 0), ((2,), 5, 2)):
        for ran in spawn(in_each, math.prod(shape), changes, infer, shape, num_before):
            assert ran == dict.fromkeys(changes, num_after)


def write_to_kept_memory_alone() -> None:
    model = sharded((2,))
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(4, 6))
        load_alone(model)
        for _ in range(5):
            model(torch.randn(4, 6))


def test_what_was_written_on_one_rank_is_gathered_on_one_rank(spawn_errors: Spawn) -> None:
    for error in spawn_errors(write_to_kept_memory_alone, 2):
        assert error is not None
        said = "rank 0: all-gather of the root, written since it was gathered"
        assert said in error.message, error.message
        assert "load, reset and update on all ranks" in error.message


def test_what_is_right_passes_without_a_backward(spawn: Spawn) -> None:
    for ran in spawn(in_each, 4, RIGHT, infer, (2, 2), 3, timeout_s=120):
        assert ran == dict.fromkeys(RIGHT, -1)


def average_on(
    ranks: typing.Collection[int], mesh_shape: tuple[int, ...], sends: bool
) -> list[str]:
    """Train, average weights on some ranks, and use the average; return what is warned of.

    With `sends` the first replica sends its pieces of the average to the others.
    """
    model = sharded(mesh_shape)
    model.set_reshard_after_forward(True, recurse=False)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            step(model, optimizer)
            with torch.no_grad():
                if dist.get_rank() in ranks:
                    for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                        ours.lerp_(theirs, 0.1)
                if sends:
                    send_from_first_replica(average)
                average(torch.randn(4, 6))
    return [str(each.message) for each in caught]


def test_an_average_that_one_rank_updates_is_told(spawn: Spawn) -> None:
    for world_size, shape in ((2, (2,)), (4, (2, 2))):
        first, *others = spawn(average_on, world_size, [0], shape, False)
        assert first
        assert "were updated on some ranks, and not on others" in first[0]
        assert not any(others)
        assert spawn(average_on, world_size, range(4), shape, False) == [[]] * world_size
    assert spawn(average_on, 4, [0, 1], (2, 2), False)[0]
    assert spawn(average_on, 4, [0, 1], (2, 2), True) == [[]] * 4


class WithUnusedFirst(nn.Module):
    """A layer beside parameters of the root, of which the first may be left out.

    Rank 0 of two has no element of the root's last layer, and rank 1 has all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, uses_first: bool) -> Tensor:
        x = self.layer(self.first(x) if uses_first else x)
        result: Tensor = self.last(x)
        return result


def train_without_first(foreach: bool) -> list[str]:
    """Train what one rank has no element of, by an optimizer; return what is warned of."""
    model = WithUnusedFirst()
    fully_shard(model.layer, mesh=make_mesh((2,)))
    fully_shard(model, mesh=make_mesh((2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            model(torch.randn(4, 6), False).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(4, 6), True)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_that_writes_nothing_on_one_rank_is_no_difference(
    spawn: Spawn, foreach: bool
) -> None:
    assert spawn(train_without_first, 2, foreach) == [[], []]


def comparisons_of_forwards(nums: typing.Sequence[int], reshards: bool) -> list[int]:
    """Run forwards without gradients, as many as `nums` says for a rank; return comparisons."""
    model = sharded((2,))
    model.set_reshard_after_forward(reshards)
    step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    used = model._shardkit_state.runtime.used  # noqa: SLF001
    counts = []
    kind = type(used._on_meshes[0])  # noqa: SLF001
    original = kind.send

    def count(self: typing.Any, *args: typing.Any) -> None:
        counts[-1] += 1
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kind, "send", count)
        for _ in range(nums[dist.get_rank()]):
            counts.append(0)
            model(torch.randn(4, 6))
    return counts


def test_forwards_are_compared_more_and_more_seldom(spawn: Spawn) -> None:
    for counts in spawn(comparisons_of_forwards, 2, (9, 9), True):
        assert counts == [1, 1, 0, 1, 0, 0, 0, 1, 0]


def test_of_memory_that_is_kept_ranks_may_make_unequal_numbers_of_forwards(spawn: Spawn) -> None:
    assert spawn(comparisons_of_forwards, 2, (3, 6), False) == [
        [1, 0, 0],
        [1, 0, 0, 0, 0, 0],
    ]


def exchanges_of_a_steady_loop() -> list[int]:
    """Train, writing in each step; return how often ranks exchanged anything, step by step."""
    model = sharded((2,))
    optimizer = torch.optim.AdamW(model.parameters())
    axis = model._shardkit_state.group.buckets[0].plan.axis  # noqa: SLF001
    counts = [0]
    original = type(axis).exchange

    def count(self: typing.Any, item: typing.Any) -> typing.Any:
        counts[-1] += 1
        return original(self, item)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(axis), "exchange", count)
        for number in range(30):
            step(model, optimizer)
            with torch.no_grad():
                model[0].up.weight[0].zero_()
                model[1].up.bias.clamp_(-1, 1)
                model[2].bias.copy_(torch.full((3,), float(number)))
            counts.append(0)
    return counts


def test_writes_alike_in_every_step_cost_no_exchange(spawn: Spawn) -> None:
    for counts in spawn(exchanges_of_a_steady_loop, 2):
        assert counts == [0] * 31


# --- optimizers, and what is saved ----------------------------------------------------------------


def leave_a_step_out(num_before: int) -> None:
    """Train; after so many steps rank 1 takes a micro-batch more, and others go on by a step."""
    model, other = sharded((2,)), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    of_other = torch.optim.SGD(other.parameters(), lr=0.01)
    for number in range(num_before + 1):
        model(torch.randn(4, 6)).square().mean().backward()
        if number < num_before or dist.get_rank() == 0:
            optimizer.step()
        other(torch.ones(2)).sum().backward()
        for _ in range(dist.get_rank()):  # It is no part of what is sharded.
            of_other.step()
    model(torch.randn(4, 6)).square().mean().backward()


@pytest.mark.parametrize("num_before", [2, 7, 20])
def test_a_micro_batch_more_is_told_in_the_next_backward(
    spawn_errors: Spawn, num_before: int
) -> None:
    for error in spawn_errors(leave_a_step_out, 2, num_before):
        assert error is not None
        assert error.type_name == "RankMismatchError", error.traceback
        assert "take as many micro-batches, and call step() as often" in error.message
        assert "leave_a_step_out" in error.traceback


def act_alone(what: str, mesh_shape: tuple[int, ...]) -> list[str]:
    """Train; do something on rank 0 only; return what is warned of."""
    model = sharded(mesh_shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    is_first = dist.get_rank() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            model(torch.randn(4, 6)).square().mean().backward()
            if is_first and what == "another rate" and number == 1:
                optimizer.param_groups[0]["lr"] = 0.02
            if is_first or what != "a step":
                optimizer.step()
            optimizer.zero_grad()
            saves = {
                "saves": is_first,
                "saves all": True,
                "one replica saves": dist.get_rank() < mesh_shape[-1],
            }
            if number == 1 and saves.get(what):
                torch.save(model.state_dict(), io.BytesIO())
            if what == "rates alike":
                optimizer.param_groups[0]["lr"] *= 0.5
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a step", r"AdamW took 1 step on position 0 .*, and 0 on position 1.*call step\(\)"),
        ("another rate", r"'0\.down\.bias'.* lr=0\.02,.* position 0 .* lr=0\.01,.* position 1"),
    ],
)
def test_optimizers_that_differ_are_named(spawn_errors: Spawn, what: str, said: str) -> None:
    for world_size, shape in ((2, (2,)), (4, (2, 2))):
        for error in spawn_errors(act_alone, world_size, what, shape):
            assert error is not None
            assert error.type_name == "RankMismatchError", error.traceback
            assert "optimizers differ between ranks" in error.message
        if world_size == 2:
            assert re.search(said, error.message), error.message


class OtherAdamW(torch.optim.AdamW):
    """A class of users, of which nobody knows whether its steps communicate."""


ELEMENTWISE: dict[str, typing.Any] = {
    "AdamW": torch.optim.AdamW,
    "by lists": functools.partial(torch.optim.AdamW, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "local": functools.partial(LocalOptimizer, optimizer_class=torch.optim.AdamW),
}
OTHERS: dict[str, typing.Any] = {"Adafactor": torch.optim.Adafactor, "a user's": OtherAdamW}


def list_in_another_order(name: str, num_first: int) -> list[float]:
    """List parameters of one shape as a set may, in another order on each rank.

    Return how far the parameters are from those of a plain model.
    """
    mesh = make_mesh((2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    plain = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh)
    params = list(model.parameters())
    first, others = params[:num_first], params[num_first:]
    listed = [*first, *(others if dist.get_rank() else reversed(others))]
    make = {**ELEMENTWISE, **OTHERS}[name]
    optimizers = [make(listed, lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)]
    for _ in range(3):
        x = torch.randn(4, 4)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [float((ours.full_tensor() - theirs).abs().max()) for ours, theirs in pairs]  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_first", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_parameters_in_another_order_are_told(
    spawn_errors: Spawn, name: str, num_first: int
) -> None:
    """Adafactor would take the sums of other parameters."""
    for error in spawn_errors(list_in_another_order, 2, name, num_first):
        assert error is not None
        assert error.type_name == "RankMismatchError", error.traceback
        assert "another order of them" in error.message


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_take_parameters_in_any_order(spawn: Spawn, name: str) -> None:
    for differences in spawn(list_in_another_order, 2, name, 0):
        assert max(differences) < 1e-6


def step_in_another_order() -> None:
    """Step an optimizer for each parameter, in the order of a set of them."""
    model = sharded((2,))
    params = list(model.parameters())
    optimizers = {param: torch.optim.AdamW([param], lr=0.01) for param in params}
    for _ in range(4):
        model(torch.randn(4, 6)).square().mean().backward()
        for param in params if dist.get_rank() == 0 else reversed(params):
            optimizers[param].step()
        model.zero_grad()


def test_optimizers_may_step_in_another_order(spawn: Spawn) -> None:
    spawn(step_in_another_order, 2)


def replace_optimizers(num_stages: int) -> None:
    """Train with a new optimizer in each stage; Python collects the old ones on rank 0 alone."""
    model = sharded((2,))
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_stages):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # It makes a cycle.
            for _ in range(2):
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            del optimizer, scheduler
            if dist.get_rank() == 0:
                gc.collect()
        model(torch.randn(4, 6)).square().mean().backward()
    finally:
        gc.enable()


def test_optimizers_may_end_at_another_time_on_each_rank(spawn: Spawn) -> None:
    spawn(replace_optimizers, 2, 4)


def test_pieces_that_one_rank_saves_are_told(spawn: Spawn) -> None:
    for said in spawn(act_alone, 2, "saves", (2,)):
        [text] = said
        assert "position 0 of the process group has pickled its shard" in text
        assert "save_full" in text


@pytest.mark.parametrize("what", ["nothing", "saves all", "one replica saves", "rates alike"])
def test_what_all_do_alike_is_not_told(spawn: Spawn, what: str) -> None:
    assert spawn(act_alone, 4, what, (2, 2)) == [[]] * 4
