"""What users do besides a plain step: pickles, parameters by hand, hooks, copies, late values."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import typing

import pytest
import torch
import torch.distributed as dist
import torch_xla
from torch import nn
from torch_xla.core import xla_model
from xla_graphs import adamw, num_compiles, sharding_of
from xla_ranks import XlaRanks, on_xla

from checkpoints import assert_same
from parity import ROWS, Pair
from shardkit import (
    DeviceMesh,
    ShardedTensor,
    StateError,
    WrapError,
    apply_full,
    checkpoint,
    fully_shard,
    register_fsdp_forward_method,
    summon_full_params,
)
from shardkit.checkpoint import gather_optimizer_state, scatter_optimizer_state
from shardkit.compression import bf16_compress

if typing.TYPE_CHECKING:
    import pathlib


FOUR_PARTS = "{devices=[4]0,1,2,3}"


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().detach().cpu() for n, p in model.named_parameters()}


# --- files --------------------------------------------------------------------------------------


def test_state_dicts_are_pickled(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", adamw)
    pair.step()
    states = (pair.sharded.state_dict(), pair.optimizers[1].state_dict())
    torch.save(states, tmp_path / "saved")
    expected = whole(pair.sharded)
    plain = copy.deepcopy((pair.plain.state_dict(), pair.optimizers[0].state_dict()))
    pair.step()
    for place in (None, "cpu"):
        model_state, optimizer_state = torch.load(tmp_path / "saved", map_location=place)
        full = {n: t.full_tensor().cpu() for n, t in model_state.items()}
        assert_same(full, expected)
    pair.sharded.load_state_dict(model_state)
    pair.optimizers[1].load_state_dict(optimizer_state)
    pair.plain.load_state_dict(plain[0])
    pair.optimizers[0].load_state_dict(plain[1])
    for _ in range(2):
        pair.step()
    pair.assert_equal()


def test_the_function_of_torch_xla_saves_the_same_values(
    mesh: DeviceMesh, tmp_path: pathlib.Path
) -> None:
    model = Pair(XlaRanks(mesh), "mlp", adamw).sharded
    xla_model.save(model.state_dict(), tmp_path / "saved")
    loaded = torch.load(tmp_path / "saved", weights_only=False)
    assert_same({name: each.full_tensor().cpu() for name, each in loaded.items()}, whole(model))


def test_models_are_pickled(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", adamw)
    torch.save(pair.sharded, tmp_path / "saved")
    pair.sharded = torch.load(tmp_path / "saved", weights_only=False)
    pair.optimizers[1] = adamw(pair.sharded.parameters())
    for _ in range(2):
        pair.step()
    pair.assert_equal()
    for param in pair.sharded.parameters():
        assert sharding_of(param.local_piece) == FOUR_PARTS


def test_a_pickle_says_where_it_can_be_loaded(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    model = fully_shard(nn.Linear(3, 2).to("xla"), mesh)
    torch.save(model.state_dict(), tmp_path / "saved")
    code = f"import torch, shardkit; torch.load({str(tmp_path / 'saved')!r}, map_location='cpu')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "'weight' was saved on a mesh of 'xla' devices of shape (4,)" in done.stderr
    assert "other meshes or devices is saved by shardkit.checkpoint.save" in done.stderr


def test_training_goes_on_while_a_checkpoint_is_written(
    mesh: DeviceMesh, tmp_path: pathlib.Path
) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", adamw)
    pair.step()
    expected = whole(pair.sharded)
    handle = checkpoint.async_save(tmp_path / "saved", pair.sharded, pair.optimizers[1], step=1)
    pair.step()
    handle.result()
    other = Pair(XlaRanks(mesh), "mlp", adamw)
    assert checkpoint.load(tmp_path / "saved", other.sharded, other.optimizers[1])["step"] == 1
    assert_same(whole(other.sharded), expected)


def test_a_process_group_makes_another_for_saves_in_the_background(
    mesh: DeviceMesh, tmp_path: pathlib.Path
) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpoint.async_save(tmp_path / "saved", pair.sharded).result()
    finally:
        dist.destroy_process_group()
    other = Pair(XlaRanks(mesh), "mlp")
    other.step()
    checkpoint.load(tmp_path / "saved", other.sharded)
    assert_same(whole(other.sharded), whole(pair.sharded))


def test_there_are_no_local_files(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(3, 2).to("xla"), mesh)
    with pytest.raises(checkpoint.CheckpointError, match="no local files of meshes of 'xla'"):
        checkpoint.local_state_dict(model)


# --- parameters unsharded by hand ---------------------------------------------------------------


def squares(model: nn.Module) -> torch.Tensor:
    return typing.cast("torch.Tensor", sum(p.square().sum() for p in model.parameters()))


def test_gradients_of_parameters_used_by_hand(mesh_2d: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh_2d), "mlp")
    groups = (pair.sharded, *pair.sharded.layers)  # The root first: it takes over the others.
    for group in groups:
        group.unshard()
    for model in (pair.plain, pair.sharded):
        squares(model).backward()
    for group in groups:
        group.reshard()
    pair.assert_equal_gradients()


def test_parameters_may_be_looked_at_between_forward_and_backward(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    losses = pair.losses(pair.draw())
    layer = pair.sharded.layers[1]
    layer.unshard()
    found = layer.weight.detach().cpu()
    torch.testing.assert_close(found, pair.plain.layers[1].weight.detach(), rtol=0, atol=0)
    for loss in losses:
        loss.backward()
    pair.assert_equal_gradients()
    pair.update()
    pair.step()


def test_parameters_that_an_earlier_graph_has_left_may_be_looked_at(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", reshard_after_forward=False)
    with torch.no_grad():
        pair.losses(pair.draw())
    torch_xla.sync()
    for ours, theirs in zip(pair.sharded.layers, pair.plain.layers, strict=True):
        ours.unshard()
        assert torch.equal(ours.weight.detach().cpu(), theirs.weight.detach())
        ours.reshard()
    pair.step()


@pytest.mark.parametrize("runs_before", [False, True])
def test_by_hand_and_in_forward_in_one_backward_is_an_error(
    runs_before: bool, mesh: DeviceMesh
) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    if runs_before:
        pair.step()
    pair.sharded.layers[0].unshard()
    by_hand = pair.sharded.layers[0].weight.square().sum()
    _, loss = pair.losses(pair.draw())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + by_hand).backward()


# --- meta ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["initialize", "load", "assign"])
def test_models_without_memory_are_filled_after_sharding(way: str, mesh: DeviceMesh) -> None:
    plain = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 3))
    for module in (*model, model):
        fully_shard(module, mesh)
    with pytest.raises(StateError, match="on the meta device"):
        model(torch.randn(ROWS, 7))
    if way != "assign":
        model.to_empty(device="xla")
    if way == "initialize":
        for made in (plain, model):
            for layer in made:
                nn.init.constant_(layer.weight, 0.5)
                nn.init.zeros_(layer.bias)
    else:
        model.load_state_dict(plain.state_dict(), assign=way == "assign")
    x = torch.randn(ROWS, 7)
    torch.testing.assert_close(model(x).cpu(), plain(x), rtol=0, atol=1e-6)
    torch_xla.sync()
    for param in model.parameters():
        assert sharding_of(param.local_piece) == FOUR_PARTS


# --- settings -----------------------------------------------------------------------------------


def test_hooks_see_reduced_gradients(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    for module in (*pair.sharded.layers, pair.sharded):
        module.set_all_reduce_hook(lambda flat: flat.mul_(3))
    pair.backward(pair.draw())
    for param in pair.plain.parameters():
        param.grad *= 3
    pair.assert_equal_gradients()


def test_collectives_of_the_user_s_are_refused(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(7, 3).to("xla"), mesh)
    for setter in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(StateError, match=f"{setter.__name__}: .* on a mesh of 'xla' devices"):
            setter(object())
        setter(None)


@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_whole_parameters_are_shown_and_written_back(
    mesh: DeviceMesh, *, offload_to_cpu: bool
) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    pair.backward(pair.draw())
    sharded = dict(pair.sharded.named_parameters())
    plain = dict(pair.plain.named_parameters())
    with summon_full_params(pair.sharded, with_grads=True, offload_to_cpu=offload_to_cpu):
        for name, param in pair.sharded.named_parameters():
            assert type(param) is nn.Parameter
            assert param.device.type == ("cpu" if offload_to_cpu else "xla")
            torch.testing.assert_close(param.detach().cpu(), plain[name].detach())
            assert param.grad is not None
            with torch.no_grad():
                for each in (param, plain[name]):
                    each.mul_(0.5)
                    each.grad.mul_(3)
    assert all(param is sharded[name] for name, param in pair.sharded.named_parameters())
    pair.assert_equal_gradients()
    for name, param in pair.sharded.named_parameters():
        torch.testing.assert_close(param.full_tensor().cpu(), plain[name].detach())
    with summon_full_params(pair.sharded, writeback=False), torch.no_grad():
        next(pair.sharded.parameters()).zero_()
    first = next(pair.sharded.parameters())
    assert not first.full_tensor().cpu().eq(0).all()


def test_a_function_changes_whole_parameters(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")

    @torch.no_grad()
    def change(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.copy_(param.sum() + torch.arange(param.numel()).view(param.shape).to(param))

    for model in (pair.sharded, pair.plain):
        apply_full(model, change) if model is pair.sharded else model.apply(change)
    for mine, theirs in zip(pair.sharded.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor().cpu(), theirs.detach())


def test_whole_optimizer_state_is_gathered_and_scattered(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", adamw)
    for _ in range(2):
        pair.step()
    saved = gather_optimizer_state(pair.sharded, pair.optimizers[1])
    state = saved["state"]
    for name, param in pair.plain.named_parameters():
        expected = pair.optimizers[0].state[param]["exp_avg"]
        torch.testing.assert_close(state[name]["exp_avg"].cpu(), expected)
    other = adamw(pair.sharded.parameters())
    scatter_optimizer_state(saved, pair.sharded, other)
    for name, param in pair.sharded.named_parameters():
        found = other.state[param]["exp_avg"]
        assert isinstance(found, ShardedTensor)
        assert found.full_tensor().cpu().equal(state[name]["exp_avg"].cpu())


def test_compressed_sums_are_refused(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(7, 3).to("xla"), mesh)
    with pytest.raises(StateError, match="on a mesh of one axis, which has no all-reduce"):
        model.set_custom_all_reduce(bf16_compress)


class Quantized(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh: object) -> None: ...

    def fsdp_post_all_gather(self, *args: object) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: object) -> Quantized:
        return parts["plain"].as_subclass(Quantized)

    @property
    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_parameters_that_gather_themselves_are_refused(mesh: DeviceMesh) -> None:
    model = nn.Linear(7, 3)
    weight = model.weight.detach().to("xla").as_subclass(Quantized)
    del model.weight, model.bias
    model.bias = None
    model.weight = nn.Parameter(weight)
    with pytest.raises(WrapError, match=r"'weight' is a Quantized that gathers itself"):
        fully_shard(model, mesh)


def test_prefetches_are_chosen(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    layers = list(pair.sharded.layers)
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    layers[-1].set_modules_to_backward_prefetch(layers[:-1])
    pair.step()
    pair.sharded.set_prefetch_policy(forward=False, backward="none")
    pair.step()
    pair.assert_equal()


def test_recurrent_layers_of_torch_train_and_those_of_torch_xla_run(mesh: DeviceMesh) -> None:
    """Torch_xla replaces `nn.GRU` by its own, whose backward needs JAX."""
    plain = torch.nn.modules.rnn.GRU(5, 3, batch_first=True)
    replaced: typing.Any = nn.GRU(5, 3, batch_first=True)
    assert type(replaced) is not type(plain)
    replaced.load_state_dict(plain.state_dict())
    nets = [fully_shard(nn.Sequential(on_xla(each)), mesh) for each in (plain, replaced)]
    x = torch.randn(ROWS, 4, 5)
    with torch.no_grad():
        for net in nets:
            torch.testing.assert_close(net(x.to("xla"))[0].cpu(), plain(x)[0])
    for layer, batch in ((plain, x), (nets[0], x.to("xla"))):
        layer(batch)[0].square().mean().backward()
    torch_xla.sync()
    for ours, theirs in zip(nets[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad, rtol=0, atol=1e-6)


class Twice(nn.Linear):
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)


def test_other_methods_run_as_a_forward(mesh: DeviceMesh) -> None:
    plain = Twice(7, 3)
    model = fully_shard(on_xla(plain), mesh)
    x = torch.randn(ROWS, 7)
    register_fsdp_forward_method(model, "twice")
    outputs = plain.twice(x), model.twice(x.to("xla"))
    torch.testing.assert_close(outputs[1].cpu(), outputs[0], rtol=0, atol=1e-6)
    for output in outputs:
        output.mean().backward()
    grad = model.weight.grad.full_tensor().cpu()
    torch.testing.assert_close(grad, plain.weight.grad, rtol=0, atol=1e-6)


def test_an_average_of_weights_follows(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", adamw)
    averages = [copy.deepcopy(model) for model in (pair.plain, pair.sharded)]
    for _ in range(3):
        pair.step()
        before = num_compiles()
        with torch.no_grad():
            for average, model in zip(averages, (pair.plain, pair.sharded), strict=True):
                torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.25)
        torch_xla.sync()
    assert num_compiles() == before
    x, _ = pair.draw()
    with torch.no_grad():
        found, expected = averages[1](x.to("xla")).cpu(), averages[0](x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_autocast_and_gradient_scaling(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    x, _ = pair.draw()
    with torch.autocast("xla", torch.bfloat16):
        assert pair.sharded(x.to("xla")).dtype == torch.bfloat16
    scaler = torch.amp.GradScaler("xla", init_scale=8.0)
    optimizer = pair.optimizers[1]
    for spoils in (False, True):
        scaler.scale(pair.sharded(x.to("xla")).square().mean()).backward()
        if spoils:
            next(pair.sharded.parameters()).grad.local_piece.fill_(float("inf"))
        scaler.unscale_(optimizer)
        if not spoils:
            pair.plain(x).square().mean().backward()
            pair.assert_equal_gradients()
        before = whole(pair.sharded)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(t, before[n]) for n, t in whole(pair.sharded).items())
        assert changed != spoils
    assert scaler.get_scale() == 4.0


def test_another_learning_rate_compiles_nothing(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", adamw)
    for i in range(5):
        if i == 2:
            before = num_compiles()
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = 1e-3 * (i + 1)
        pair.step()
    assert num_compiles() == before
    pair.assert_equal()
