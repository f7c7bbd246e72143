"""Per-rank files in the form of torch_xla's FSDP, made by hand: read, described, refused."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.nn.functional as F

from shardkit import CheckpointError
from shardkit.checkpoint import consolidate
from shardkit.checkpoint._consolidate import Verification, describe, verify

if typing.TYPE_CHECKING:
    import pathlib

INNER = "_fsdp_wrapped_module.1"
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


def shards(whole: torch.Tensor, num_ranks: int, multiple: int = 1) -> list[torch.Tensor]:
    """Cut as torch_xla's wrapper does: flattened, padded, pieces padded to a multiple."""
    flat = whole.flatten()
    flat = F.pad(flat, [0, -flat.numel() % (num_ranks * multiple)])
    return list(flat.view(num_ranks, -1).clone())


def write(
    folder: pathlib.Path, num_ranks: int, multiple: int = 1
) -> tuple[list[dict[str, typing.Any]], dict[str, torch.Tensor]]:
    """Return what the ranks save of a root with a flat parameter and a module with single ones."""
    wholes = {
        "0.weight": torch.randn(5, 7),
        "0.bias": torch.randn(5),
        "1.weight": torch.randn(3, 5),
        "1.norm.running_mean": torch.randn(3),
    }
    flat = torch.cat([wholes["0.weight"].flatten(), wholes["0.bias"]])
    flat_name = f"_fsdp_shard{SEPARATOR}_fsdp_wrapped_module{SEPARATOR}flat_param_0"
    own_name = f"_fsdp_shard{SEPARATOR}_fsdp_wrapped_module{SEPARATOR}weight"
    files = []
    for rank in range(num_ranks):
        model = {
            flat_name: shards(flat, num_ranks, multiple)[rank],
            f"{INNER}.{own_name}": shards(wholes["1.weight"], num_ranks, multiple)[rank],
            f"{INNER}._fsdp_wrapped_module.norm.running_mean": wholes[
                "1.norm.running_mean"
            ].bfloat16(),
        }
        buffer = f"{INNER}._fsdp_wrapped_module._fpw_module.norm.running_mean"
        metadata = {
            "shard_info": {
                "": {
                    flat_name: {
                        "_orig_size": flat.shape,
                        "_orig_name": "_fsdp_wrapped_module.flat_param_0",
                    }
                },
                INNER: {
                    own_name: {
                        "_orig_size": torch.Size([3, 5]),
                        "_orig_name": "_fsdp_wrapped_module._fpw_module.weight",
                    }
                },
            },
            "flatten_info": {
                "_fsdp_wrapped_module.flat_param_0": (
                    ["_fpw_module.0.weight", "_fpw_module.0.bias"],
                    [torch.Size([5, 7]), torch.Size([5])],
                    [35, 5],
                )
            },
            "buffer_info": {buffer: {"_orig_dtype": torch.float32}},
            "world_size": num_ranks,
            "rank": rank,
        }
        files.append({"model": model, "shard_metadata": metadata})
        torch.save(files[-1], folder / f"m_rank-{rank:08d}-of-{num_ranks:08d}.pth")
    wholes["1.norm.running_mean"] = wholes["1.norm.running_mean"].bfloat16().float()
    return files, wholes


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 128])
def test_shards_become_whole_tensors(tmp_path: pathlib.Path, num_ranks: int, multiple: int) -> None:
    _, wholes = write(tmp_path, num_ranks, multiple)
    consolidate(tmp_path / "m", tmp_path / "whole")
    found = torch.load(tmp_path / "whole")
    assert found.keys() == wholes.keys()
    for name, whole in wholes.items():
        assert torch.equal(found[name], whole)
        assert found[name].dtype == whole.dtype


def test_they_are_described_and_verified(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 3)
    found = describe(tmp_path / "m")
    assert (found.kind, found.world_size, len(found.files)) == ("per-rank files", 3, 3)
    chunks = {entry.name: [chunk["range"] for chunk in entry.chunks] for entry in found.entries}
    assert chunks["model.0.weight"] == [[0, 14], [14, 28], [28, 35]]
    assert chunks["model.0.bias"] == [[0, 5]]
    assert chunks["model.1.norm.running_mean"] == [None]
    assert verify(tmp_path / "m") == Verification()


@pytest.mark.parametrize(
    ("module", "shard"),
    [
        ("", "_fsdp_shard.own._fsdp_shard"),
        ("inner", "_fsdp_shard_a._fsdp_shard_b"),
        (".inner", "_fsdp_shard"),
        ("in\nner", "_fsdp_shard\n"),
    ],
)
def test_shards_begin_at_their_first_mark(tmp_path: pathlib.Path, module: str, shard: str) -> None:
    info = {"_orig_size": torch.Size([2]), "_orig_name": "weight"}
    metadata = {
        "shard_info": {module: {shard: info}},
        "flatten_info": {},
        "world_size": 1,
        "rank": 0,
    }
    model = {f"{module}.{shard}" if module else shard: torch.ones(2)}
    path = tmp_path / "m_rank-00000000-of-00000001.pth"
    torch.save({"model": model, "shard_metadata": metadata}, path)
    (entry,) = describe(tmp_path / "m").entries
    assert entry.name == ".".join(filter(None, ["model", module, "weight"]))


def rewrite(folder: pathlib.Path, rank: int, state: dict[str, typing.Any]) -> None:
    torch.save(state, folder / f"m_rank-{rank:08d}-of-{2:08d}.pth")


def test_files_that_do_not_fit_are_refused(tmp_path: pathlib.Path) -> None:
    files, _ = write(tmp_path, 2)

    def message() -> str:
        with pytest.raises(CheckpointError) as raised:
            consolidate(tmp_path / "m", tmp_path / "whole")
        return str(raised.value)

    rewrite(tmp_path, 1, files[0])
    assert "are both of rank 0. Remove one" in message()
    metadata = {**files[1]["shard_metadata"], "world_size": 3}
    rewrite(tmp_path, 1, {**files[1], "shard_metadata": metadata})
    assert "written by different numbers of ranks (2, 3)" in message()
    rewrite(tmp_path, 1, {"model": files[1]["model"]})
    assert "is not of torch_xla's FSDP, as" in message()
    short = {name: value[:2] for name, value in files[1]["model"].items()}
    rewrite(tmp_path, 1, {**files[1], "model": short})
    assert "elements together, and the parameter has" in message()
    rewrite(tmp_path, 1, {**files[1], "model": {}})
    assert "has no '_fsdp_shard" in message()
    (tmp_path / f"m_rank-{1:08d}-of-{2:08d}.pth").unlink()
    assert "of 2 ranks' files those of rank 1 are missing beside" in message()
