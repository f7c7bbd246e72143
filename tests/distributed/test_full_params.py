"""Whole parameters for users, and what becomes of them: `summon_full_params`, `apply_full`."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel_models
from models import CASES, MLP, Parameters
from reference import full_parameters, make_mesh, my_batch, shard
from shardkit import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardedTensor,
    StateError,
    fully_shard,
    summon_full_params,
)
from workers import Spawn, in_each, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.helpers

MESHES = ((1,), (2,), (4,), (2, 2))
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


on_all_meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)


def plain_and_sharded(
    name: str, mesh: tuple[int, ...], **options: typing.Any
) -> tuple[nn.Module, typing.Any]:
    torch.manual_seed(0)
    plain = CASES[name].make()
    return plain, shard(CASES[name], copy.deepcopy(plain), make_mesh(mesh), **options)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Every name has the plain model's tensor, bit by bit, as a plain parameter."""
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for parameter_name, param in found.items():
        wanted = expected[parameter_name]
        assert type(param) is nn.Parameter, parameter_name
        assert param.dtype == wanted.dtype
        assert param.requires_grad == wanted.requires_grad
        assert torch.equal(param.cpu(), wanted), parameter_name


@torch.no_grad()
def assert_full_values(model: nn.Module, plain: nn.Module) -> None:
    expected = full_parameters(plain)
    for parameter_name, value in full_parameters(model).items():
        assert torch.equal(value, expected[parameter_name]), parameter_name


# --- what is shown --------------------------------------------------------------------------------


def show_and_hide(mesh: tuple[int, ...], name: str, **options: typing.Any) -> None:
    plain, model = plain_and_sharded(name, mesh, **options)
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for _ in range(2):  # Before the first forward and after a step.
        with summon_full_params(model):
            assert_same(model, plain)
            assert model.state_dict().keys() == plain.state_dict().keys()
            assert not any(isinstance(v, ShardedTensor) for v in model.state_dict().values())
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[key] is value for key, value in sharded.items())
        assert_full_values(model, plain)
        CASES[name].loss(model, my_batch(CASES[name], 0)).backward()
        model.zero_grad()


@on_all_meshes
@on_ranks("mesh")
def test_modules_hold_plain_whole_parameters_inside_and_the_sharded_ones_after(
    mesh: tuple[int, ...],
) -> None:
    names = ("gpt", "frozen", "tiny", "tied", "conv")
    in_each({name: name for name in names}, show_and_hide, mesh)


@on_ranks(2)
def test_values_are_those_of_the_shard_and_not_casts() -> None:
    show_and_hide((2,), "gpt", mp_policy=BF16)
    show_and_hide((2,), "gpt", offload_policy=CPUOffloadPolicy())
    show_and_hide((2,), "gpt", reshard_after_forward=False)


@on_ranks(2)
def test_buckets_of_several_dtypes() -> None:
    torch.manual_seed(0)
    plain = Parameters()
    for i, dtype in enumerate((torch.bfloat16, torch.float64, torch.complex64, torch.int32)):
        values = torch.randn(5, 3).mul(9).to(dtype)
        grad = dtype != torch.int32
        plain.register_parameter(f"other{i}", nn.Parameter(values, requires_grad=grad))
    model = fully_shard(copy.deepcopy(plain), make_mesh((2,)))
    with summon_full_params(model):
        assert_same(model, plain)


@on_ranks(2)
def test_attributes_of_parameters_are_there() -> None:
    _, model = plain_and_sharded("mlp", (2,))
    model.layers[0].weight.note = "mine"
    with summon_full_params(model):
        assert model.layers[0].weight.note == "mine"
        assert not hasattr(model.layers[1].weight, "note")


@on_ranks(2)
def test_modules_inside_and_modules_that_are_not_sharded() -> None:
    plain, model = plain_and_sharded("gpt", (2,))
    with summon_full_params(model, recurse=False):
        assert type(model.positions) is nn.Parameter
        assert model.head.weight is model.tokens.weight
        assert isinstance(model.blocks[0].fc1.weight, ShardedTensor)
    with summon_full_params(model.blocks[1]):  # Not the root.
        assert_same(model.blocks[1], plain.blocks[1])
        assert isinstance(model.blocks[0].fc1.weight, ShardedTensor)
        assert isinstance(model.positions, ShardedTensor)
    with summon_full_params(model.blocks):  # Not sharded itself.
        assert_same(model.blocks, plain.blocks)
    with summon_full_params(model.blocks, recurse=False):
        assert_same(model.blocks, plain.blocks)
    with (
        pytest.raises(StateError, match=r"'weight' was sharded together with .* around this L"),
        summon_full_params(model.head),
    ):
        pass
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for module in (*layers, layers):  # The root has nothing left.
        fully_shard(module, make_mesh((2,)))
    with summon_full_params(layers, recurse=False):
        assert all(type(param) is nn.Parameter for param in layers.parameters())


@on_all_meshes
@on_ranks("mesh")
def test_only_rank_0_gets_them(mesh: tuple[int, ...]) -> None:
    plain, model = plain_and_sharded("gpt", mesh)
    with summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert_same(model, plain)
            assert all(param.device.type == "cpu" for param in model.parameters())
        else:
            assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    assert_full_values(model, plain)


# --- writing back ---------------------------------------------------------------------------------


def write(mesh: tuple[int, ...], name: str, **options: typing.Any) -> None:
    plain, model = plain_and_sharded(name, mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    case = CASES[name]
    for step, (mine, theirs) in enumerate([(model, plain)] * 2):
        with summon_full_params(mine), torch.no_grad():
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                a.data.mul_(1.5)  # Past the version counter.
                a.add_(0.25)
                b.mul_(1.5).add_(0.25)
        assert_full_values(model, plain)
        batch = my_batch(case, step)
        for each, by in ((model, optimizer), (plain, reference)):
            case.loss(each, batch).backward()
            by.zero_grad()


@on_all_meshes
@on_ranks("mesh")
def test_what_was_written_is_kept(mesh: tuple[int, ...]) -> None:
    in_each({name: name for name in ("gpt", "frozen", "tiny", "tied")}, write, mesh)


@on_ranks(2)
def test_what_was_written_is_kept_with_other_options() -> None:
    write((2,), "gpt", mp_policy=BF16)
    write((2,), "gpt", offload_policy=CPUOffloadPolicy())
    write((2,), "gpt", reshard_after_forward=False)


@on_ranks(2)
def test_the_next_forward_uses_what_was_written() -> None:
    """What was gathered from the old values is not used again."""
    plain, model = plain_and_sharded("mlp", (2,))
    x = torch.ones(2, 7)
    for layer in model.layers:
        layer.unshard()
    with summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert torch.equal(model(x), torch.zeros(2, 5))
    with summon_full_params(model), torch.no_grad():
        for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            param.copy_(wanted)
    assert torch.equal(model(x), plain(x))


def each_its_own(mesh: tuple[int, ...]) -> list[Tensor]:
    _, model = plain_and_sharded("mlp", mesh)
    with summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.fill_(dist.get_rank())
    return [param.to_local().clone() for param in model.parameters()]


def test_each_rank_keeps_its_own_piece_of_its_own_values(spawn: Spawn) -> None:
    for rank, pieces in enumerate(spawn(each_its_own, 4, (2, 2))):
        assert all((piece == rank).all() for piece in pieces)


def leave_as_it_was(mesh: tuple[int, ...]) -> None:
    plain, model = plain_and_sharded("frozen", mesh)
    with summon_full_params(model, writeback=False), torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
            param.requires_grad_(False)
    assert_full_values(model, plain)
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.requires_grad == wanted.requires_grad


def test_without_writeback_nothing_is_kept(spawn: Spawn) -> None:
    spawn(leave_as_it_was, 1, (1,))
    spawn(leave_as_it_was, 2, (2,))


@on_ranks(2)
def test_parameters_that_were_replaced_are_taken_up_or_refused() -> None:
    plain, model = plain_and_sharded("gpt", (2,))
    before = model.tokens.weight
    new = torch.randn(before.shape)
    with summon_full_params(model):
        model.head.weight = nn.Parameter(new.clone())  # One of two names.
        model.blocks[0].fc1.bias.requires_grad_(False)
    assert model.tokens.weight is before
    assert torch.equal(model.head.weight.full_tensor(), new)
    assert not model.blocks[0].fc1.bias.requires_grad
    with (
        pytest.raises(StateError, match=r"'positions' of shape \(12, 32\) was replaced by a Param"),
        summon_full_params(model),
    ):
        model.positions = nn.Parameter(torch.zeros(3))
    with (
        pytest.raises(StateError, match=r"'positions' of shape \(12, 32\) .* of shape \(32,\)"),
        summon_full_params(model),
    ):
        model.positions.data = torch.zeros(32)
    plain.head.weight.data.copy_(new)
    assert_full_values(model, plain)  # And the sharded ones are shown.


@on_all_meshes
@on_ranks("mesh")
def test_gradients_are_shown_and_written_back(mesh: tuple[int, ...]) -> None:
    plain, model = plain_and_sharded("unused", mesh)
    case = CASES["unused"]
    batch = my_batch(case, 0)
    torch.manual_seed(0)
    for each in (model, plain):
        case.loss(each, batch).backward()
    expected = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    with summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            assert (param.grad is None) == (name not in expected)
            if param.grad is not None:
                assert torch.equal(param.grad, expected[name])
                param.grad.mul_(2)
        model.layers[0].bias.grad = None
        model.unused.weight.grad = torch.ones_like(model.unused.weight)
    assert model.layers[0].bias.grad is None
    assert torch.equal(model.unused.weight.grad.full_tensor(), torch.ones(11, 3))
    assert torch.equal(model.layers[1].weight.grad.full_tensor(), 2 * expected["layers.1.weight"])
    with summon_full_params(model):
        assert all(param.grad is None for param in model.parameters())
    assert torch.equal(model.layers[1].weight.grad.full_tensor(), 2 * expected["layers.1.weight"])


# --- tensor parallelism ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@on_ranks(4)
def test_parameters_that_tensor_parallelism_splits_are_whole(name: str) -> None:
    mesh = (2, 2)
    plain, model = parallel_models.make(name, mesh)
    with summon_full_params(model), torch.no_grad():
        assert_same(model, plain)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.mul_(3)
            theirs.mul_(3)
    assert_full_values(model, plain)
    (x, y), *_ = parallel_models.batches_of(name, mesh, 1)[0]
    assert torch.allclose(model(x), plain(x), atol=1e-4)
    parallel_models.CASES[name].case.loss(model, (x, y)).backward()


# --- errors ---------------------------------------------------------------------------------------


class Nosy(nn.Module):
    """A module whose forward asks for whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.asks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.asks:
            with summon_full_params(self.linear):
                pass
        return self.linear(x)


class AskInBackward(torch.autograd.Function):
    """An identity whose backward asks for whole parameters."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> typing.Any:
        with summon_full_params(ctx.module):
            pass
        return grads[0], None


@on_ranks(2)
def test_it_is_refused_in_a_step_and_steps_are_refused_in_it() -> None:
    mesh = make_mesh((2,))
    model: typing.Any = Nosy()
    fully_shard(model.linear, mesh)
    fully_shard(model, mesh)
    model.asks = True
    x = torch.ones(2, 4)
    with pytest.raises(StateError, match="summon_full_params was called in a forward, which uses"):
        model(x)
    model.asks = False
    with pytest.raises(StateError, match="summon_full_params was called in a backward"):
        AskInBackward.apply(model(x.requires_grad_()), model).sum().backward()
    with summon_full_params(model):  # After both.
        assert type(model.linear.weight) is nn.Parameter
    out = model(x)
    for steps in (lambda: model(x), lambda: model.linear(x)):
        with (
            pytest.raises(StateError, match=r"a forward.* inside of summon_full_params, where the"),
            summon_full_params(model.linear),
        ):
            steps()
    with (
        pytest.raises(StateError, match="a backward was called inside of summon_full_params"),
        summon_full_params(model, writeback=False),
    ):
        out.sum().backward()
    calls: dict[str, Callable[[], object]] = {
        "unshard": model.linear.unshard,
        r"wait\(\) of unshard": model.linear.unshard(async_op=True).wait,
        "copy.deepcopy": lambda: copy.deepcopy(model),
        "a conversion": model.double,
    }
    for what, call in calls.items():
        with (
            pytest.raises(StateError, match=rf"{what}.* inside of summon_full_params"),
            summon_full_params(model),
        ):
            call()
    model(x).sum().backward()
    assert isinstance(model.linear.weight.grad, ShardedTensor)


@on_ranks(2)
def test_gradients_are_not_clipped_where_there_are_none() -> None:
    """A norm of 0 would be wrong without a word."""
    model = fully_shard(nn.Linear(4, 4), make_mesh((2,)))
    model(torch.ones(2, 4)).sum().backward()
    with (
        pytest.raises(StateError, match=r"clip_grad_norm_\(\) was called inside of summon_full_pa"),
        summon_full_params(model),
    ):
        model.clip_grad_norm_(1.0)
    with summon_full_params(model, with_grads=True):
        norm = model.clip_grad_norm_(1.0)
    assert norm.item() == pytest.approx(20**0.5 * 2)
    assert model.clip_grad_norm_(1.0).item() == pytest.approx(1.0)


@on_ranks(2)
def test_a_first_forward_is_refused_in_it() -> None:
    model = fully_shard(nn.Linear(4, 4), make_mesh((2,)))
    for _ in range(2):
        with (
            pytest.raises(StateError, match=r"a forward.* inside of summon_full_params"),
            summon_full_params(model),
        ):
            model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()


def fail_inside(model: typing.Any) -> None:
    with summon_full_params(model), torch.no_grad():
        model.layers[0].weight.zero_()
        raise ZeroDivisionError


@on_ranks(2)
def test_other_errors() -> None:
    plain, model = plain_and_sharded("mlp", (2,))
    with (
        pytest.raises(StateError, match="rank0_only=True with writeback=True would keep"),
        summon_full_params(model, rank0_only=True),
    ):
        pass
    with pytest.raises(ZeroDivisionError):
        fail_inside(model)
    plain.layers[0].weight.data.zero_()
    assert_full_values(model, plain)  # Written as far as it came.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 7)).sum().backward()
    with (
        pytest.raises(StateError, match=r"the shard of .* was written inside of summon_full_par"),
        summon_full_params(model),
    ):
        optimizer.step()
    with torch.device("meta"):
        empty = fully_shard(MLP(), make_mesh((2,)))
    with pytest.raises(StateError, match="on the meta device"), summon_full_params(empty):
        pass


@on_ranks(2)
def test_with_blocks_inside_of_others() -> None:
    plain, model = plain_and_sharded("gpt", (2,))
    with summon_full_params(model), torch.no_grad():
        with summon_full_params(model.blocks[0]):
            model.blocks[0].fc1.weight.zero_()
            whole = model.blocks[0].fc1.weight
        assert model.blocks[0].fc1.weight is whole  # The outer one decides.
        with summon_full_params(model, writeback=False):
            model.positions.zero_()
    for each in (plain.blocks[0].fc1.weight, plain.positions):
        each.data.zero_()
    assert_full_values(model, plain)
    with summon_full_params(model.blocks[0]), summon_full_params(model):
        assert_same(model, plain)
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    with (
        pytest.raises(StateError, match="with writeback=True, with_grads=True inside of one"),
        summon_full_params(model, writeback=False),
        summon_full_params(model.blocks[0], with_grads=True),
    ):
        pass
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
