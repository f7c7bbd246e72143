"""Files of whole tensors into sharded models and back, on real ranks."""

from __future__ import annotations

import contextlib
import pathlib
import typing
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from whole_files import assert_holds, draw, without_ties, write

import parallel_models
from checkpoints import assert_same
from models import CASES
from reference import full, make_mesh, my_batch, shard
from shardkit import ShardedTensor, fully_shard
from shardkit.checkpoint import FullFile, load_full, save_full
from shardkit.checkpoint._files import disk
from workers import Spawn, on_ranks

# --- there and back -------------------------------------------------------------------------------


@contextlib.contextmanager
def small_buffers() -> typing.Iterator[None]:
    """Let pieces of these small models need several parts, as large ones do."""
    before, disk.PART_NBYTES = disk.PART_NBYTES, 64
    try:
        yield
    finally:
        disk.PART_NBYTES = before


def check_there_and_back(name: str, mesh_shape: tuple[int, ...], kind: str, folder: str) -> None:
    case = CASES[name]
    state = draw(case.make().state_dict())
    path = write(state, kind, folder)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = shard(case, case.make(), make_mesh(mesh_shape))
        before = list(map(id, model.parameters()))
        assert load_full(path, model) == ([], [], [])
        assert_holds(model, state)
        assert list(map(id, model.parameters())) == before
    case.loss(model, my_batch(case, 0)).backward()

    back = pathlib.Path(folder) / "back"
    torch_file = save_full(back / "model.pt", model)
    single = save_full(back / "single.safetensors", model, format="safetensors")
    third = sum(value.nbytes for value in state.values()) // 3
    parts = save_full(back / "parts", model, format="safetensors", max_shard_size=third)
    dist.barrier()
    buffers = {name: value for name, value in model.state_dict().items() if "running" in name}
    state |= buffers  # The forward changed them, on each rank by its own batch.
    if dist.get_rank() == 0:
        for mmap in (False, True):
            loaded = torch.load(torch_file, weights_only=True, mmap=mmap)
            assert list(loaded) == list(state)
            assert all(torch.equal(loaded[n], v) for n, v in state.items() if "tracked" not in n)
        assert len(without_ties(loaded)) == len(without_ties(state))
        plain = case.make()
        plain.load_state_dict(loaded)
        saved = safetensors.torch.load_file(single)
        assert saved.keys() == without_ties(state).keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        safetensors.torch.load_model(case.make(), single)
        assert len(list(parts.glob("model-0*-of-0*.safetensors"))) > 1
    dist.barrier()
    for file in (torch_file, single, parts):
        again = shard(case, case.make(), make_mesh((dist.get_world_size(),)))
        load_full(file, again)
        for key, value in state.items():
            if value.is_floating_point() and key not in buffers:
                assert torch.equal(full(again.state_dict()[key]), value), key


@pytest.mark.parametrize(
    ("name", "mesh_shape", "kind"),
    [
        ("gpt", (2,), "nested.pt"),
        ("gpt", (3,), "model.safetensors"),
        ("gpt", (2, 2), "directory"),
        ("conv", (2,), "directory"),
        ("conv", (3,), "nested.pt"),
        ("tiny", (2, 2), "model.safetensors"),
        ("tied", (3,), "directory"),
    ],
    ids=str,
)
@on_ranks("mesh_shape")
def test_there_and_back(
    tmp_path: pathlib.Path, name: str, mesh_shape: tuple[int, ...], kind: str
) -> None:
    folder = str(tmp_path)
    with small_buffers():
        check_there_and_back(name, mesh_shape, kind, folder)


@pytest.mark.parametrize("ranks", [[1, 0], [[1], [0]]], ids=str)
@on_ranks(2)
def test_ranks_of_a_mesh_in_any_order(tmp_path: pathlib.Path, ranks: typing.Any) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    fully_shard(module, TorchDeviceMesh("cpu", ranks))
    path = save_full(tmp_path / "model.pt", module)
    dist.barrier()
    saved = torch.load(path)
    assert all(torch.equal(saved[name], value) for name, value in state.items())


@on_ranks(4)
def test_tensor_parallel_models(tmp_path: pathlib.Path) -> None:
    mesh_shape = (2, 2)
    folder = str(tmp_path)
    plain, model = parallel_models.make("gpt", mesh_shape)
    state = draw(plain.state_dict())
    load_full(write(state, "nested.pt", folder), model)
    assert_holds(model, state)
    for name, format in (("model.pt", "torch"), ("x.safetensors", "safetensors")):  # noqa: A001
        path = save_full(pathlib.Path(folder) / name, model, format=format)
        dist.barrier()
        load = torch.load if format == "torch" else safetensors.torch.load_file
        loaded = load(path)
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], value) for key, value in state.items())


def check_conversion(folder: str) -> None:
    case = CASES["conv"]
    state = draw(case.make().state_dict())
    half = {n: v.bfloat16() if v.is_floating_point() else v for n, v in state.items()}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = shard(case, case.make(), make_mesh((2,)))
        load_full(write(half, "nested.pt", folder), model)
        assert_holds(model, {n: v.to(state[n].dtype) for n, v in half.items()})
        small = shard(case, case.make().bfloat16(), make_mesh((2,)))
        load_full(write(state, "model.safetensors", folder), small)
        assert_holds(small, half)
    load_full(write(state, "nested.pt", folder), model)
    path = save_full(pathlib.Path(folder) / "half.pt", model, dtype=torch.bfloat16)
    dist.barrier()
    loaded = torch.load(path)
    assert all(torch.equal(loaded[n], v) and loaded[n].dtype == v.dtype for n, v in half.items())


@on_ranks(2)
def test_dtypes_are_converted(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path)
    with small_buffers():
        check_conversion(folder)


@on_ranks(4)
def test_progress_counts_what_a_rank_sends(tmp_path: pathlib.Path) -> None:
    """Replicas of the ranks that write send nothing; a buffer counts on the first rank only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    fully_shard(model, make_mesh((2, 2)))
    told: list[tuple[int, int]] = []
    save_full(tmp_path / "model.pt", model, progress=lambda *now: told.append(now))
    nbytes = {n: v.numel() * v.element_size() for n, v in model.state_dict().items()}
    sharded = sum(nbytes[n] for n, _ in model.named_parameters())
    total = (sum(nbytes.values()), sharded, 0, 0)[dist.get_rank()]
    assert [*dict.fromkeys(told)][-1:] == ([(total, total)] if total else [])


@on_ranks(2)
def test_gathered_groups_notice(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path)
    case = CASES["mlp"]
    plain = case.make()
    state = draw(plain.state_dict())
    model = shard(case, case.make(), make_mesh((2,)), reshard_after_forward=False)
    batch = my_batch(case, 0)
    for module in [*model.layers, model]:
        module.unshard()
    case.loss(model, batch)
    load_full(write(state, "nested.pt", folder), model)
    plain.load_state_dict(state)
    assert torch.equal(case.loss(model, batch), case.loss(plain, batch))


@on_ranks(3)
def test_ranks_without_elements_gather_anew_too(tmp_path: pathlib.Path) -> None:
    layer = fully_shard(nn.Linear(1, 1, bias=False), reshard_after_forward=False)
    with torch.no_grad():
        layer(torch.ones(1, 1))  # From here on the group stays unsharded.
    for dtype, value in ((torch.float32, 2.0), (torch.float64, 3.0)):
        weight = torch.full((1, 1), value, dtype=dtype)
        path = tmp_path / f"{dtype}-{dist.get_rank()}.pt"
        torch.save({"weight": weight}, path)
        load_full(path, layer)
        assert layer(torch.ones(1, 1)).item() == value


class Odd(nn.Module):
    """A parameter that is not sharded, buffers of both kinds, state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.plain = nn.Parameter(torch.zeros(4))
        self.register_buffer("strided", torch.zeros(3, 4).t())
        self.register_buffer("computed", torch.arange(3.0), persistent=False)
        self.notes: typing.Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def get_extra_state(self) -> typing.Any:
        return {"notes": self.notes}

    def set_extra_state(self, state: typing.Any) -> None:
        self.notes = state["notes"]


@on_ranks(2)
def test_what_is_not_sharded(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path)
    plain = Odd()
    plain.notes = notes = [1, "two", {"three": torch.arange(3), "halves": torch.ones(4)[::2]}]
    state = plain.state_dict()
    extra = state.pop("_extra_state")
    path = write(draw(state) | {"_extra_state": extra}, "nested.pt", folder)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Odd()
            model.plain.decay = 0.5
            fully_shard(model, make_mesh((2,)), ignored_params={model.plain})
        names = load_full(path, model)
        assert names == ([], [], ["computed"] if device == "meta" else [])
        assert_same(model.notes, notes)
        whole = {name: v for name, v in model.state_dict().items() if name != "_extra_state"}
        assert {name: full(v).tolist() for name, v in whole.items()} == {
            name: v.tolist() for name, v in draw(state).items()
        }
        assert isinstance(model.plain, nn.Parameter)
        assert model.plain.decay == 0.5
    saved = save_full(pathlib.Path(folder) / "saved.pt", model)
    dist.barrier()
    assert_same(torch.load(saved)["_extra_state"], {"notes": notes})
    average = next(p for p in model.parameters() if isinstance(p, ShardedTensor)).detach().clone()
    model.notes = [{"average": average}]
    save_full(saved, model)
    dist.barrier()
    extra = torch.load(saved, weights_only=True)["_extra_state"]
    assert_same(extra, {"notes": [{"average": average.full_tensor()}]})


@pytest.mark.parametrize(("name", "mesh_shape"), [("gpt", (3,)), ("conv", (2, 2))], ids=str)
@on_ranks("mesh_shape")
def test_only_the_first_rank_needs_the_file(
    tmp_path: pathlib.Path, name: str, mesh_shape: tuple[int, ...]
) -> None:
    """The file is where only rank 0 finds it."""
    folder = str(tmp_path)
    case = CASES[name]
    state = draw(case.make().state_dict())
    path = pathlib.Path(folder)
    if dist.get_rank() == 0:
        torch.save(state, path / "model.pt")
    mine = path / ("model.pt" if dist.get_rank() == 0 else "elsewhere.pt")
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        with torch.device(device):
            model = shard(case, case.make().to(dtype), make_mesh(mesh_shape))
        meter = mock.Mock()
        with small_buffers():
            load_full(mine, model, broadcast_from_rank0=True, progress=meter)
        floating = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
        assert_holds(model, floating)
        done, total = meter.call_args.args
        assert done == total > 0


@on_ranks(4)
def test_only_the_first_rank_of_tensor_parallelism_needs_the_file(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path)
    plain, model = parallel_models.make("gpt", (2, 2))
    state = draw(plain.state_dict())
    path = write(state, "nested.pt", folder)
    load_full(path if dist.get_rank() == 0 else "elsewhere", model, broadcast_from_rank0=True)
    assert_holds(model, state)


def load_what_fails(folder: str, how: str) -> None:
    case = CASES["mlp"]
    path = pathlib.Path(folder) / "model.safetensors"
    before = FullFile.read
    if dist.get_rank() == 0 and how == "damaged":
        safetensors.torch.save_file(case.make().state_dict(), path)
        FullFile.read = fail_to_read
    model = shard(case, case.make(), make_mesh((2,)))
    try:
        load_full(path, model, broadcast_from_rank0=True)
    finally:
        FullFile.read = before


def fail_to_read(*_: object) -> Tensor:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("how", ["absent", "damaged"])
def test_all_ranks_say_why_the_first_could_not_read(
    spawn_errors: Spawn, tmp_path: pathlib.Path, how: str
) -> None:
    for error in spawn_errors(load_what_fails, 2, str(tmp_path), how):
        assert error.type_name == "CheckpointError"
        assert "rank 0 could not read" in error.message
        assert ("does not exist" if how == "absent" else "Input/output") in error.message
