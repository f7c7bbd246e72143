"""Backwards that `finalize_backward` ends."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parity import Pair, Ranks, Run, on_meshes
from reference import make_mesh
from shardkit import StateError, fully_shard
from workers import on_ranks


def train(ranks: Ranks, micro_batches: str, in_background: bool) -> None:
    pair = Pair(ranks, "gpt")
    pair.sharded.set_manual_backward_finalization(True)
    assert pair.sharded.finalize_backward() is None  # Nothing happens before the first forward.
    for num in (1, 3, 2):
        pair.sharded.set_requires_gradient_sync(micro_batches == "synced")
        for _ in range(num):
            pair.backward(pair.draw(), scale=1 / num)
        pair.sharded.set_requires_gradient_sync(True)
        handle = pair.sharded.finalize_backward(async_op=in_background)
        if in_background:
            handle.wait()
            handle.wait()
        pair.assert_equal_gradients()
        pair.update()
        pair.sharded.zero_grad()
        pair.plain.zero_grad()
    pair.sharded.set_manual_backward_finalization(False)
    pair.backward(pair.draw())
    pair.assert_equal_gradients()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("micro_batches", ["synced", "unsynced"])
@on_meshes((2,), (2, 2))
def test_steps_that_are_finalized_equal_plain_steps(
    run: Run, micro_batches: str, *, in_background: bool
) -> None:
    run(train, micro_batches, in_background)


class Chosen(nn.Module):
    """A layer that each rank chooses, and one that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[dist.get_rank() % 2](x)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@on_ranks("shape")
def test_ranks_that_used_different_layers(shape: tuple[int, ...], in_background: bool) -> None:
    """Ranks tell each other so also where an evaluation has waited for the last reduction."""
    model: typing.Any = fully_shard(Chosen(), mesh=make_mesh(shape))
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_manual_backward_finalization(True)
    model(torch.ones(1, 3)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 3))
    handle = model.finalize_backward(async_op=in_background)
    if in_background:
        handle.wait()
    for layer in model.layers:
        assert layer.weight.grad.full_tensor().tolist() == [[0.5] * 3] * 3


def linear(*, manual: bool = True) -> typing.Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_manual_backward_finalization(manual)
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def refused(text: str) -> typing.Any:
    return pytest.raises(StateError, match=text)


@on_ranks(2)
def test_before_the_end_there_are_no_gradients() -> None:
    model = linear()
    backward(model)
    assert all(param.grad is None for param in model.parameters())
    handle = model.finalize_backward(async_op=True)
    for call in (
        lambda: model(torch.ones(1, 3)),
        model.finalize_backward,
        model.synchronize_gradients,
    ):
        with refused(r"before the wait\(\) of the handle"):
            call()
    handle.wait()
    assert all(param.grad is not None for param in model.parameters())
    backward(model)


@on_ranks(2)
def test_it_frees_the_parameters_that_backwards_kept() -> None:
    """Pipelines of torch 2.15 keep them until the last micro-batch, and free them by this call."""
    model = linear()
    for frees in (True, False):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        backward(model)
        assert model.memory_stats()["unsharded_nbytes"] > 0
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(frees)
        model.finalize_backward()
        assert (model.memory_stats()["unsharded_nbytes"] == 0) == frees


@on_ranks(2)
def test_a_handle_of_dropped_gradients_is_refused() -> None:
    model = linear()
    backward(model)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with refused(r"were dropped, by reset_iter_state\(\)"):
        handle.wait()
    backward(model)
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_where_each_backward_ends_by_itself_there_is_nothing_to_finalize() -> None:
    model = linear(manual=False)
    backward(model)
    with refused(r"each backward ends by itself\. Call set_manual_backward_finalization\(True\)"):
        model.finalize_backward()


@on_ranks(2)
def test_the_choice_does_not_change_within_a_step() -> None:
    model = linear()
    backward(model)
    model.set_manual_backward_finalization(True)
    with refused("before the step's backwards were finalized"):
        model.set_manual_backward_finalization(False)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)


@on_ranks(2)
def test_it_is_called_between_passes() -> None:
    model = linear()
    model[1].register_forward_hook(lambda *_: model.finalize_backward())
    with refused(r"finalize_backward\(\) was called inside of a forward or a backward"):
        model(torch.ones(1, 3))


@on_ranks(2)
def test_it_is_called_on_the_root() -> None:
    model = linear()
    backward(model)
    for call in (
        model[0].finalize_backward,
        lambda: model[0].set_manual_backward_finalization(False),
    ):
        with refused("is inside of another sharded module"):
            call()
    late = nn.Sequential(fully_shard(nn.Linear(3, 3)))
    late[0].set_manual_backward_finalization(True)  # Nobody knows yet that there is more around it.
    fully_shard(late)
    with refused(r"Call it on the outermost one"):
        late(torch.ones(1, 3))


@on_ranks(4)
def test_partial_sums_are_not_taken_for_gradients() -> None:
    model = fully_shard(nn.Linear(3, 1), mesh=make_mesh((2, 2)))
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    backward(model)
    with refused(r"averaged over a part of the ranks\. Call set_requires_all_reduce\(True\)"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 3]


@on_ranks(2)
def test_steps_before_the_end_are_warned_of() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    with pytest.warns(UserWarning, match=r"steps without a gradient.*finalize_backward\(\)"):
        optimizer.step()
    backward(model)
    backward(model)
    assert any(param.grad is not None for param in model.parameters())  # Of the first backwards.
    optimizer.step()
    if dist.get_rank() > 0:
        backward(model)
    else:
        with pytest.warns(UserWarning, match=r"a part of the gradients only: call finalize_back"):
            backward(model)


@on_ranks(2)
def test_gradients_that_an_exception_has_dropped_are_warned_of() -> None:
    model = linear()
    backward(model)
    hook = model[1].register_forward_hook(lambda *_: model.unknown)
    with pytest.raises(AttributeError, match="unknown"):
        model(torch.ones(1, 3))
    hook.remove()
    with pytest.warns(UserWarning, match="gradients of its earlier backwards"):
        model.finalize_backward()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_a_conversion_before_the_end_is_refused() -> None:
    model = linear()
    backward(model)
    with refused("gradients wait to be synced. Finish the step before"):
        model.double()
