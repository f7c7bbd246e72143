"""The norm of sharded gradients is a tensor like others, and answers to `full_tensor()`."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import pickle
import typing

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardkit
from shardkit import fully_shard
from workers import on_ranks

if typing.TYPE_CHECKING:
    from pathlib import Path

MAX_NORM = 0.5


def make() -> tuple[typing.Any, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    sharded = fully_shard(copy.deepcopy(plain))
    for model in (plain, sharded):
        model(torch.ones(2, 3)).square().sum().backward()
    return sharded, plain


@pytest.mark.parametrize("foreach", [None, True, False])
@on_ranks(2)
def test_fsdp2_scripts_find_full_tensor(foreach: bool | None) -> None:
    sharded, plain = make()
    wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    total = nn.utils.get_total_norm([p.grad for p in sharded.parameters()], foreach=foreach)
    nn.utils.clip_grads_with_norm_(sharded.parameters(), MAX_NORM, total, foreach=foreach)
    clipped = nn.utils.clip_grad_norm_(sharded.parameters(), 1e9, foreach=foreach)
    assert not isinstance(total, DTensor)
    for norm, value in ((total, wanted.item()), (clipped, MAX_NORM)):
        whole = norm.full_tensor()
        assert type(whole) is Tensor
        assert whole.item() == pytest.approx(value, rel=1e-5)
    parts = sum(p.grad.norm().full_tensor() ** 2 for p in sharded.parameters())
    assert math.sqrt(parts) == pytest.approx(MAX_NORM, rel=1e-5)
    own = sharded.clip_grad_norm_(1e9)
    assert own.full_tensor().item() == pytest.approx(MAX_NORM, rel=1e-5)
    # As for pipeline stages: powers are summed over them.
    total = total.full_tensor()
    total **= 2.0
    dist.all_reduce(total)
    assert total.item() == pytest.approx(dist.get_world_size() * wanted.item() ** 2, rel=1e-5)


@on_ranks(2)
def test_it_behaves_as_a_plain_tensor() -> None:
    sharded, _ = make()
    norm: typing.Any = nn.utils.clip_grad_norm_(sharded.parameters(), 1e9)
    plain = norm.full_tensor()
    number = plain.item()
    assert norm.item() == float(norm) == norm.tolist() == number
    assert isinstance(norm, Tensor)
    assert norm.shape == ()
    assert norm.dtype is torch.float32
    assert bool(norm > 0)
    assert norm == plain
    assert norm < torch.inf
    assert torch.isfinite(norm)
    assert max(norm, 0.0) is norm
    for result in (norm + plain, plain / norm, torch.cat([norm[None], plain[None]])):
        assert type(result) is Tensor
    assert f"{norm:.3f} {norm}" == f"{plain:.3f} {plain}"
    assert repr(norm) == repr(plain)
    assert "%.2f" % norm == "%.2f" % plain  # noqa: UP031 - as loggers format
    records = [
        logging.LogRecord("", 0, "", 0, "norm %s %.1f", (value, value), None)
        for value in (norm, plain)
    ]
    assert records[0].getMessage() == records[1].getMessage()
    assert math.isclose(math.sqrt(norm), number**0.5)
    assert norm.numpy() == plain.numpy()
    assert torch.stack([norm, norm]).max() == number
    for copied in (copy.deepcopy(norm), norm.clone(), norm.detach(), norm.to(torch.float64)):
        assert copied.full_tensor().item() == number
    assert type(pickle.loads(pickle.dumps(norm))) is Tensor
    file = io.BytesIO()
    torch.save({"norm": norm}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["norm"] == number
    for context in (contextlib.nullcontext(), shardkit.install()):
        with context:
            compiled = torch.compile(lambda value: value * 2 + 1, backend="eager")
            assert compiled(norm).item() == pytest.approx(number * 2 + 1)
    norm.div_(2)
    dist.all_reduce(norm)
    assert norm.item() == pytest.approx(number)


@on_ranks(2)
def test_numbers_over_all_ranks_give_numbers_over_all_ranks() -> None:
    """Scripts sum what is no DTensor over the ranks, and would count each rank's norm again."""
    sharded, plain = make()
    grads = [param.grad for param in sharded.parameters()]
    wanted = sum(param.grad.square().sum().item() for param in plain.parameters())
    norms = torch.stack([grad.norm(2) for grad in grads])
    squares = [grad.square().sum() for grad in grads]
    for total in (torch.sum(torch.pow(norms, 2)), sum(squares), torch.stack(squares).sum()):
        assert total.full_tensor().item() == pytest.approx(wanted, rel=1e-5)
        assert not isinstance(total, DTensor)
        with shardkit.install():
            assert isinstance(total, DTensor)
        assert not hasattr(total, "to_local")
        with pytest.raises(AttributeError, match="number of all ranks already"):
            total.to_local()


@on_ranks(2)
def test_it_can_be_saved_by_torch(tmp_path: Path) -> None:
    sharded, _ = make()
    norm = nn.utils.get_total_norm([param.grad for param in sharded.parameters()])
    with shardkit.install():
        dcp.save({"norm": norm, "model": sharded.state_dict()}, checkpoint_id=tmp_path)
        found = {"norm": torch.zeros(())}
        dcp.load(found, checkpoint_id=tmp_path)
    assert found["norm"] == norm
