"""A sharded module as a stage of torch's pipelines: what those ask of FSDP2's, on each torch."""

from __future__ import annotations

import copy
import inspect
import io
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.pipelining import PipelineStage, schedules

import shardkit
from recording import recording_mesh
from shardkit import FSDPModule, StateError, fully_shard

FINALIZES = hasattr(PipelineStage, "start_gradient_reduction")  # From torch 2.15 on.
SCHEDULES = "torch.distributed.pipelining.schedules"
STAGE = "torch.distributed.pipelining.stage"
# What a schedule does, called from its module: by the caller shardkit knows it.
unshard, reshard = (
    eval(code, {"__name__": SCHEDULES})
    for code in ("lambda module: module.unshard(async_op=True)", "lambda module: module.reshard()")
)


def make_stage(*, reshard_after_forward: bool = True) -> tuple[typing.Any, list[tuple[str, int]]]:
    mesh, log = recording_mesh((2,))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for layer in model:
        fully_shard(layer, mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh, reshard_after_forward=reshard_after_forward), log


def torchs_stage(model: nn.Module) -> typing.Any:
    """Return a stage of torch that only knows its module."""
    stage: typing.Any = object.__new__(PipelineStage)
    stage.submod, stage.has_backward, stage._gradient_reduction_handle = model, True, None  # noqa: SLF001
    stage.stage_index, stage.num_stages = 1, 2
    return stage


def go_backward(model: typing.Any, kind: str, **given: typing.Any) -> typing.Any:
    """Run torch's backward of a stage."""
    if FINALIZES and isinstance(model, FSDPModule):  # Torch does so in each forward.
        model.set_manual_backward_finalization(True)
    return torchs_stage(model).backward_maybe_with_nosync(kind, given)


def reduce(model: nn.Module) -> None:
    """Run what torch runs after the last backward of a step."""
    stage = torchs_stage(model)
    if hasattr(PipelineStage, "perform_reduce_grad"):
        stage.perform_reduce_grad(1)
    else:  # Torch 2.9 does so with the last one.
        given = {"stage_output": torch.zeros(1, requires_grad=True) * 1, "output_grads": None}
        given["input_values"] = []
        stage.backward_maybe_with_nosync("full", given, last_backward=True)


def count(log: list[tuple[str, int]], what: str) -> int:
    return sum(entry == f"start {what}" for entry, _ in log)


def unsharded_nbytes(model: typing.Any) -> int:
    return int(model.memory_stats()["unsharded_nbytes"])


def forward(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.ones(3, 4, requires_grad=True)
    return x, model(x)


def go_apart(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Go backward to the inputs, then to the weights."""
    grads, groups = go_backward(
        model, "input", stage_output=[y], output_grads=[torch.ones_like(y)], input_values=[x]
    )
    assert grads[0].shape == x.shape
    go_backward(model, "weight", stage_output=[y], param_groups=groups)


def test_it_is_an_instance_of_fsdp2s_class_whose_methods_are_shardkits() -> None:
    model, _ = make_stage()
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model[0], fsdp.FSDPModule)
    for name, function in inspect.getmembers(fsdp.FSDPModule, inspect.isfunction):
        if not name.startswith("_") and hasattr(FSDPModule, name):
            assert getattr(type(model), name) is getattr(FSDPModule, name) is not function
    assert type(model[:1]) is nn.Sequential


def test_under_install_it_is_one_as_well() -> None:
    theirs = fsdp.FSDPModule
    with shardkit.install():
        model, _ = make_stage()
    assert isinstance(model, theirs)


def test_a_method_that_only_fsdp2_has_is_refused() -> None:
    model, _ = make_stage()
    with pytest.raises(StateError, match="a method of torch's FSDPModule was called on FSDPSequen"):
        model._set_unshard_async_op(True)  # noqa: SLF001 - torch's, which shardkit has not


def test_copies_and_pickles_are_stages_of_their_own() -> None:
    model, _ = make_stage()
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    state_of: typing.Any = fsdp.fully_shard.state
    for each in (model, twin, read):
        assert state_of(each).__self__.module is each


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_what_a_schedule_unshards_stays_until_it_reshards(reshard_after_forward: bool) -> None:
    model, log = make_stage(reshard_after_forward=reshard_after_forward)
    names = {name: param.shape for name, param in model.named_parameters()}
    unshard(model).wait()
    whole = unsharded_nbytes(model)
    assert whole > 0
    assert count(log, "all_gather") == 2
    for _ in range(2):
        x, y = forward(model)
        go_apart(model, x, y)
        assert unsharded_nbytes(model) == whole
        assert not any(isinstance(p, shardkit.ShardedTensor) for p in model.parameters())
    assert count(log, "all_gather") == 2
    reshard(model)
    assert unsharded_nbytes(model) == 0
    assert {name: param.shape for name, param in model.named_parameters()} == names
    assert all(isinstance(param, shardkit.ShardedTensor) for param in model.parameters())


def test_what_the_user_unshards_goes_with_the_next_forward() -> None:
    model, _ = make_stage()
    for module in model.modules():
        module.unshard()
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert unsharded_nbytes(model) == 0


def test_gradients_are_reduced_once_for_all_micro_batches() -> None:
    model, log = make_stage()
    for module in model.modules():
        unshard(module).wait()
    outputs = [forward(model) for _ in range(3)]
    log.clear()
    for x, y in outputs:
        go_apart(model, x, y)
    assert log == []
    reduce(model)
    assert count(log, "reduce_scatter") == 1  # Both groups together: they are small.
    assert unsharded_nbytes(model) == 0
    assert all(param.grad is not None for param in model.parameters())


def test_gradients_of_weights_are_kept_where_full_backwards_keep_theirs() -> None:
    """In one buffer of `reduce_dtype` for each group, not in `param_dtype` on the parameters."""
    model, _ = make_stage()
    unshard(model).wait()
    for _ in range(2):
        x, y = forward(model)
        go_apart(model, x, y)
    model.set_requires_gradient_sync(False)
    assert all(param.grad is None for param in model.parameters())
    assert model.memory_stats()["unsynced_grad_nbytes"] > 0


def test_weights_that_would_get_no_gradient_are_an_error() -> None:
    """In a stage that is not sharded itself, and where the user unshards."""
    model, _ = make_stage()
    whole = nn.Sequential(*model)
    for module in model.modules():
        module.unshard()
    for stage in (model, whole):
        x, y = forward(stage)
        # torch 2.13 wraps it.
        with pytest.raises((StateError, RuntimeError), match=r"apart|backward input") as raised:
            go_apart(stage, x, y)
        error = raised.value.__cause__ or raised.value
        assert isinstance(error, StateError)
        assert "Call fully_shard on the module that PipelineStage gets" in str(error)


def test_a_frozen_layer_in_a_stage_that_is_not_sharded_is_none() -> None:
    model, _ = make_stage()
    stage = nn.Sequential(model[0].requires_grad_(False), nn.Linear(6, 2))
    x, y = forward(stage)
    go_apart(stage, x, y)
    assert all(param.grad is not None for param in stage[1].parameters())


def test_torchs_schedules_unshard_in_the_module_by_which_they_are_known() -> None:
    assert schedules.__name__ == SCHEDULES
    assert ".unshard(async_op=True)" in inspect.getsource(schedules)


@pytest.mark.parametrize("stages", [[0, 4], [0, 1], [2, 0]])
def test_a_stage_is_not_sharded_over_the_pipeline(
    stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks of the pipeline run other stages: all would wait for each other."""
    model, _ = make_stage()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: stages)
    run = eval("lambda self, model, x: model(x)", {"__name__": STAGE})
    stage, x = torchs_stage(model), torch.ones(3, 4)
    stage.group = None
    if 1 not in stages:
        assert run(stage, model, x).shape == (3, 2)
        return
    with pytest.raises(StateError, match=r"'Linear' runs in .* ranks 0, 1; of these, 0, 1 run"):
        run(stage, model, x)
    assert model(x).shape == (3, 2), "alone it runs"
