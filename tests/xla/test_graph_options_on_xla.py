"""What users choose of a graph: barriers, when it runs, when parameters are cut."""

from __future__ import annotations

import hlo
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import nn
from xla_graphs import own_graph
from xla_ranks import XlaRanks, on_xla

import models
from parity import Pair
from shardkit import DeviceMesh, defer_sharding, fully_shard

DEEP = models.Case(
    lambda: models.MLP([7, 16, 16, 16, 5]),
    lambda model: list(model.layers),  # type: ignore[arg-type, union-attr]
    models.regression_batch,
    models.squared_error,
)


def num_runs() -> int:
    """Return how many graphs have run in this process."""
    xm.wait_device_ops()  # They are counted when they have run.
    data = met.metric_data("ExecuteReplicatedTime")
    return 0 if data is None else data[0]


@pytest.mark.parametrize(
    ("forward", "backward"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_gathers_wait_where_there_is_a_barrier(
    forward: bool, backward: bool, mesh: DeviceMesh
) -> None:
    pair = Pair(XlaRanks(mesh), DEEP)
    pair.sharded.set_optimization_barriers(forward=forward, backward=backward)
    for _ in range(2):
        pair.step()
    pair.sharded(pair.draw()[0]).square().sum().backward()
    program = hlo.Program(own_graph([p.grad.local_piece for p in pair.sharded.parameters()]))
    barriers = program.count()["opt-barrier"]
    # Of four layers the last is kept for backward.
    assert barriers == 4 * forward + 3 * backward
    pair.assert_equal()


@pytest.mark.parametrize("enable", [True, False])
def test_a_graph_runs_at_the_end_of_backward_if_it_is_to(enable: bool, mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    pair.sharded.set_sync_on_finalization(enable)
    for _ in range(2):
        pair.step()
    grads = [param.grad for param in pair.sharded.parameters()]
    assert grads == [None] * len(grads)
    pair.backward(pair.draw())
    text = own_graph([p.grad.local_piece for p in pair.sharded.parameters()])
    assert (" reduce-scatter(" in text) is not enable
    pair.update()
    pair.assert_equal()


def test_parameters_are_cut_together_if_that_is_deferred(mesh: DeviceMesh) -> None:
    runs = {}
    for deferred in (False, True):
        model = on_xla(nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))))
        expected = [param.detach().cpu() for param in model.parameters()]
        before = num_runs()
        if deferred:
            with defer_sharding(), defer_sharding():
                for layer in model:
                    fully_shard(layer, mesh)
                fully_shard(model, mesh)
                inside = num_runs()
            assert inside == before
        else:
            for layer in model:
                fully_shard(layer, mesh)
            fully_shard(model, mesh)
        runs[deferred] = num_runs() - before
        for param, value in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.full_tensor().cpu(), value)  # type: ignore[attr-defined]
    assert runs[True] < runs[False]
    assert runs[False] >= 4


def test_norms_of_a_module_take_one_graph_for_every_order(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "tiny")
    pair.step()
    pair.backward(pair.draw())
    torch_xla.sync(wait=True)
    for order in (2.0, float("inf"), 1.0):
        before = num_runs()
        norm = pair.sharded.clip_grad_norm_(0.1, order)
        assert num_runs() == before, "the host has read something"
        expected = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1, order)
        torch.testing.assert_close(norm.cpu(), expected, rtol=1e-5, atol=1e-6)
    pair.assert_equal_gradients()
