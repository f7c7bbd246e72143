"""`shardkit.checkpoint`: saved by some ranks, loaded by others, in turns with FSDP2."""

from __future__ import annotations

import math
import pathlib
import threading
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from checkpoints import (
    CHECKPOINT_CASES,
    Outcome,
    WholeState,
    assert_same,
    load_and_train,
    make_sharded,
    save_and_train,
    schedule_of,
    train_on_shares,
    whole_state,
)
from models import CASES, MLP
from reference import OPTIMIZERS, make_mesh, shard
from shardkit import checkpoint, fully_shard
from shardkit.checkpoint._dcp import writer
from workers import Spawn, spawn_each


def load(name: str, mesh_shape: tuple[int, ...], folder: str) -> Outcome:
    """Load into a model of other values, train on."""
    case = CHECKPOINT_CASES[name]
    model, optimizer = make_sharded(case, mesh_shape, seed=7)
    scheduler = schedule_of(optimizer)
    assert checkpoint.load(folder, model, optimizer, scheduler=scheduler) == {"step": 2}
    assert scheduler.last_epoch == 1
    return whole_state(model, optimizer), train_on_shares(case, model, optimizer, range(2, 4))


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("gpt", (2,), (2,)),
        ("gpt", (2,), (3,)),
        ("mixed", (3,), (2, 2)),
        ("gpt", (2, 2), (2,)),
        ("frozen", (3,), (4,)),
        ("tiny", (2,), (4,)),
        ("conv", (1,), (2,)),
        ("tied", (2,), (1,)),
        ("unused", (2,), (3,)),
    ],
)
def test_training_goes_on(
    spawn: Spawn, tmp_path: pathlib.Path, name: str, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    path = tmp_path / "x"
    (expected, losses), *_ = spawn(save_and_train, math.prod(saved), name, saved, str(path))
    for state, others in spawn(load, math.prod(loaded), name, loaded, str(path)):
        assert_same(state, expected)
        if saved == loaded:
            assert others == losses
        elif name != "conv":  # There batch statistics are those of a rank's own samples.
            # Sums over ranks are taken in another order.
            assert others == pytest.approx(losses, rel=1e-5)


def bytes_of(tensors: typing.Iterable[torch.Tensor]) -> int:
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def save_wide(mesh_shape: tuple[int, ...], folder: str) -> int:
    model = shard(CASES["mlp"], MLP((501,) * 9), make_mesh(mesh_shape))
    checkpoint.save(folder, model)
    return bytes_of(model.state_dict().values())


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_everything_is_written_once(
    spawn: Spawn, tmp_path: pathlib.Path, mesh_shape: tuple[int, ...]
) -> None:
    nbytes = spawn(save_wide, math.prod(mesh_shape), mesh_shape, str(tmp_path / "x"))[0]
    files = list((tmp_path / "x").glob("*.distcp"))
    written = [file.stat().st_size for file in files]
    assert len(written) == math.prod(mesh_shape)
    assert nbytes < sum(written) < 1.01 * nbytes
    assert max(written) < 1.2 * nbytes / len(written)  # Replicas share the work.


# --- FSDP2 and plain DCP --------------------------------------------------------------------------


def make_fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    case = CASES["gpt"]
    torch.manual_seed(seed)
    model = case.make()
    mesh = init_torch_mesh("cpu", (dist.get_world_size(),))
    for module in case.groups(model):
        fsdp2(module, mesh=mesh)
    fsdp2(model, mesh=mesh)
    return model, OPTIMIZERS["adamw"](model.parameters())


NESTINGS = {each: each for each in ("model, optim", "app", "optimizer", "bare")}


def save_fsdp2(folder: str, nesting: str) -> Outcome:
    model, optimizer = make_fsdp2(0)
    train_on_shares(CASES["gpt"], model, optimizer, range(2))
    model_state, optim_state = get_state_dict(model, optimizer)
    states: dict[str, typing.Any] = {
        "model, optim": {"model": model_state, "optim": optim_state, "step": 2},
        "app": {"app": {"model": model_state, "optim": optim_state, "step": 2}},
        "optimizer": {"model": model_state, "optimizer": optim_state, "extra": {"step": 2}},
        "bare": model_state,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # DCP of torch 2.9
        dcp.save(states[nesting], checkpoint_id=f"{folder}/{nesting}")
    return whole_state(model, optimizer), train_on_shares(
        CASES["gpt"], model, optimizer, range(2, 4)
    )


def load_from_fsdp2(folder: str, nesting: str) -> Outcome:
    model, optimizer = make_sharded(CASES["gpt"], (dist.get_world_size(),), seed=7)
    if nesting == "bare":
        assert checkpoint.load(f"{folder}/{nesting}", model) == {}
    else:
        assert checkpoint.load(f"{folder}/{nesting}", model, optimizer) == {"step": 2}
    return whole_state(model, optimizer), train_on_shares(
        CASES["gpt"], model, optimizer, range(2, 4)
    )


def test_checkpoints_of_fsdp2(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    saved = spawn_each(spawn, NESTINGS, save_fsdp2, 2, str(tmp_path))
    for world_size in (2, 3):
        loaded = spawn_each(spawn, NESTINGS, load_from_fsdp2, world_size, str(tmp_path))
        for nesting in NESTINGS:
            (expected, losses), (state, others) = saved[nesting][0], loaded[nesting][0]
            if nesting == "bare":
                assert_same([nesting, state["model"]], [nesting, expected["model"]])
            else:
                assert_same([nesting, plain_steps(state)], [nesting, plain_steps(expected)])
                # Sums in another order.
                assert others == pytest.approx(losses, rel=1e-5), nesting


def plain_steps(state: WholeState) -> WholeState:
    return {"model": state["model"], "state": [o["state"] for o in state["optimizers"]]}


def load_into_fsdp2(folder: str) -> Outcome:
    model, optimizer = make_fsdp2(7)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    return whole_state(model, optimizer), train_on_shares(
        CASES["gpt"], model, optimizer, range(2, 4)
    )


def test_fsdp2_loads_ours(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    expected, losses = spawn(save_and_train, 2, "gpt", (2,), str(path))[0]
    state, others = spawn(load_into_fsdp2, 3, str(path))[0]
    assert_same(plain_steps(state), plain_steps(expected))
    assert others == pytest.approx(losses, rel=1e-5)  # Sums in another order.


# --- in the background ----------------------------------------------------------------------------


def save_in_background(folder: str) -> tuple[WholeState, list[float], list[bool]]:
    """Train on while a slow disk is written to; save again at once."""
    case = CASES["gpt"]
    model, optimizer = make_sharded(case, (2,))
    train_on_shares(case, model, optimizer, range(2))
    go_on = threading.Event()
    real = writer.FileStream.append

    def slow(self: typing.Any, *args: typing.Any, **options: typing.Any) -> typing.Any:
        go_on.wait(30)
        return real(self, *args, **options)

    writer.FileStream.append = slow
    try:
        handle = checkpoint.async_save(pathlib.Path(folder, "a"), model, optimizer, step=2)
        state = whole_state(model, optimizer)
        losses = train_on_shares(case, model, optimizer, range(2, 4))
        done = [handle.done(), pathlib.Path(folder, "a").exists()]
        with pytest.raises(TimeoutError, match="not complete after"):
            handle.result(timeout=0.01)
        go_on.set()
        second = checkpoint.async_save(pathlib.Path(folder, "b"), model, optimizer, step=4)
        done += [handle.done(), handle.result() == pathlib.Path(folder, "a")]
        second.result()
    finally:
        writer.FileStream.append = real
    assert checkpoint.latest(folder) == pathlib.Path(folder, "b")
    checkpoint.release_staging_memory()
    return state, losses, done


def test_training_goes_on_while_a_copy_is_written(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    results = spawn(save_in_background, 2, str(tmp_path))
    for state, losses, done in results:
        assert done == [False, False, True, True]
        others = spawn(load_and_train, 2, str(tmp_path / "a"), (2, 4))[0]
        assert_same(others[0], state)
        assert others[1] == losses


def unheard(folder: str, how: str) -> list[str]:
    """A save in the background fails; return what is raised, and when."""
    model, optimizer = make_sharded(CASES["gpt"], (2,))
    path = pathlib.Path(folder, "a")
    real = writer.FileStream.append
    if dist.get_rank() == 1:

        def fail(*_: object, **__: object) -> typing.NoReturn:
            raise OSError(28, "No space left on device")

        writer.FileStream.append = fail
    raised = []
    try:
        handle = checkpoint.async_save(path, model, optimizer)
        handle.wait()
        writer.FileStream.append = real
        if how == "asked":
            with pytest.raises(checkpoint.CheckpointError) as found:
                handle.result()
            raised.append(str(found.value))
        elif how != "none":
            again = checkpoint.save if how == "save" else checkpoint.async_save
            with pytest.raises(checkpoint.CheckpointError) as found:
                again(path, model, optimizer)
            raised.append(str(found.value))
        checkpoint.save(path, model, optimizer)
    finally:
        writer.FileStream.append = real
    raised.append(str(sorted(entry.name for entry in pathlib.Path(folder).iterdir())))
    return raised


@pytest.mark.parametrize("how", ["asked", "save", "async_save"])
def test_errors_in_the_background_are_heard_once(
    spawn: Spawn, tmp_path: pathlib.Path, how: str
) -> None:
    for message, files in spawn(unheard, 2, str(tmp_path), how):
        assert "[rank 1] OSError: [Errno 28] No space left on device" in message
        assert ("the last asynchronous save failed" in message) == (how != "asked")
        assert files == "['a']"


def save_where_one_name_is_taken(folder: str) -> list[str]:
    """Each rank has a folder of its own, as on hosts that share none."""
    model, _ = make_sharded(CASES["gpt"], (2,))
    path = pathlib.Path(folder, str(dist.get_rank()), "a")
    if dist.get_rank() == 0:
        (path / "b").mkdir(parents=True)
    with pytest.raises(checkpoint.CheckpointError) as found:
        checkpoint.async_save(path, model)
    return [str(found.value)]


def test_all_ranks_hear_that_a_name_is_taken(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    for (message,) in spawn(save_where_one_name_is_taken, 2, str(tmp_path)):
        assert "[rank 0]" in message
        assert "exists. Give each checkpoint a name of its own" in message


# --- other states ---------------------------------------------------------------------------------


def save_average(folder: str) -> WholeState:
    """The average of a model is an extra of sharded tensors."""
    case = CASES["gpt"]
    model, optimizer = make_sharded(case, (2,))
    average = torch.optim.swa_utils.AveragedModel(model)
    train_on_shares(case, model, optimizer, range(1))
    average.update_parameters(model)
    checkpoint.save(folder, model, average=average)
    return whole_state(average.module)


def load_average(folder: str, given: bool) -> typing.Any:
    model, _ = make_sharded(CASES["gpt"], (3,), seed=7)
    if given:
        average = torch.optim.swa_utils.AveragedModel(model)
        assert checkpoint.load(folder, model, average=average) == {}
        return whole_state(average.module)["model"]
    found = checkpoint.load(folder, model)["average"]
    return {key.removeprefix("module."): found[key] for key in found if key != "n_averaged"}


@pytest.mark.parametrize("given", [True, False])
def test_extras_of_sharded_tensors(spawn: Spawn, tmp_path: pathlib.Path, given: bool) -> None:
    path = tmp_path / "x"
    expected = spawn(save_average, 2, str(path))[0]
    assert_same(spawn(load_average, 3, str(path), given)[0], expected["model"])


class Best:
    """The best weights so far; a new one refers to those of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.state: dict[str, typing.Any] = {
            "weights": model.state_dict(),
            "last": model.state_dict(),
            "losses": torch.tensor([0, 0]),
        }

    def state_dict(self) -> dict[str, typing.Any]:
        return self.state

    def load_state_dict(self, state: dict[str, typing.Any]) -> None:
        self.state = state


def load_best(folder: str) -> None:
    model, _ = make_sharded(CASES["gpt"], (2,))
    best = Best(model)
    for key, factor in (("weights", 2), ("last", 3)):
        best.state[key] = {n: t.detach() * factor for n, t in best.state[key].items()}
    best.state["losses"] = torch.tensor([0.5, 1.5])
    checkpoint.save(folder, model, best=best)
    expected = whole_state(model)["model"]
    loaded, _ = make_sharded(CASES["gpt"], (2,), seed=7)
    found = Best(loaded)
    checkpoint.load(folder, loaded, best=found)
    assert_same(whole_state(loaded)["model"], expected)
    for key, factor in (("weights", 2), ("last", 3)):
        for name, value in found.state[key].items():
            assert torch.equal(value.full_tensor(), expected[name] * factor)
    assert found.state["losses"].tolist() == [0.5, 1.5]


def test_extras_that_refer_to_the_model(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(load_best, 2, str(tmp_path / "x"))


def orders(folder: str) -> list[list[str]]:
    model, _ = make_sharded(CASES["gpt"], (2,))
    average = {"steps": 1, **{name: t.detach() for name, t in model.state_dict().items()}}
    checkpoint.save(folder, model, average=average, step=2)
    return [[*average], [*checkpoint.load(folder, model)["average"]]]


def test_dicts_keep_their_order(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    saved, loaded = spawn(orders, 2, str(tmp_path / "x"))[0]
    assert loaded == saved
    whole = torch.load(checkpoint.consolidate(tmp_path / "x", tmp_path / "x.pt"), weights_only=True)
    assert [*whole] == saved[1:]


def load_on_meta(folder: str) -> WholeState:
    with torch.device("meta"):
        model = CASES["gpt"].make()
    shard(CASES["gpt"], model, make_mesh((2,)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    checkpoint.load(folder, model, optimizer)
    return whole_state(model, optimizer)


def test_models_on_meta_get_memory(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    spawn(save_gpt, 2, str(path))
    state = spawn(load_on_meta, 2, str(path))[0]
    assert_same(state, spawn(load_gpt, 2, str(path))[0])


def save_gpt(folder: str) -> None:
    model, optimizer = make_sharded(CASES["gpt"], (2,))
    train_on_shares(CASES["gpt"], model, optimizer, range(1))
    checkpoint.save(folder, model, optimizer)


def load_gpt(folder: str) -> WholeState:
    model, optimizer = make_sharded(CASES["gpt"], (2,), seed=7)
    checkpoint.load(folder, model, optimizer)
    return whole_state(model, optimizer)


class Tables(nn.Module):
    """A module with a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("mean", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.table.copy_(torch.arange(4.0))
        nn.init.ones_(self.mean)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.table) + self.mean


def train_loaded_without_grad(folder: str, how: str) -> None:
    torch.manual_seed(0)
    saved = Tables()
    saved.mean.fill_(3)
    weights = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    plain = Tables()
    plain.load_state_dict(weights)
    fully_shard(saved)
    if how == "load":
        checkpoint.save(folder, saved)
    with torch.device("meta"):
        model = fully_shard(Tables())
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    x = torch.randn(2, 3)
    with torch.inference_mode():
        if how == "load":
            checkpoint.load(folder, model)
        else:
            checkpoint.load_full(weights, model)
    for _ in range(2):
        outputs = [each(x) for each in (model, plain)]
        torch.testing.assert_close(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("how", ["load", "load_full"])
def test_training_after_a_load_in_inference_mode(
    spawn: Spawn, tmp_path: pathlib.Path, how: str
) -> None:
    """What was on meta has memory that autograd can use, and modules compute what no file has."""
    spawn(train_loaded_without_grad, 2, str(tmp_path / "x"), how)


def outputs_after_load(folder: str) -> list[float]:
    """Load into a model that stays gathered between forwards; return losses before and after."""
    case = CASES["gpt"]
    torch.manual_seed(7)
    model = shard(case, case.make(), make_mesh((2,)), reshard_after_forward=False)
    batch = case.batch(torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = case.loss(model, batch).item()
        checkpoint.load(folder, model)
        return [before, case.loss(model, batch).item()]


def output_of_saved(folder: str) -> float:
    model, _ = make_sharded(CASES["gpt"], (2,), seed=5)
    checkpoint.load(folder, model)
    with torch.no_grad():
        return CASES["gpt"].loss(model, CASES["gpt"].batch(torch.Generator().manual_seed(3))).item()


def test_a_gathered_model_sees_what_was_loaded(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    spawn(save_gpt, 2, str(path))
    before, after = spawn(outputs_after_load, 2, str(path))[0]
    assert before != after == spawn(output_of_saved, 2, str(path))[0]
