"""`no_sync`: backwards inside send nothing, and what was set before holds again after it."""

from __future__ import annotations

import pytest
import torch

import models
from recording import recording_mesh
from shardkit import fully_shard


def sharded_mlp() -> tuple[models.MLP, list[tuple[str, int]]]:
    mesh, log = recording_mesh((2,))
    model = models.MLP()
    for layer in model.layers:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh), log


def reductions(log: list[tuple[str, int]]) -> int:
    return sum(what == "start reduce_scatter" for what, _ in log)


def test_nothing_is_sent_inside_and_all_at_the_end() -> None:
    model, log = sharded_mlp()
    x = torch.randn(4, models.WIDTHS[0])
    with model.no_sync():
        for _ in range(2):
            model(x).sum().backward()
        assert reductions(log) == 0
        assert all(param.grad is None for param in model.parameters())
    model(x).sum().backward()
    assert reductions(log) > 0
    # All ranks of a recording mesh send the same, so their mean is what this one has summed up.
    expected = 3 * len(x) * torch.ones(models.WIDTHS[-1])
    bias = model.layers[-1].bias
    piece = expected[bias.spec.start : bias.spec.stop]
    torch.testing.assert_close(bias.grad.to_local(), piece)


def test_settings_are_restored_also_after_an_exception() -> None:
    model, log = sharded_mlp()
    model.layers[0].set_requires_gradient_sync(False)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    model(torch.randn(4, models.WIDTHS[0])).sum().backward()
    assert model.layers[0].weight.grad is None
    assert model.layers[1].weight.grad is not None
    assert reductions(log) > 0


def test_a_part_alone_accumulates() -> None:
    model, _ = sharded_mlp()
    with model.layers[1].no_sync():
        model(torch.randn(4, models.WIDTHS[0])).sum().backward()
    assert model.layers[0].weight.grad is not None
    assert model.layers[1].weight.grad is None


@pytest.mark.parametrize("resets", [False, True])
def test_only_a_reset_drops_what_is_not_synced(*, resets: bool) -> None:
    """`zero_grad` drops what is in `.grad`."""
    model, _ = sharded_mlp()
    x = torch.randn(4, models.WIDTHS[0])
    with model.no_sync():
        model(x).sum().backward()
    model.zero_grad()
    if resets:
        model.reset_iter_state()
    model(x).sum().backward()
    piece = model.layers[-1].bias.grad.to_local()
    torch.testing.assert_close(piece, torch.full_like(piece, (1 if resets else 2) * len(x)))
