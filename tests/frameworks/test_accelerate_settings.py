"""What is refused of Accelerate's settings, and what is given back in the end."""

from __future__ import annotations

import importlib.metadata
import typing

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from accelerate_runs import accelerate_ranks, make, prepare
from launched import TIMEOUT_S, forget_accelerate, set_launchers_variables

import shardkit

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.frameworks


def refuse(plugin: dict[str, typing.Any], *, shards: str = "") -> None:
    def before(model: typing.Any) -> None:
        if shards:
            shardkit.fully_shard(model.get_submodule(shards) if shards != "root" else model)

    with accelerate_ranks():
        prepare(make("llama"), plugin=plugin, before=before)


REFUSED = {
    "fsdp1": (
        {"fsdp_version": 1, "auto_wrap_policy": "no_wrap"},
        "",
        "asked for fsdp_version=1, which wraps modules in FSDP1",
    ),
    "parts": ({}, "model", "parts of this LlamaForCausalLM are sharded, and the whole is not"),
    "too late": ({"activation_checkpointing": True}, "root", "sharded already, too late for that"),
}


@pytest.mark.parametrize(("plugin", "shards", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_contradict(
    spawn_errors: Spawn, plugin: dict[str, typing.Any], shards: str, message: str
) -> None:
    for error in spawn_errors(refuse_by_name, 2, plugin, shards, timeout_s=TIMEOUT_S):
        assert error.type_name == "IntegrationError"
        assert message in error.message


def refuse_by_name(plugin: dict[str, typing.Any], shards: str) -> None:
    refuse(plugin, shards=shards)


def use_too_late() -> None:
    from shardkit.integrations import accelerate as integration

    set_launchers_variables()
    forget_accelerate()
    try:
        prepare(make("llama"), plugin={})
        integration.use()
    finally:
        forget_accelerate()


def test_use_comes_before_the_accelerator(spawn_errors: Spawn) -> None:
    for error in spawn_errors(use_too_late, 2, timeout_s=TIMEOUT_S):
        assert error.type_name == "IntegrationError"
        assert "before Accelerator(...)" in error.message


def say_nothing_of_the_cpu(before: str) -> tuple[str, int]:
    """Make an Accelerator as `accelerate launch` has scripts make it, where nothing says CPU."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    with accelerate_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("ACCELERATE_USE_CPU")
        if before == "a state":
            PartialState()
        elif before == "no launcher":
            patch.delenv("LOCAL_RANK")
            patch.setattr(torch.accelerator, "is_available", lambda: True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        if before or dist.get_rank() > 0:
            accelerator = Accelerator(fsdp_plugin=plugin)
        else:
            with pytest.warns(UserWarning, match="no accelerator was found, so the ranks train on"):
                accelerator = Accelerator(fsdp_plugin=plugin)
        return accelerator.distributed_type.value, accelerator.num_processes


def test_ranks_of_the_cpu_train_together(spawn: Spawn) -> None:
    assert spawn(say_nothing_of_the_cpu, 2, "", timeout_s=TIMEOUT_S) == [("FSDP", 2)] * 2


@pytest.mark.parametrize(
    ("before", "cause"),
    [("a state", "a PartialState was made before"), ("no launcher", "LOCAL_RANK is not set")],
)
def test_no_rank_trains_alone(spawn: Spawn, spawn_errors: Spawn, before: str, cause: str) -> None:
    if importlib.metadata.version("accelerate").startswith("1.12."):
        # Whatever device is found, it makes one run of all ranks that WORLD_SIZE counts.
        found = spawn(say_nothing_of_the_cpu, 2, before, timeout_s=TIMEOUT_S)
        assert found == [("FSDP", 2)] * 2
        return
    for error in spawn_errors(say_nothing_of_the_cpu, 2, before, timeout_s=TIMEOUT_S):
        assert error.type_name == "IntegrationError"
        assert f"takes this rank for a run of its own, since {cause}" in error.message


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.integrations import accelerate as integration

    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.9.1")
    with pytest.raises(shardkit.IntegrationError, match=r"accelerate 1\.9\.1 is installed"):
        integration.use()


def test_a_newer_version_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.integrations import accelerate as integration

    found = importlib.metadata.version
    versions = {"accelerate": "1.99.2"}
    monkeypatch.setattr(importlib.metadata, "version", lambda of: versions.get(of) or found(of))
    with pytest.warns(UserWarning, match=r"1\.99\.2 is newer than .* with, 1\.12 to 1\.15"):
        integration.use().undo()
    integration.use().undo()


def test_what_a_newer_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.utils.fsdp_utils

    from shardkit.integrations import accelerate as integration

    before = torch_fsdp.fully_shard
    monkeypatch.delattr(accelerate.utils.fsdp_utils, "fsdp2_load_full_state_dict")
    with pytest.raises(shardkit.IntegrationError, match=r"lacks .*fsdp2_load_full_state_dict"):
        integration.use()
    assert torch_fsdp.fully_shard is before


def test_an_older_version_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is imported. Nothing stays replaced then."""
    import accelerate.accelerator
    import transformers  # noqa: F401

    from shardkit.integrations import accelerate as integration

    def version(package: str) -> str:
        return {"accelerate": "1.15.0", "transformers": "5.9.0"}[package]

    before = accelerate.accelerator.Accelerator._prepare_fsdp2, torch_fsdp.fully_shard
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(shardkit.IntegrationError, match=r"transformers 5\.9\.0 is installed"):
        integration.use()
    after = accelerate.accelerator.Accelerator._prepare_fsdp2, torch_fsdp.fully_shard
    assert after == before
    monkeypatch.undo()
    with integration.use():
        assert torch_fsdp.fully_shard is shardkit.fully_shard


def test_everything_is_given_back() -> None:
    import accelerate.accelerator
    import accelerate.state
    from accelerate.utils import fsdp_utils

    from shardkit.integrations import accelerate as integration

    def found() -> list[object]:
        return [
            accelerate.state.AcceleratorState.__init__,
            accelerate.accelerator.Accelerator._prepare_fsdp2,
            fsdp_utils.fsdp2_load_full_state_dict,
            torch_fsdp.fully_shard,
            torch_fsdp.FSDPModule,
        ]

    before = found()
    with integration.use():
        with integration.use():  # Changes nothing, and so gives nothing back.
            pass
        assert not any(now is then for now, then in zip(found(), before, strict=True))
    assert found() == before
