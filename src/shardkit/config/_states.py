"""Training state in the three shapes that fsdp_state_dict_type names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import CheckpointError

if TYPE_CHECKING:
    import os

    from torch import nn
    from torch.optim import Optimizer

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"  # Accelerate's names of files


def save(
    kind: str, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None
) -> None:
    """See `Config.save`."""
    from shardkit import checkpoint

    folder = Path(path)
    if kind == "SHARDED_STATE_DICT":
        checkpoint.save(folder, model, optimizer)
    elif kind == "LOCAL_STATE_DICT":
        state = checkpoint.local_state_dict(model, optimizer)
        file = _local_file(folder, checkpoint.get_shard_metadata(model))
        _on_all("write", file, lambda: _write(file, state))
    else:
        _on_all("make", folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        checkpoint.save_full(folder / f"{_MODEL}.bin", model)
        if optimizer is None:
            return
        whole = checkpoint.gather_optimizer_state(model, optimizer)
        file = folder / f"{_OPTIMIZER}.bin"
        _on_all("write", file, lambda: _write(file, whole) if whole else None)


def load(
    kind: str, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None
) -> None:
    """See `Config.load`."""
    from shardkit import checkpoint

    folder = Path(path)
    if kind == "SHARDED_STATE_DICT":
        checkpoint.load(folder, model, optimizer)
    elif kind == "LOCAL_STATE_DICT":
        file = _local_file(folder, checkpoint.get_shard_metadata(model))
        state = _on_all("read", file, lambda: _read(file))
        _on_all("load", file, lambda: checkpoint.load_local_state_dict(model, state, optimizer))
    else:
        checkpoint.load_full(folder / f"{_MODEL}.bin", model)
        if optimizer is not None:
            file = folder / f"{_OPTIMIZER}.bin"
            whole = _on_all("read", file, lambda: _read(file))
            checkpoint.scatter_optimizer_state(whole, model, optimizer, from_rank0=False)


def _local_file(folder: Path, described: dict[str, Any]) -> Path:
    rank, ranks = described["rank"], described["world_size"]
    return folder / f"{_MODEL}_rank-{rank:08d}-of-{ranks:08d}.pth"


def _write(file: Path, state: dict[str, Any]) -> None:
    """Write a file that is there whole, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    torch.save(state, part)
    part.replace(file)


def _read(file: Path) -> Any:
    if not file.exists():
        msg = f"{file} is not there: it is what Config.save writes with this fsdp_state_dict_type."
        raise CheckpointError(msg)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _on_all(what: str, file: Path, act: Any) -> Any:
    """Do it on each rank; raise on all of them if it fails on one."""
    from shardkit.checkpoint._agreement import agreed

    return agreed(None, f"could not {what} {file}", act)
