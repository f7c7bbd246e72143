"""Models that `Accelerator.prepare` shards by shardkit train as those that it replicates."""

from __future__ import annotations

import contextlib
import importlib
import typing

import pytest
import torch
import torch.distributed as dist
from accelerate_runs import MICRO_BATCHES, Run, accelerate_ranks, make, prepare, replicated
from launched import TIMEOUT_S, forget_accelerate
from torch import nn

import shardkit

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.frameworks

# Losses lie between 1 and 6: some units in their last place; parameters are smaller than that.
TOLERANCE = 3e-6


def assert_alike(run: Run, plain: Run, tolerance: float = TOLERANCE) -> None:
    """Compare losses and norms of all steps, and the parameters in the end."""
    torch.testing.assert_close(run.losses, plain.losses, rtol=0, atol=tolerance)
    torch.testing.assert_close(run.norms, plain.norms, rtol=2e-5, atol=0)
    whole = run.parameters()
    expected = plain.model.module.state_dict()
    assert set(whole) in (set(), set(expected))
    for name, value in whole.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=name)


def train_both(name: str, plugin: dict[str, typing.Any]) -> tuple[list[str], int]:
    """Return the classes of the sharded modules, and how many parameters are sharded."""
    with accelerate_ranks():
        from transformers.distributed.fsdp import is_fsdp_managed_module

        plain = replicated(name)
        run = prepare(make(name), plugin=plugin)
        run.train(name, range(MICRO_BATCHES))
        assert_alike(run, plain)
        sharded = [
            type(m).__name__ for m in run.model.modules() if isinstance(m, shardkit.FSDPModule)
        ]
        params = list(run.model.parameters())
        assert all(isinstance(param, shardkit.ShardedTensor) for param in params)
        managed = [m for m in run.model.modules() if is_fsdp_managed_module(m)]
        assert len(managed) == len(list(run.model.modules()))
        of_optimizer = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
        assert of_optimizer == {id(param) for param in params}
        return sharded, len(params)


@pytest.mark.parametrize(
    "name", ["llama", "tied_llama", "gpt2", "vit", "mixtral", "whisper", "t5", "bert"]
)
def test_training_equals_replicated_training(spawn: Spawn, name: str) -> None:
    for sharded, _ in spawn(train_both, 2, name, {}, timeout_s=TIMEOUT_S):
        assert len(sharded) > 3


def train_under_install_alone() -> list[bool]:
    """Return whether the model is sharded under `install`, and after its end."""
    found = []
    for context in (shardkit.install(), contextlib.nullcontext()):
        with accelerate_ranks(context):
            run = prepare(make("llama"), plugin={})
            run.train("llama", range(2))
            found.append(isinstance(run.model, shardkit.FSDPModule))
    return found


def test_install_alone_suffices(spawn: Spawn) -> None:
    assert spawn(train_under_install_alone, 2, timeout_s=TIMEOUT_S) == [[True, False]] * 2


def test_ranks_need_not_divide_the_parameters(spawn: Spawn) -> None:
    spawn(train_both, 3, "tied_llama", {}, timeout_s=TIMEOUT_S)


SETTINGS = {
    "activation checkpointing": {"activation_checkpointing": True},
    "kept after forward": {"reshard_after_forward": False},
    "by size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 5_000},
    "one group": {"auto_wrap_policy": "no_wrap"},
    "on the host": {"cpu_offload": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_plugin(spawn: Spawn, settings: dict[str, typing.Any]) -> None:
    spawn(train_both, 2, "llama", settings, timeout_s=TIMEOUT_S)


def load_on_one_rank() -> None:
    """Train a model whose values only the first rank has, as transformers loads it."""
    with accelerate_ranks():
        plain = replicated("tied_llama")
        model = make("tied_llama", seed=dist.get_rank())
        run = prepare(model, plugin={"cpu_ram_efficient_loading": True})
        run.train("tied_llama", range(MICRO_BATCHES))
        assert_alike(run, plain)
        of_model = {id(param) for param in run.model.parameters()}
        [group] = run.optimizer.param_groups
        assert {id(param) for param in group["params"]} == of_model


def test_values_of_one_rank_are_sent_to_the_others(spawn: Spawn) -> None:
    spawn(load_on_one_rank, 2, timeout_s=TIMEOUT_S)


def by_address(optimizer: typing.Any, mapping: dict[int, nn.Parameter]) -> None:
    """Do as versions of Accelerate after 1.15: look for state by the addresses of parameters."""
    for group in optimizer.param_groups:
        group["params"] = [mapping[param.data_ptr] for param in group["params"]]
    for param in list(optimizer.state):
        optimizer.state[mapping[param.data_ptr()]] = optimizer.state.pop(param)


def train_with_state_from_before(is_newer: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_newer:
            module = importlib.import_module("accelerate.accelerator")
            patch.setattr(module, "fsdp2_switch_optimizer_parameters", by_address)
        with accelerate_ranks():
            plain = prepare(make("tied_llama"), optimizer=torch.optim.Adagrad)
            plain.train("tied_llama", range(MICRO_BATCHES))
            forget_accelerate()
            run = prepare(make("tied_llama"), plugin={}, optimizer=torch.optim.Adagrad)
            for param in run.model.parameters():
                total = run.optimizer.state[param]["sum"]
                assert total.to_local().shape == param.to_local().shape
            run.train("tied_llama", range(MICRO_BATCHES))
            assert_alike(run, plain, 2e-5)


@pytest.mark.parametrize("is_newer", [False, True])
def test_state_from_before_is_cut(spawn: Spawn, is_newer: bool) -> None:
    spawn(train_with_state_from_before, 2, is_newer, timeout_s=TIMEOUT_S)


def train_replicas() -> None:
    with accelerate_ranks():
        from accelerate import ParallelismConfig

        plain = replicated("llama")
        sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        run = prepare(make("llama"), plugin={}, parallelism_config=sizes)
        assert next(run.model.parameters()).device_mesh.shape == (2, 2)
        run.train("llama", range(MICRO_BATCHES))
        assert_alike(run, plain)


def test_replicas_of_a_parallelism_config(spawn: Spawn) -> None:
    spawn(train_replicas, 4, timeout_s=TIMEOUT_S)


def train_mixed() -> None:
    """Compare with `fully_shard` called by hand, with the policy that Accelerate makes."""
    with accelerate_ranks():
        run = prepare(make("llama"), plugin={}, mixed_precision="bf16")
        dtypes = set()
        layer = run.model.model.layers[0].mlp.up_proj
        layer.register_forward_pre_hook(lambda module, _: dtypes.add(module.weight.dtype))
        run.train("llama", range(MICRO_BATCHES))
        assert dtypes == {torch.bfloat16}
        assert {param.dtype for param in run.model.parameters()} == {torch.float32}
        forget_accelerate()

        def by_hand(model: nn.Module) -> None:
            policy = shardkit.MixedPrecisionPolicy(*[torch.bfloat16] * 3)
            shardkit.auto_shard(
                model, policy={"model.embed_tokens": {}, "model.layers.*": {}}, mp_policy=policy
            )

        other = prepare(make("llama"), plugin={}, mixed_precision="bf16", before=by_hand)
        other.train("llama", range(MICRO_BATCHES))
        assert run.losses == other.losses


def test_mixed_precision_is_the_policy_of_the_plugin(spawn: Spawn) -> None:
    spawn(train_mixed, 2, timeout_s=TIMEOUT_S)


def count_reductions() -> list[int]:
    """Count reduce-scatters in each of four micro-batches, of which every second one syncs."""
    with accelerate_ranks():
        run = prepare(make("llama"), plugin={})
        counts = []
        for number in range(4):
            before = sum(p.grad is not None for p in run.model.parameters())
            run.train("llama", range(number, number + 1))
            counts.append(run.model.memory_stats()["unsynced_grad_nbytes"] > 0)
            assert before == 0
        return counts


def test_accumulate_sends_nothing_between_steps(spawn: Spawn) -> None:
    assert spawn(count_reductions, 2, timeout_s=TIMEOUT_S) == [[True, False, True, False]] * 2


def train_sharded(name: str) -> None:
    """Shard before `prepare`, with an optimizer that was made before."""
    with accelerate_ranks():
        plain = replicated(name)
        model = make(name)
        for number, param in enumerate(model.parameters()):
            param.number = number
        run = prepare(model, plugin={}, before=shardkit.auto_shard)
        run.train(name, range(MICRO_BATCHES))
        assert_alike(run, plain)
        [params] = [group["params"] for group in run.optimizer.param_groups]
        assert [param.number for param in params] == list(range(len(params)))


def prepare_compiled() -> None:
    """Compile after sharding, before `prepare`; ``eager`` needs no compiler."""
    with accelerate_ranks():
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin
        from transformers.distributed.fsdp import is_fsdp_managed_module

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        llama = make("llama")
        shardkit.auto_shard(llama)
        compiled = torch.compile(llama, backend="eager")
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05)
        model, _ = accelerator.prepare(compiled, optimizer)
        assert model is compiled
        assert is_fsdp_managed_module(model.get_submodule("_orig_mod"))


def test_a_sharded_model_may_be_compiled(spawn: Spawn) -> None:
    spawn(prepare_compiled, 1, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", ["t5", "bert", "tied_llama"])
def test_a_sharded_model_stays_as_it_is(spawn: Spawn, name: str) -> None:
    spawn(train_sharded, 2, name, timeout_s=TIMEOUT_S)


def prepare_alone() -> None:
    """Prepare a model without an optimizer, and later once more with one."""
    with accelerate_ranks():
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        plain = nn.Linear(4, 3)
        inputs = torch.ones(8, 4)
        expected = plain(inputs)
        loader = torch.utils.data.DataLoader(inputs, batch_size=4)
        model, batches = accelerator.prepare(plain, loader, device_placement=[True, True])
        assert accelerator.prepare(model) is model
        assert isinstance(model, shardkit.FSDPModule)
        assert len(list(batches)) == 1
        torch.testing.assert_close(model(inputs), expected)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        known = vars(accelerator)  # What `save_state` saves.
        assert known["_models"] == [model]
        assert known["_optimizers"] == [optimizer]


def test_a_model_may_be_prepared_without_an_optimizer(spawn: Spawn) -> None:
    spawn(prepare_alone, 2, timeout_s=TIMEOUT_S)
