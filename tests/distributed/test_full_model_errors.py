"""What of files of whole tensors does not fit, or cannot be written: all ranks say why."""

from __future__ import annotations

import contextlib
import pathlib
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from whole_files import assert_holds, draw, write

from models import CASES
from reference import full, make_mesh, shard
from shardkit import fully_shard
from shardkit.checkpoint import load_full, save_full
from workers import Spawn, on_ranks

# --- errors ---------------------------------------------------------------------------------------


def misfit_file(folder: str) -> tuple[nn.Module, pathlib.Path]:
    case = CASES["conv"]
    state = draw(case.make().state_dict())
    del state["head.bias"]
    state["nobody"] = torch.ones(3)
    state["head.weight"] = torch.ones(2, 5)
    state["stages.0.1.num_batches_tracked"] = torch.tensor(1.5)
    return shard(case, case.make(), make_mesh((2,))), write(state, "nested.pt", folder)


def load_misfits(folder: str, strict: bool) -> None:
    model, path = misfit_file(folder)
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    try:
        load_full(path, model, strict=strict)
    finally:
        assert_holds(model, before)


@pytest.mark.parametrize("strict", [True, False])
def test_all_that_does_not_fit_is_listed(
    spawn_errors: Spawn, tmp_path: pathlib.Path, strict: bool
) -> None:
    for error in spawn_errors(load_misfits, 2, str(tmp_path), strict):
        assert error.type_name == "CheckpointError"
        shapes = "expected shape (5, 6) of float32, found shape (2, 5) of float32"
        assert f"expected another shape: 'head.weight': {shapes}" in error.message
        assert "expected another dtype: 'stages.0.1.num_batches_tracked'" in error.message
        for text in (
            "missing in the file: 'head.bias': expected shape (5,)",
            "unexpected in the file: 'nobody': found shape (3,)",
        ):
            assert (text in error.message) == strict


@on_ranks(2)
def test_what_is_missing_is_returned(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path)
    case = CASES["mlp"]
    state = draw(case.make().state_dict())
    kept = state.pop("layers.1.bias")
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh((2,)))
    names = load_full(write(state | {"x": kept}, "nested.pt", folder), model, strict=False)
    assert names == (["layers.1.bias"], ["x"], ["layers.1.bias"])


def load_where_ties_are_lost() -> None:
    head = nn.Linear(4, 8, bias=False)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), head)
    head.weight = model[0].weight
    state = model.state_dict()
    if dist.get_rank() > 0:
        model = model.to("meta")  # torch unties what is shared
    fully_shard(model, make_mesh((dist.get_world_size(),)))
    load_full(state, model, broadcast_from_rank0=True)


def test_models_of_other_ranks_need_the_same_names(spawn_errors: Spawn) -> None:
    for error in spawn_errors(load_where_ties_are_lost, 2):
        assert error.type_name == "CheckpointError"
        assert "[rank 1] its model has a tensor named '0.weight'" in error.message
        assert "that of rank 0 has one named '0.weight', '2.weight'" in error.message
        assert "unties" in error.message


def save_where_it_fails(folder: str, how: str) -> None:
    case = CASES["mlp"]
    model = shard(case, case.make(), make_mesh((2,)))
    with contextlib.ExitStack() as stack:
        if how == "late" and dist.get_rank() == 0:
            from shardkit.checkpoint._files.formats import TensorWriter

            full_disk = OSError(28, "No space left on device")
            stack.enter_context(mock.patch.object(TensorWriter, "append", side_effect=full_disk))
        save_full(pathlib.Path(folder) / "model.pt", model)


@pytest.mark.parametrize("how", ["early", "late"])
def test_all_ranks_say_why_the_first_could_not_write(
    spawn_errors: Spawn, tmp_path: pathlib.Path, how: str
) -> None:
    folder = tmp_path / "folder"
    if how == "early":
        folder.write_text("a file")
    else:
        folder.mkdir()
    for error in spawn_errors(save_where_it_fails, 2, str(folder), how):
        assert error.type_name == "CheckpointError"
        assert "rank 0 could not write" in error.message
        assert ("Not a directory" if how == "early" else "No space left") in error.message
    if how == "late":
        assert list(folder.iterdir()) == []


def save_plain(folder: str) -> None:
    save_full(pathlib.Path(folder) / "x.pt", nn.Linear(2, 2))


def save_meta(folder: str) -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Linear(2, 2), make_mesh((2,)))
    save_full(pathlib.Path(folder) / "x.pt", model)


def save_as_integers(folder: str) -> None:
    model = fully_shard(nn.Linear(2, 2), make_mesh((2,)))
    save_full(pathlib.Path(folder) / "x.pt", model, dtype=torch.int8)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_as_integers, "dtype must be a floating-point dtype"),
        (save_plain, "has no sharded parameters"),
        (save_meta, "'weight' is on the meta device"),
    ],
)
def test_models_that_cannot_be_saved(
    spawn_errors: Spawn, tmp_path: pathlib.Path, save: typing.Any, message: str
) -> None:
    for error in spawn_errors(save, 2, str(tmp_path)):
        assert error.type_name == "CheckpointError"
        assert message in error.message
