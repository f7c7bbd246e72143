"""Directories of the transformers package as sources and targets of streaming."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from zoo import TIMEOUT_S, ZOO

from reference import OPTIMIZERS, full, my_batch, shard, train
from shardkit.checkpoint import consolidate, load_full, save, save_full
from workers import on_ranks

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.models


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(full(actual[key]), value), key


@pytest.mark.parametrize("name", ZOO)
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_there_and_back(tmp_path: pathlib.Path, name: str) -> None:
    """Stream into a sharded model, train it, and write what `from_pretrained` reads."""
    case, path = ZOO[name], tmp_path
    torch.manual_seed(dist.get_rank())  # Of which nothing is left after loading.
    plain = case.make()
    if dist.get_rank() == 0:
        # By default some models (ViT, Mixtral) are saved under the names of other code than theirs.
        plain.save_pretrained(path / "before", max_shard_size="20KB", save_original_format=False)
    dist.barrier()
    model = shard(case, case.make())
    unmatched = load_full(path / "before", model)
    assert unmatched == ([], [], [])
    expected = type(plain).from_pretrained(path / "before").state_dict()
    assert_equal(model.state_dict(), expected)

    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for _ in train(case, model, optimizer, [my_batch(case, 0)]):
        pass
    whole = {key: full(value).clone() for key, value in model.state_dict().items()}
    save_full(path / "after", model, format="safetensors", max_shard_size="20KB")
    save(path / "checkpoint", model)
    if dist.get_rank() == 0:
        consolidate(path / "checkpoint", path / "consolidated", format="safetensors")
        index = json.loads((path / "after" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
        for written in ("after", "consolidated"):
            plain.config.save_pretrained(path / written)
            loaded, report = type(plain).from_pretrained(path / written, output_loading_info=True)
            assert not report["missing_keys"]
            assert not report["unexpected_keys"]
            assert_equal(loaded.state_dict(), whole)
    dist.barrier()
