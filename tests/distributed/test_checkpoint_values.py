"""What is in checkpoints beside parameters: extra state, values, averages."""

from __future__ import annotations

import pathlib
import pprint
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoints import make_sharded, train_on_shares
from models import CASES
from reference import full, make_mesh
from shardkit import CheckpointError, checkpoint, fully_shard
from shardkit.optim import LocalOptimizer
from workers import Spawn, on_ranks


class Stateful(nn.Module):
    """Has extra state, of which `get_extra_state` makes a copy, and a buffer saved as a copy."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((2,), 5.0))
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.sum()

    def get_extra_state(self) -> object:
        return self.state.clone() if isinstance(self.state, Tensor) else self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state

    def _save_to_state_dict(self, destination: typing.Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale.clone()


STATES: dict[str, object] = {
    "tensor": torch.arange(5.0),
    "flat": {"a": 1, "b": [1, 2]},
    "nested": {"a": {"x": torch.ones(2)}, "b": {"y": "z"}},
    "empty": {},
    "numbers": {0: torch.ones(2), 1: (3, {"x": None})},
    "number": 7,
}


def shown(state: object) -> str:
    """Return what tells states from each other, whatever the order of keys."""
    return repr(sorted(state.items(), key=repr) if isinstance(state, dict) else state)


def save_and_load_state(folder: str, name: str) -> tuple[object, Tensor]:
    model = fully_shard(Stateful(STATES[name]), mesh=make_mesh((2,)))
    checkpoint.save(folder, model)
    other = fully_shard(Stateful(torch.zeros(1)), mesh=make_mesh((2,)))
    with torch.no_grad():
        other.scale.zero_()
    checkpoint.load(folder, other)
    return other.state, other.scale


@pytest.mark.parametrize("name", STATES)
def test_what_hooks_make_comes_back_through_hooks(
    spawn: Spawn, tmp_path: pathlib.Path, name: str
) -> None:
    for state, scale in spawn(save_and_load_state, 2, str(tmp_path / "x"), name):
        assert shown(state) == shown(STATES[name])
        assert scale.tolist() == [5.0, 5.0]


def values_of_ranks(folder: str) -> typing.Any:
    # Rank 0 has more of the parameter, so that bytes alone would have rank 1 write the rest.
    model = fully_shard(nn.Linear(1, 3, bias=False), mesh=make_mesh((2,)))
    checkpoint.save(folder, model, rank=dist.get_rank())
    return checkpoint.load(folder, model)


def test_values_are_those_of_the_first_rank(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    assert spawn(values_of_ranks, 2, str(tmp_path / "x")) == [{"rank": 0}] * 2


def statistics_of_ranks(folder: str) -> tuple[dict[str, float], ...]:
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), mesh=make_mesh((2,)))
    norm: typing.Any = model[1]
    norm.running_mean.fill_(dist.get_rank())
    norm.running_var.fill_(dist.get_rank())
    saved = {name: float(buffer.sum()) for name, buffer in model.named_buffers()}
    checkpoint.save(folder, model)
    checkpoint.load(folder, model)
    return saved, {name: float(buffer.sum()) for name, buffer in model.named_buffers()}


def test_buffers_are_those_of_the_first_rank(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    """The mean and the variance of a batch normalization belong together."""
    (of_first, _), *_ = found = spawn(statistics_of_ranks, 2, str(tmp_path / "x"))
    assert [loaded for _, loaded in found] == [of_first] * 2


def load_another(folder: str) -> str:
    model, _ = make_sharded(CASES["gpt"], (2,))
    for step in range(2):
        checkpoint.save(f"{folder}/{step}", model)
    with pytest.raises(CheckpointError, match="ranks mean different checkpoints") as caught:
        checkpoint.load(f"{folder}/{dist.get_rank()}", model)
    return str(caught.value)


def test_ranks_must_load_the_same(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    for message in spawn(load_another, 2, str(tmp_path)):
        assert f"[rank 0] checkpoint '{tmp_path}/0'" in message
        assert f"[rank 1] checkpoint '{tmp_path}/1'" in message


def save_in_background(folder: str) -> str:
    model, _ = make_sharded(CASES["gpt"], (2,))
    value = pathlib.Path() if dist.get_rank() == 1 else 3
    handle = checkpoint.async_save(folder, model, value=value)
    with pytest.raises(CheckpointError) as caught:
        handle.result(60)
    return str(caught.value)


def test_all_ranks_hear_that_one_has_no_copy(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    for message in spawn(save_in_background, 2, str(tmp_path / "x")):
        assert "[rank 1] extra 'value' (PosixPath) cannot be saved" in message
    assert list(tmp_path.iterdir()) == []


def save_optimizer_as_extra(folder: str) -> str:
    model, optimizer = make_sharded(CASES["gpt"], (2,))
    train_on_shares(CASES["gpt"], model, optimizer, range(1))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder, model, second=optimizer)
    return str(caught.value)


def test_numbers_as_keys_of_sharded_tensors_are_refused(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    for message in spawn(save_optimizer_as_extra, 2, str(tmp_path / "x")):
        assert "Pass optimizers as `optimizer`" in message


@on_ranks(2)
def test_values_beside_sharded_tensors_come_back(tmp_path: pathlib.Path) -> None:
    model, _ = make_sharded(CASES["gpt"], (2,))
    values = {"n": (1, (2, {})), "empty": {}, "numbers": {0: 1, 5: 2}}
    checkpoint.save(str(tmp_path / "x"), extra={"shadow": dict(model.state_dict()), **values})
    loaded = checkpoint.load(str(tmp_path / "x"))["extra"]
    assert len(loaded.pop("shadow")) == len(model.state_dict())
    assert loaded == values


class Several(torch.optim.SGD):
    """Keeps several momenta for each parameter, as AggMo does."""

    keys: typing.ClassVar[tuple[typing.Any, ...]] = (0.0, 0.9, 1, -2, True, "x")

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["numbers"] = {1: 2.0, (0, "a"): [3]}
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state[7] = {"list": [{0: torch.zeros_like(param)}], "empty": {(1,): 2}}
                    state["momenta"] = {key: torch.zeros_like(param) for key in self.keys[:-2]}
                    state["others"] = {key: torch.zeros_like(param) for key in self.keys[-2:]}
                for several in (state["momenta"], state["others"], state[7]["list"][0]):
                    for number, each in enumerate(several.values()):
                        each.add_(param.grad, alpha=number + 1.0)


def state_with_keys(folder: str, is_local: bool) -> typing.Any:
    model, _ = make_sharded(CASES["gpt"], (2,))

    def make() -> torch.optim.Optimizer:
        params = model.parameters()
        return LocalOptimizer(params, Several) if is_local else Several(params)

    trained, fresh = make(), make()
    train_on_shares(CASES["gpt"], model, trained, range(1))
    checkpoint.save(f"{folder}/x", model, trained)
    checkpoint.load(f"{folder}/x", model, fresh)

    def of(optimizer: torch.optim.Optimizer) -> typing.Any:
        state = checkpoint.gather_optimizer_state(model, optimizer, rank0_only=False)
        return pprint.pformat(state).split("\n")  # With the keys in order.

    assert of(fresh) == of(trained)
    for param in model.parameters():
        kept = fresh.state[param]
        for each in (*kept["momenta"].values(), *kept[7]["list"][0].values()):
            assert each.placements == param.placements  # type: ignore[attr-defined]
            assert type(each) is type(param.detach())
    train_on_shares(CASES["gpt"], model, fresh, range(1))
    if dist.get_rank() == 0:
        checkpoint.consolidate(f"{folder}/x", f"{folder}/x.pt", optimizer=True)
        whole = torch.load(f"{folder}/x.pt", weights_only=True)["optim"]
        return sorted(next(iter(whole["state"].values()))["momenta"])
    return None


@pytest.mark.parametrize("is_local", [False, True], ids=["itself", "on pieces"])
def test_keys_that_are_no_strings_come_back(
    spawn: Spawn, tmp_path: pathlib.Path, is_local: bool
) -> None:
    keys, _ = spawn(state_with_keys, 2, str(tmp_path), is_local)
    assert repr(keys) == "[-2, 0.0, 0.9, 1]"


def save_by_tuples(folder: str) -> str:
    model, optimizer = make_sharded(CASES["gpt"], (2,))
    for param in model.parameters():
        optimizer.state[param]["momenta"] = {(0, 1): torch.zeros_like(param)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder, model, optimizer)
    return str(caught.value)


def test_tuples_as_keys_of_sharded_state_are_refused(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    for message in spawn(save_by_tuples, 2, str(tmp_path / "x")):
        assert "momenta' of the optimizer holds sharded tensors by a key" in message
        assert "((0, 1), a tuple)" in message


class Moments(torch.optim.SGD):
    """Keeps tuples of tensors, and dicts that are empty at first."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group.setdefault("seen", {})
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["moments"] = (torch.zeros_like(param), torch.zeros_like(param))
                    state["later"] = {"empty": {}, "tuple": (1, ())}
                for number, moment in enumerate(state["moments"]):
                    moment.add_(param.grad, alpha=number + 1.0)


@on_ranks(2)
def test_tuples_of_tensors_and_empty_dicts_come_back(tmp_path: pathlib.Path) -> None:
    """Tuples of sharded tensors come back as lists."""
    model, _ = make_sharded(CASES["gpt"], (2,))
    trained, fresh = Moments(model.parameters()), Moments(model.parameters())
    train_on_shares(CASES["gpt"], model, trained, range(1))
    checkpoint.save(tmp_path / "x", model, trained)
    checkpoint.load(tmp_path / "x", model, fresh)
    assert fresh.param_groups[0]["seen"] == {}
    for param in model.parameters():
        kept, saved = fresh.state[param], trained.state[param]
        assert kept["later"] == saved["later"]
        pairs = zip(kept["moments"], saved["moments"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    checkpoint.save(tmp_path / "none", model, [])
    checkpoint.load(tmp_path / "none", model, [])


class Graph(nn.Module):
    """A layer over the edges of a graph, which are a sparse buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("edges", torch.eye(size, 4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_ranks(2)
def test_sparse_buffers_come_back(tmp_path: pathlib.Path) -> None:
    mesh = make_mesh((2,))
    saved, loaded = (fully_shard(Graph(4), mesh=mesh) for _ in range(2))
    saved.edges.mul_(3)
    checkpoint.save(tmp_path / "x", saved, copy=saved)
    checkpoint.load(tmp_path / "x", loaded)
    assert torch.equal(loaded.edges.to_dense(), saved.edges.to_dense())
    loaded.edges.mul_(0)
    checkpoint.load(tmp_path / "x", copy=loaded)
    assert torch.equal(loaded.edges.to_dense(), saved.edges.to_dense())
    loaded.edges.mul_(0)
    checkpoint.load_local_state_dict(loaded, checkpoint.local_state_dict(saved))
    assert torch.equal(loaded.edges.to_dense(), saved.edges.to_dense())
    with pytest.raises(CheckpointError, match="'edges' is sparse"):
        checkpoint.save_full(tmp_path / "x.pt", saved)
    with pytest.raises(CheckpointError, match="is sparse"):
        checkpoint.consolidate(tmp_path / "x", tmp_path / f"{dist.get_rank()}.pt")


@on_ranks(2)
def test_another_default_device_changes_nothing(tmp_path: pathlib.Path) -> None:
    """Files are read into memory of the host, and written from there."""
    model, optimizer = make_sharded(CASES["gpt"], (2,))
    train_on_shares(CASES["gpt"], model, optimizer, range(1))
    with torch.device("meta"):
        checkpoint.save(tmp_path / "x", model, optimizer)
        checkpoint.save_full(tmp_path / "x.pt", model)
    dist.barrier()
    other, other_optimizer = make_sharded(CASES["gpt"], (2,), seed=1)
    expected = {name: full(param.detach()) for name, param in model.named_parameters()}
    loads: tuple[typing.Callable[[], object], ...] = (
        lambda: checkpoint.load(tmp_path / "x", other, other_optimizer),
        lambda: checkpoint.load_full(tmp_path / "x.pt", other),
        lambda: checkpoint.load_full(tmp_path / "x.pt", other, broadcast_from_rank0=True),
    )
    for load in loads:
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        with torch.device("meta"):
            load()
        for name, param in other.named_parameters():
            assert torch.equal(full(param.detach()), expected[name])
    with torch.device("meta"):
        checkpoint.consolidate(tmp_path / "x", tmp_path / f"{dist.get_rank()}.pt")


@on_ranks(2)
def test_extras_on_meta_get_memory(tmp_path: pathlib.Path) -> None:
    model, _ = make_sharded(CASES["gpt"], (2,))
    checkpoint.save(str(tmp_path / "x"), average=model)
    with torch.device("meta"):
        average, _ = make_sharded(CASES["gpt"], (2,))
    checkpoint.load(str(tmp_path / "x"), average=average)
    pairs = zip(model.parameters(), average.parameters(), strict=True)
    assert all(torch.equal(full(one), full(other)) for one, other in pairs)
