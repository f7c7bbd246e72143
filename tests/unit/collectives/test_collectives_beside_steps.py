"""What norms and calls by hand communicate, what one rank does, how much memory is unsharded."""

from __future__ import annotations

import pytest
import torch
from recorded import Recorded, listed
from step_lists import (
    BACKWARD,
    FORWARD,
)
from torch import nn

from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard

# --- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4)])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_costs_one_small_collective(mesh_shape: tuple[int, ...], norm_type: float) -> None:
    recorded = Recorded(mesh_shape)
    recorded.step()
    torch.nn.utils.clip_grad_norm_(recorded.model.parameters(), 1.0, norm_type=norm_type)
    [(what, numel)] = recorded.log
    assert (what, numel) == (("all_reduce_sum", 7) if norm_type == 2.0 else ("all_reduce_max", 14))


def test_an_optimizer_step_communicates_nothing() -> None:
    recorded = Recorded()
    optimizer = torch.optim.AdamW(recorded.model.parameters(), lr=0.1)
    for _ in range(2):
        recorded.step()
        optimizer.step()
        optimizer.zero_grad()
        assert recorded.log == []


# --- by hand ------------------------------------------------------------------------------------


def test_unshard_gathers_ahead_of_the_forward() -> None:
    recorded = Recorded()
    recorded.step()
    layer = recorded.model.layers[1]
    handle = layer.unshard(async_op=True)
    assert recorded.read() == ["gather 1"]
    handle.wait()
    assert recorded.read() == ["wait 1"]
    layer.unshard()
    assert recorded.read() == []
    assert layer.linear.weight.shape == (16, 8)
    assert not isinstance(layer.linear.weight, ShardedTensor)
    without_1 = [entry for entry in FORWARD if entry not in ("gather 1", "wait 1")]
    recorded.run()
    assert recorded.read() == without_1


def test_reshard_gives_memory_and_parameters_back() -> None:
    recorded = Recorded()
    recorded.step()
    layer = recorded.model.layers[1]
    layer.unshard()
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 4 * 144
    layer.reshard()
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    assert isinstance(layer.linear.weight, ShardedTensor)
    recorded.read()
    assert recorded.step() == FORWARD + BACKWARD


# --- one rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(1,), (1, 1)])
def test_one_rank_communicates_nothing(mesh_shape: tuple[int, ...]) -> None:
    recorded = Recorded(mesh_shape)
    compute = listed("forward 0, forward 1, forward 2, backward 2, backward 1, backward 0")
    for _ in range(2):
        assert recorded.step() == compute
    torch.nn.utils.clip_grad_norm_(recorded.model.parameters(), 1.0)
    assert recorded.log == []
    stats = recorded.model.memory_stats()
    assert {name: nbytes for name, nbytes in stats.items() if nbytes} == {
        "shard_nbytes": 4 * (4 + 72 + 144 + 408)
    }


def test_one_rank_computes_with_the_shard_itself() -> None:
    recorded = Recorded((1,))
    seen = {}

    def look(module: nn.Module, args: object) -> None:
        del args
        seen[module] = module.weight.data_ptr()

    linears = [layer.linear for layer in recorded.model.layers]
    for linear in linears:
        linear.register_forward_pre_hook(look)
    recorded.step()
    assert [seen[linear] for linear in linears] == [
        linear.weight.to_local().data_ptr() for linear in linears
    ]


def test_a_replicate_axis_alone_gathers_nothing() -> None:
    """Two replicas of one rank each: plain data parallelism."""
    recorded = Recorded((2, 1))
    recorded.step()
    verbs = {word.split()[0] for word in recorded.step()}
    assert "gather" not in verbs
    assert "all-reduce" in verbs


# --- memory -------------------------------------------------------------------------------------

EQUAL_WIDTHS = (16,) * 7
LAYER_NBYTES = 4 * 16 * 17
ROOT_NBYTES = 4 * 16  # 4 elements, padded to 16 bytes a rank


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_two_layers_and_the_root_are_the_most_that_is_unsharded(
    *, reshard_after_forward: bool | None
) -> None:
    """Prefetch depth 1, and the one in use; from the first step on, at any depth of the model."""
    for num_layers in (3, 6):
        recorded = Recorded(
            widths=EQUAL_WIDTHS[: num_layers + 1], reshard_after_forward=reshard_after_forward
        )
        for seed in range(4):
            recorded.run(seed=seed).backward()
            peak_nbytes = recorded.model.memory_stats()["peak_unsharded_nbytes"]
            assert peak_nbytes == 2 * LAYER_NBYTES + ROOT_NBYTES


def test_without_resharding_everything_is_unsharded_at_once() -> None:
    recorded = Recorded(widths=EQUAL_WIDTHS, reshard_after_forward=False)
    recorded.run().backward()
    peak_nbytes = recorded.model.memory_stats()["peak_unsharded_nbytes"]
    assert peak_nbytes == 6 * LAYER_NBYTES + ROOT_NBYTES


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_after_backward_nothing_is_unsharded(*, reshard_after_forward: bool | None) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    for seed in range(3):
        loss = recorded.run(seed=seed)
        assert recorded.model.memory_stats()["unsharded_nbytes"] > 0
        loss.backward()
        assert recorded.model.memory_stats()["unsharded_nbytes"] == 0


def test_buffers_of_gradients_are_those_of_one_layer_and_its_follower() -> None:
    """Send and receive buffer of one reduction: it is waited for before the next one starts."""
    recorded = Recorded(widths=EQUAL_WIDTHS)
    for seed in range(3):
        recorded.run(seed=seed).backward()
        nbytes = recorded.model.memory_stats()["reduce_buffer_nbytes"]
        assert nbytes == LAYER_NBYTES + 3 * LAYER_NBYTES // 4


def test_the_shard_is_a_rank_th_of_everything() -> None:
    recorded = Recorded(widths=EQUAL_WIDTHS)
    assert recorded.model.memory_stats()["shard_nbytes"] == (6 * LAYER_NBYTES + ROOT_NBYTES) // 4


# --- exceptions that the model catches ----------------------------------------------------------


class Careful(nn.Module):
    """Goes on without its layer where that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.head(self.layer(x))
        except ValueError:
            return self.head(x)


@pytest.mark.parametrize("with_backward", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_layer_whose_error_the_root_caught_is_gathered_when_it_has_changed(
    *, reshard_after_forward: bool, with_backward: bool
) -> None:
    """It never left that forward; it is shown sharded, and gathered anew, all the same."""
    mesh, log = recording_mesh((4,))
    model = Careful()
    fully_shard(model.layer, mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh)

    def fail(*_: object) -> None:
        msg = "from a hook"
        raise ValueError(msg)

    hook = model.layer.register_forward_pre_hook(fail)
    with torch.set_grad_enabled(with_backward):
        loss = model(torch.ones(1, 8)).sum()
    if with_backward:
        loss.backward()
    hook.remove()
    assert isinstance(model.layer.weight, ShardedTensor)
    for _ in range(2):
        with torch.no_grad():
            model.layer.weight.add_(1.0)
            log.clear()
            model(torch.ones(1, 8))
        assert ("start all_gather", 80) in log  # 72 elements, padded to four times 16 bytes
