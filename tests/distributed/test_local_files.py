"""Per-rank files in plain containers, loaded on as many ranks or made into whole files."""

from __future__ import annotations

import copy
import os
import pathlib
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import checkpoints
import parallel_models
from models import CASES
from recording import recording_mesh
from reference import OPTIMIZERS, full, full_parameters, make_mesh, my_batch, shard, train
from shardkit import ShardedTensor, fully_shard
from shardkit._errors import CheckpointError
from shardkit.checkpoint import (
    StateDictOptions,
    consolidate,
    get_optimizer_state_dict,
    get_shard_metadata,
    load_full,
    load_local_state_dict,
    local_state_dict,
)
from shardkit.optim import MatrixOptimizer

if typing.TYPE_CHECKING:
    from workers import Spawn

STEPS = 2


def rank_file(folder: str, name: str = "run") -> pathlib.Path:
    rank, size = dist.get_rank(), dist.get_world_size()
    return pathlib.Path(folder) / f"{name}_rank-{rank:08d}-of-{size:08d}.pth"


def trained(name: str, mesh_shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    case = CASES[name]
    torch.manual_seed(0)
    model = shard(case, case.make(), make_mesh(mesh_shape))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for _ in train(case, model, optimizer, [my_batch(case, step) for step in range(STEPS)]):
        pass
    return model, optimizer


def go_on(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[float], dict[str, Tensor]]:
    case = CASES[name]
    batches = [my_batch(case, step) for step in range(STEPS, 2 * STEPS)]
    losses = [loss.item() for loss in train(case, model, optimizer, batches)]
    return losses, full_parameters(model)


def is_plain(value: typing.Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return type(value) is Tensor or isinstance(value, int | float | str | None)


def save_and_resume(name: str, mesh_shape: tuple[int, ...], folder: str) -> dict[str, typing.Any]:
    """Return the whole model and optimizer, as they were saved."""
    model, optimizer = trained(name, mesh_shape)
    state = local_state_dict(model, optimizer)
    torch.save(state, rank_file(folder))
    options = StateDictOptions(full_state_dict=True)
    whole = {
        "model": {k: full(v).detach().clone() for k, v in model.state_dict().items()},
        "optim": copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options)),
    }
    expected = go_on(name, model, optimizer)
    for device in ("cpu", "meta"):
        torch.manual_seed(1)
        with torch.device(device):
            again = shard(CASES[name], CASES[name].make(), make_mesh(mesh_shape))
        other = OPTIMIZERS["adamw"](again.parameters())
        loaded = torch.load(rank_file(folder), weights_only=True)
        assert is_plain(loaded["shard_metadata"])
        load_local_state_dict(again, loaded, other)
        losses, params = go_on(name, again, other)
        assert losses == expected[0]
        assert all(torch.equal(params[key], value) for key, value in expected[1].items())
    return whole


@pytest.mark.parametrize(
    ("name", "mesh_shape"), [("gpt", (2,)), ("tiny", (3,)), ("conv", (2, 2))], ids=str
)
def test_training_goes_on_and_whole_files_are_made_of_them(
    spawn: Spawn, tmp_path: pathlib.Path, name: str, mesh_shape: tuple[int, ...]
) -> None:
    """Bit by bit, in both."""
    world_size = torch.Size(mesh_shape).numel()
    whole = spawn(save_and_resume, world_size, name, mesh_shape, str(tmp_path))[0]
    prefix = tmp_path / "run"
    loaded = torch.load(consolidate(prefix, tmp_path / "model.pt"))
    assert list(loaded) == list(whole["model"])
    for key, value in whole["model"].items():
        assert torch.equal(loaded[key], value), key
    CASES[name].make().load_state_dict(loaded)

    both = torch.load(consolidate(prefix, tmp_path / "both.pt", optimizer=True), weights_only=True)
    assert both.keys() == {"model", "optim"}
    assert list(both["model"]) == list(loaded)
    assert both["optim"]["param_groups"] == whole["optim"]["param_groups"]
    assert both["optim"]["state"].keys() == whole["optim"]["state"].keys()
    for param, entries in whole["optim"]["state"].items():
        for key, value in entries.items():
            assert torch.equal(both["optim"]["state"][param][key], value), (param, key)
    assert consolidate(prefix, tmp_path / "hf", format="safetensors", max_shard_size=3000).is_dir()
    spawn(load_elsewhere, 2, name, str(tmp_path), whole["model"])


def load_elsewhere(name: str, folder: str, expected: dict[str, Tensor]) -> None:
    """Load what was consolidated on another number of ranks."""
    for file in ("model.pt", "both.pt", "hf"):
        model = shard(CASES[name], CASES[name].make(), make_mesh((2,)))
        load_full(pathlib.Path(folder) / file, model)
        for key, value in model.state_dict().items():
            assert torch.equal(full(value), expected[key]), key


NUMBERS = (0, 0.9, -2, True)


def state_with_numbers(folder: str) -> tuple[dict[typing.Any, Tensor], list[str]]:
    """Return the first parameter's whole state by keys that are numbers, and what is refused."""
    model, _ = trained("mlp", (2,))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    params = list(model.parameters())
    for param in params:
        values = {n: torch.full_like(param, i) for i, n in enumerate(NUMBERS[1:])}
        optimizers[0].state[param] = {**values, 0: 3}
    torch.save(local_state_dict(model, optimizers[0]), rank_file(folder))
    loaded = torch.load(rank_file(folder), weights_only=True)
    load_local_state_dict(model, loaded, optimizers[1])
    for param in params:
        before, after = (each.state[param] for each in optimizers)
        assert repr([*after]) == repr([*before])
        assert after[0] == 3
        assert all(torch.equal(after[n].to_local(), before[n].to_local()) for n in NUMBERS[1:])
    whole = {n: full(v) if n else v for n, v in optimizers[0].state[params[0]].items()}
    refused = []
    for keys in ((1, "1"), ((0, 1),)):
        optimizers[0].state[params[0]] = dict.fromkeys(keys, 0)
        with pytest.raises(CheckpointError) as caught:
            local_state_dict(model, optimizers[0])
        refused.append(str(caught.value))
    return whole, refused


def test_state_by_numbers(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    whole, refused = spawn(state_with_numbers, 2, str(tmp_path))[0]
    path = consolidate(tmp_path / "run", tmp_path / "both.pt", optimizer=True)
    found = next(iter(torch.load(path, weights_only=True)["optim"]["state"].values()))
    assert repr([*found]) == repr([*whole])
    assert all(torch.equal(torch.as_tensor(found[n]), torch.as_tensor(whole[n])) for n in whole)
    assert "has the keys 1 and '1', which have one name in a local file" in refused[0]
    assert "has the key (0, 1), a tuple, which cannot be saved" in refused[1]


def nested_state(folder: str) -> typing.Any:
    """Save and load state in dicts and lists; return the first parameter's whole state."""
    model, _ = trained("mlp", (2,))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    params = list(model.parameters())
    for param in params:
        piece = torch.full_like(param, 0.5)
        slots = [{0: 2 * piece, "count": 3}, torch.ones(2), {}, (3 * piece, None)]
        optimizers[0].state[param] = {"momentum": {0.9: piece, 0: 4 * piece}, "slots": slots}
    torch.save(local_state_dict(model, optimizers[0]), rank_file(folder))
    loaded = torch.load(rank_file(folder), weights_only=True)
    assert all(is_plain(value) for value in loaded["optimizer"].values())
    load_local_state_dict(model, loaded, optimizers[1])
    states = [checkpoints.whole([each.state[param] for param in params]) for each in optimizers]
    checkpoints.assert_same(states[1], states[0])
    assert isinstance(optimizers[1].state[params[0]]["slots"][3][0], ShardedTensor)
    return states[0][0]


def test_nested_state_is_saved_in_pieces(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    expected = spawn(nested_state, 2, str(tmp_path))[0]
    path = consolidate(tmp_path / "run", tmp_path / "both.pt", optimizer=True)
    states = torch.load(path, weights_only=True)["optim"]["state"]
    checkpoints.assert_same(next(iter(states.values())), expected)


# --- errors ---------------------------------------------------------------------------------------


def save_model(folder: str, name: str = "run", case: str = "mlp") -> None:
    model = shard(CASES[case], CASES[case].make(), make_mesh((dist.get_world_size(),)))
    torch.save(local_state_dict(model), rank_file(folder, name))


def load_of_other(folder: str, how: str) -> None:  # noqa: C901, PLR0912 - a branch for each way
    rank, size = dist.get_rank(), dist.get_world_size()
    model = shard(CASES["mlp"], CASES["mlp"].make(), make_mesh((size,)))
    state = local_state_dict(model)
    if how == "other rank":
        (path,) = pathlib.Path(folder).glob(f"run_rank-{1 - rank:08d}-of-*")
        state = torch.load(path)
    elif how == "other number":
        path = next(pathlib.Path(folder).glob("run_rank-*-of-00000003.pth"))
        state = torch.load(path)
    elif how == "other groups":
        model = fully_shard(CASES["mlp"].make(), make_mesh((size,)))
    elif how == "other names":
        model = shard(CASES["tiny"], CASES["tiny"].make(), make_mesh((size,)))
    elif how == "foreign":
        state = {"model": {}}
    elif how == "newer":
        state["shard_metadata"]["version"] = 2
    elif how == "one element":
        name = next(iter(state["model"]))
        state["model"][name] = torch.ones(1)
    elif how == "other kind":
        name = next(iter(state["model"]))
        state["model"][name] = state["model"][name].to(torch.complex64)
        state["shard_metadata"]["model"][name]["dtype"] = "complex64"
    elif how == "junk groups":
        state |= {"optimizer": {}, "param_groups": [1]}
        state["shard_metadata"]["optimizer"] = {}
    elif how == "other save" and rank == 1:
        state = torch.load(rank_file(folder))
    elif how == "foreign on one" and rank == 1:
        state = {"model": {}}
    has_optimizer = how in {"no optimizer", "junk groups"}
    optimizer: typing.Any = torch.optim.SGD(model.parameters()) if has_optimizer else None
    if how == "at owners":
        optimizer = MatrixOptimizer(model.parameters(), torch.optim.AdamW)
        CASES["mlp"].loss(model, my_batch(CASES["mlp"], 0)).backward()
        optimizer.step()
        state = local_state_dict(model, optimizer)
    before = full_parameters(model)
    try:
        load_local_state_dict(model, state, optimizer)
    finally:
        assert all(torch.equal(v, before[k]) for k, v in full_parameters(model).items())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("other rank", "is that of rank {1} of 2, and this is rank {0} of 2"),
        ("other number", "of 3, and this is rank {0} of 2"),
        ("other groups", "cut in another way: of 'layers.0.weight' this rank has the range ["),
        ("other names", "missing: 'mlp.layers.0.weight'"),
        ("foreign", "is not what shardkit.checkpoint.local_state_dict returns"),
        ("foreign on one", "[rank 1] the state dict is not what shardkit.checkpoint.local_state_d"),
        ("newer", "has version 2 of the format"),
        ("one element", "not what is said of it: 'layers.0.weight'"),
        ("other kind", "expected another dtype: 'layers.0.weight': expected shape"),
        ("junk groups", "its parameter groups are no groups"),
        ("other save", "the ranks have state dicts of different saves"),
        ("no optimizer", "no state of an optimizer was saved"),
        ("at owners", "is not cut like the parameter (MatrixOptimizer keeps it at owners)"),
    ],
)
def test_what_does_not_fit_is_refused(
    spawn: Spawn, spawn_errors: Spawn, tmp_path: pathlib.Path, how: str, message: str
) -> None:
    spawn(save_model, 3 if how == "other number" else 2, str(tmp_path))
    for rank, error in enumerate(spawn_errors(load_of_other, 2, str(tmp_path), how)):
        assert error.type_name == "CheckpointError"
        assert message.format(rank, 1 - rank) in error.message


def local_of_tensor_parallel() -> None:
    local_state_dict(parallel_models.make("mlp", (2, 2))[1])


def test_tensor_parallel_models_are_refused(spawn_errors: Spawn) -> None:
    for error in spawn_errors(local_of_tensor_parallel, 4):
        assert "is split over a tensor-parallel mesh as well" in error.message


def save_pickles(folder: str) -> None:
    model = shard(CASES["mlp"], CASES["mlp"].make(), make_mesh((2,)))
    torch.save(model.state_dict(), rank_file(folder, "pickled"))


def test_files_that_do_not_belong_together(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    prefix, out = tmp_path / "run", tmp_path / "out.pt"
    spawn(save_model, 3, str(tmp_path))
    spawn(save_model, 3, str(tmp_path), "later")
    first, second, third = sorted(tmp_path.glob("run_*"))
    kept = second.read_bytes()

    second.unlink()
    with pytest.raises(CheckpointError, match=r"of 3 ranks' files those of rank 1 are missing"):
        consolidate(prefix, out)
    second.write_bytes(sorted(tmp_path.glob("later_*"))[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"0001-of.* not written together with .*0000-of"):
        consolidate(prefix, out)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="are both of rank 0"):
        consolidate(prefix, out)
    second.write_bytes(kept)
    os.truncate(third, third.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"cannot be read as a file of torch.save"):
        consolidate(prefix, out)
    torch.save({"model": {"a": torch.ones(1)}}, third)
    with pytest.raises(CheckpointError, match=r"0002-of.* is not what .*local_state_dict returns"):
        consolidate(prefix, out)
    spawn(save_pickles, 2, str(tmp_path))
    mesh, _ = recording_mesh((2,))  # Also where this process has a mesh that they would fit.
    with pytest.raises(CheckpointError, match="only as many processes as wrote it can load it"):
        consolidate(tmp_path / "pickled", out)
    assert mesh.size() == 2
    with pytest.raises(CheckpointError, match=r"no per-rank files .*none_rank-\*-of-\*.pth"):
        consolidate(tmp_path / "none", out)
    assert not out.exists()
    assert consolidate(tmp_path / "later", out, suffix="_rank-0*").exists()


# --- metadata alone -------------------------------------------------------------------------------


def metadata_beside_local_state() -> dict[str, typing.Any]:
    mesh = make_mesh((2, 2))
    model = shard(CASES["gpt"], CASES["gpt"].make(), mesh)
    found = get_shard_metadata(model)
    whole = local_state_dict(model)["shard_metadata"]
    for key in ("rank", "world_size", "tied", "model"):
        assert found[key] == whole[key]
    pieces = dict(model.named_parameters())
    for name, param in pieces.items():
        start, stop = found["model"][name]["range"]
        assert param.to_local().numel() == stop - start
    return found["mesh"]


def test_metadata_is_that_of_local_files(spawn: Spawn) -> None:
    for rank, mesh in enumerate(spawn(metadata_beside_local_state, 4)):
        assert mesh["coordinate"] == [rank // 2, rank % 2]
        assert (mesh["device_type"], mesh["shape"]) == ("cpu", [2, 2])


class WithNotes(nn.Linear):
    """Has state of its own."""

    notes = "new"

    def get_extra_state(self) -> typing.Any:
        return {"notes": self.notes}

    def set_extra_state(self, state: typing.Any) -> None:
        self.notes = state["notes"]


def load_below_wrappers() -> str:
    def make() -> tuple[nn.Module, WithNotes]:
        torch.manual_seed(0)
        inner = WithNotes(4, 4)
        model = torch.compile(nn.Sequential(checkpoint_wrapper(inner)), backend="eager")
        return fully_shard(typing.cast("nn.Module", model), mesh=make_mesh((2,))), inner

    model, inner = make()
    inner.notes = "saved"
    again, other = make()
    load_local_state_dict(again, local_state_dict(model))
    return other.notes


def test_state_of_modules_below_wrappers_is_loaded(spawn: Spawn) -> None:
    """Names of wrappers are in no file: torch.compile's and the checkpoint wrapper's."""
    assert spawn(load_below_wrappers, 2) == ["saved", "saved"]
