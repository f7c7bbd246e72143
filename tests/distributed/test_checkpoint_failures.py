"""Checkpoints that one rank cannot save or load, or that do not fit: all ranks say why."""

from __future__ import annotations

import logging
import pathlib
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpoints import (
    assert_same,
    load_and_train,
    make_sharded,
    save_and_train,
    train_on_shares,
    whole_state,
)
from models import CASES, MLP
from reference import OPTIMIZERS, make_mesh, shard
from shardkit import checkpoint
from shardkit.checkpoint._dcp import writer
from shardkit.optim import MatrixOptimizer

if typing.TYPE_CHECKING:
    from workers import Spawn

# --- one rank fails -------------------------------------------------------------------------------


class Unsavable:
    """Raises on rank 1."""

    def state_dict(self) -> dict[str, int]:
        if dist.get_rank() == 1:
            msg = "not now"
            raise RuntimeError(msg)
        return {}

    def load_state_dict(self, state: object) -> None:
        del state
        if dist.get_rank() == 1:
            msg = "not this"
            raise ValueError(msg)


def fail_to_write(folder: str) -> None:
    def fail(*_: object) -> typing.NoReturn:
        raise OSError(28, "No space left on device")

    real = writer.FileStream._write  # noqa: SLF001 - what calls the disk
    if dist.get_rank() == 1:
        writer.FileStream._write = fail  # noqa: SLF001
    try:
        checkpoint.save(pathlib.Path(folder, "x"), make_sharded(CASES["gpt"], (2,))[0])
    finally:
        writer.FileStream._write = real  # noqa: SLF001


def fail_to_collect(folder: str) -> None:
    model, _ = make_sharded(CASES["gpt"], (2,))
    checkpoint.save(pathlib.Path(folder, "x"), model, loader=Unsavable())


def save_to_another_name(folder: str) -> None:
    model, _ = make_sharded(CASES["gpt"], (2,))
    checkpoint.save(pathlib.Path(folder, f"rank{dist.get_rank()}"), model)


def test_ranks_that_save_to_different_names_are_refused(
    spawn_errors: Spawn, tmp_path: pathlib.Path
) -> None:
    for error in spawn_errors(save_to_another_name, 2, str(tmp_path)):
        assert error.type_name == "CheckpointError"
        assert "'rank0' on rank 0 and 'rank1' on rank 1" in error.message
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("fail", "reason"),
    [(fail_to_write, "No space left on device"), (fail_to_collect, "RuntimeError: not now")],
)
def test_all_ranks_hear_why_one_could_not_save(
    spawn_errors: Spawn,
    tmp_path: pathlib.Path,
    fail: typing.Callable[[str], None],
    reason: str,
) -> None:
    for error in spawn_errors(fail, 2, str(tmp_path)):
        assert error.type_name == "CheckpointError"
        assert "[rank 1] " in error.message
        assert reason in error.message
    assert list(tmp_path.iterdir()) == []


def load_stateful(folder: str) -> None:
    model, optimizer = make_sharded(CASES["gpt"], (2,))
    checkpoint.load(folder, model, optimizer, scheduler=Unsavable())


def load_other(folder: str, strict: bool) -> None:
    model, optimizer = make_sharded(CASES["mlp"], (2,))
    del optimizer
    checkpoint.load(folder, model, strict=strict)


def test_all_ranks_hear_why_one_could_not_load(
    spawn: Spawn, spawn_errors: Spawn, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "x"
    spawn(save_and_train, 2, "gpt", (2,), str(path))
    for error in spawn_errors(load_stateful, 2, str(path)):
        assert error.type_name == "CheckpointError"
        assert "[rank 1] ValueError: not this" in error.message
    with (path / "__1_0.distcp").open("r+b") as file:
        file.seek(path.joinpath("__1_0.distcp").stat().st_size // 2)
        file.write(b"damaged")
    for error in spawn_errors(load_and_train, 2, str(path), (2, 4)):
        assert "__1_0.distcp" in error.message
        assert "are not what was written" in error.message


def load_from_own_folder(folder: str) -> None:
    model, _ = make_sharded(CASES["mlp"], (2,))
    own = pathlib.Path(folder, f"host{dist.get_rank()}")
    own.mkdir()
    if dist.get_rank() == 0:
        torch.save(CASES["mlp"].make().state_dict(), own / "model.pt")
    checkpoint.load(own / "model.pt", model)


def test_whole_tensors_that_one_rank_does_not_see(
    spawn_errors: Spawn, tmp_path: pathlib.Path
) -> None:
    """As on hosts with disks of their own."""
    for error in spawn_errors(load_from_own_folder, 2, str(tmp_path)):
        assert error.type_name == "CheckpointError"
        assert "the ranks do not find the same" in error.message
        assert "model.pt' (whole tensors)" in error.message
        assert "model.pt' (no file of whole tensors)" in error.message


# --- what does not fit ----------------------------------------------------------------------------


def save_mlp(folder: str) -> None:
    model, optimizer = make_sharded(CASES["mlp"], (2,))
    train_on_shares(CASES["mlp"], model, optimizer, range(1))
    checkpoint.save(folder, model, optimizer, step=1)


class Other(MLP):
    """Like the MLP that was saved, but for a wider head, no bias in one layer, and a new layer."""

    def __init__(self) -> None:
        super().__init__((7, 13, 24, 9))
        self.layers[1].register_parameter("bias", None)
        self.new = nn.Linear(2, 2)


def load_misfit(folder: str, strict: bool, which: type[nn.Module]) -> dict[str, typing.Any]:
    torch.manual_seed(3)
    model = shard(CASES["mlp"], which(), make_mesh((2,)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    before = whole_state(model, optimizer)
    try:
        return checkpoint.load(folder, model, optimizer, strict=strict)
    except checkpoint.CheckpointError:
        assert_same(whole_state(model, optimizer), before)  # Nothing has been changed.
        raise


class Narrower(MLP):
    """Has a part of the MLP's layers, and one more."""

    def __init__(self) -> None:
        super().__init__((7, 13, 24))
        self.new = nn.Linear(2, 2)


def test_all_that_does_not_fit_is_listed(
    spawn: Spawn, spawn_errors: Spawn, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "x"
    spawn(save_mlp, 2, str(path))
    for error in spawn_errors(load_misfit, 2, str(path), True, Other):
        assert error.type_name == "CheckpointError"
        for line in (
            "model: 'layers.2.weight': expected shape (9, 24) of float32, found shape (5, 24)",
            "optimizer: 'layers.2.weight.exp_avg': expected shape (9, 24) of float32, found shape",
            "missing: model: 'new.weight': expected shape (2, 2)",
            "missing: optimizer: all state of 'new.weight'",
            "unexpected: model: 'layers.1.bias': found shape (24,)",
            "unexpected: optimizer: 'layers.1.bias.exp_avg': found shape (24,)",
        ):
            assert line in error.message
    for error in spawn_errors(load_misfit, 2, str(path), False, Other):
        assert "'layers.2.weight'" in error.message
        assert "new.weight" not in error.message
    assert spawn(load_misfit, 2, str(path), False, Narrower) == [{"step": 1}] * 2


# --- another optimizer ----------------------------------------------------------------------------


def save_by(folder: str, kind: str) -> None:
    model, _ = make_sharded(CASES["mlp"], (2,))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    train_on_shares(CASES["mlp"], model, optimizer, range(2))
    checkpoint.save(folder, model, optimizer)


def refusal(folder: str, model: nn.Module, optimizers: typing.Any) -> str:
    """Return why a checkpoint is not loaded; empty: it is."""
    try:
        checkpoint.load(folder, model, optimizers)
    except checkpoint.CheckpointError as error:
        return str(error)
    return ""


def load_by(folder: str, kind: str) -> str:
    model, _ = make_sharded(CASES["mlp"], (2,))
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    said = refusal(folder, model, optimizer)
    assert not (said and optimizer.state), "nothing is changed"
    return said


def load_by_matrices(folder: str, kind: str) -> str:
    model, _ = make_sharded(CASES["mlp"], (2,))
    matrices = [param for param in model.parameters() if param.ndim == 2]
    optimizer = MatrixOptimizer(matrices, getattr(torch.optim, kind), lr=0.1)
    others = torch.optim.AdamW(param for param in model.parameters() if param.ndim != 2)
    return refusal(folder, model, [optimizer, others])


@pytest.mark.helpers
def test_state_of_another_class_is_named_to_matrix_optimizers(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "x")
    spawn(save_by, 2, path, "AdamW")
    for kind in ("Muon", "Adafactor"):
        for said in spawn(load_by_matrices, 2, path, kind):
            assert f"which {kind} does not keep: another class of optimizer was saved" in said


@pytest.mark.helpers
def test_state_of_another_class_is_named(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "x")
    spawn(save_by, 2, path, "AdamW")
    for kind in ("SGD", "RMSprop"):
        for said in spawn(load_by, 2, path, kind):
            assert "'exp_avg_sq' of 'layers.0.weight' and others" in said
            assert f"which {kind} does not keep: another class of optimizer was saved" in said
    for kind in ("AdamW", "Adam"):
        assert spawn(load_by, 2, path, kind) == ["", ""]


class Averaging(torch.optim.SGD):
    """Nobody knows what it keeps before it has stepped."""


def load_by_unknown(folder: str, has_stepped: bool) -> str:
    model, _ = make_sharded(CASES["mlp"], (2,))
    optimizer = Averaging(model.parameters(), lr=0.1, momentum=0.9)
    if has_stepped:
        train_on_shares(CASES["mlp"], model, optimizer, range(1))
    return refusal(folder, model, optimizer)


@pytest.mark.helpers
def test_state_of_another_class_is_named_by_what_there_is(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "x")
    spawn(save_by, 2, path, "AdamW")
    for said in spawn(load_by_unknown, 2, path, True):
        assert "which Averaging does not keep: another class of optimizer was saved" in said
    assert spawn(load_by_unknown, 2, path, False) == ["", ""]


def load_logged(folder: str, **options: typing.Any) -> list[str]:
    """Load the model alone; return what is logged."""
    model, _ = make_sharded(CASES["mlp"], (2,))
    said: list[str] = []
    logger, handler = logging.getLogger("shardkit"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        checkpoint.load(folder, model, **options)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return said


@pytest.mark.helpers
def test_state_that_is_left_out_is_said_by_one_rank(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "x")
    spawn(save_by, 2, path, "AdamW")
    (first, second) = spawn(load_logged, 2, path)
    [said] = first
    assert "has the state of an optimizer, which is left out" in said
    assert second == []


def save_and_load_another(folder: str) -> list[str]:
    model, _ = make_sharded(CASES["gpt"], (2,))
    checkpoint.save(folder, model)
    return load_logged(folder, strict=False)


def test_what_strict_leaves_as_it_is_is_said_by_one_rank(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    (first, second) = spawn(save_and_load_another, 2, str(tmp_path / "x"))
    [said] = first
    assert "is loaded without these entries, as strict=False allows" in said
    assert "missing: model: '" in said
    assert "unexpected: model: " in said
    assert second == []
